//! How well GPT steps are predicted, on rows that lie beside the repository and never in it.
//!
//! `cargo test --release -p narrows-cost-model --test gpt -- --nocapture` prints the errors;
//! and the five-fold cross-validation; `… -- --ignored --nocapture` fits [`Framework`] again.

use std::path::Path;

use narrows_cost_model::gpt::fit::{NAMES, Row, Rows, framework, numbers};
use narrows_cost_model::gpt::fitted::{digest, was_fitted_to};
use narrows_cost_model::gpt::interval::{Certainty, certainty};
use narrows_cost_model::gpt::{FRAMEWORK, Framework, step_s};
use narrows_cost_model::measured::{
    Assumed, Errors, Gpt, Measured, Measurement, Source, Step, Subject, from_rows,
};
use narrows_cost_model::profile::{Profile, Provenance, ProvenanceKind, preset};
use narrows_plan::strategy::{Baseline, NormRule, Recompute, WeightRule, Zero};
use narrows_plan::{Mesh, Workload};

/// Draws of a bootstrap.
const DRAWS: usize = 16;
const SEED: u64 = 270;

/// A file of rows, what it does not say, and the bar on its mean error in percent.
const ROWS: [(&str, &str, Recompute, f64); 2] = [
    ("vtrain-a100-single-sample.csv", "a100-80gb-8", Recompute::None, 8.0),
    ("vtrain-a100-multi-sample.csv", "a100-80gb-8-4nic", Recompute::Block, 12.0),
];

fn rows(file: &str, hardware: &str, recompute: Recompute) -> Option<Vec<Measurement>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data").join(file);
    let Ok(text) = std::fs::read_to_string(&path) else {
        println!("skipped: {file} is not beside the repository");
        return None;
    };
    let source = Source { citation: file.into(), conditions: String::new() };
    let (name, hardware) = (file.into(), hardware.into());
    let assumed = Assumed { name, source, hardware, vocabulary: 51_200, recompute };
    Some(from_rows(&text, &Assumed { name: "rows".into(), ..assumed }).unwrap().measurements)
}

/// The profile of a file's rows, with the network's share replaced.
fn profile(name: &str, network: f64) -> Profile {
    let mut file = preset(name).unwrap().file().clone();
    file.links.inter_node.efficiency = network;
    file.resolve().unwrap()
}

fn predicted_s(row: &Measurement, profile: &Profile, framework: &Framework) -> f64 {
    let Measured::Step(step) = &row.measured else { panic!("rows are steps") };
    step_s(step, row.mesh, profile, framework).unwrap()
}

#[test]
fn rows_beside_the_repository_are_predicted() {
    for (file, hardware, recompute, bar) in ROWS {
        let Some(rows) = rows(file, hardware, recompute) else { continue };
        let profile = preset(hardware).unwrap();
        let pairs = rows
            .iter()
            .map(|row| (predicted_s(row, &profile, &FRAMEWORK), row.measured_s(&profile)));
        let errors = Errors::of(pairs).unwrap();
        println!("{file}: {errors:?}");
        assert!(errors.mean_absolute_percent < bar, "{file}: {errors:?}");
    }
}

/// Both files, fitted to together.
fn both() -> Option<(Vec<Measurement>, [Profile; 2])> {
    let found = ROWS.map(|(file, hardware, recompute, _)| rows(file, hardware, recompute));
    let [Some(single), Some(multi)] = found else { return None };
    Some(([single, multi].concat(), ROWS.map(|(_, hardware, ..)| preset(hardware).unwrap())))
}

fn counted<'a>(
    rows: impl Iterator<Item = &'a Measurement>,
    profiles: &'a [Profile; 2],
) -> Rows<'a> {
    let row = |row: &'a Measurement| {
        let Measured::Step(step) = &row.measured else { panic!("rows are steps") };
        let profile = profiles.iter().find(|profile| profile.name() == row.hardware).unwrap();
        Row { step, mesh: row.mesh, profile, measured_s: row.measured_s(profile) }
    };
    Rows::new(rows.map(row).collect())
}

/// What a fold says of the rows that it left out.
struct Held {
    across: bool,
    /// ln(measured / predicted)
    residual: f64,
    inside: bool,
}

/// Every fifth row, by a fit and a bootstrap of the other four fifths.
fn fold(rows: &[Measurement], profiles: &[Profile; 2], fold: usize, draws: usize) -> Vec<Held> {
    let of = |out: bool| {
        let own = rows.iter().enumerate().filter(move |(index, _)| (index % 5 == fold) == out);
        own.map(|(_, row)| row)
    };
    let (rest, left_out) = (counted(of(false), profiles), counted(of(true), profiles));
    let fitted = rest.fit();
    let bootstrap = rest.bootstrap(fitted, draws, fold as u64);
    let certainty = Certainty::of(&rest, &fitted, &bootstrap, provenance());
    let own = framework(&fitted);
    let network = fitted[8].clamp(0.05, 1.0);
    let held = |(row, residual): (&Row, f64)| {
        let profile = profile(row.profile.name(), network);
        let [low, high] = certainty.interval_s(row.step, row.mesh, &profile, &own).unwrap();
        assert!(low <= high && low > 0.0);
        let inside = (low..=high).contains(&row.measured_s);
        Held { across: row.across(), residual, inside }
    };
    left_out.rows().iter().zip(left_out.residuals(&fitted)).map(held).collect()
}

fn provenance() -> Provenance {
    Provenance {
        kind: ProvenanceKind::Published,
        source: "240 steps on one node and 30 on 8 to 64 nodes of the validation rows of vTrain (KAIST); \
                 draws and residuals by `cargo test --release -p narrows-cost-model --test gpt`"
            .into(),
        date: "2026-11-21".into(),
        assumed: vec![],
    }
}

/// Of the rows that each fold leaves out, nine in ten lie within their intervals, give or take what so
/// many rows can say (28 of 30 is 93 %).
#[test]
fn intervals_cover_the_rows_that_folds_leave_out() {
    let Some((rows, profiles)) = both() else { return };
    let held: Vec<Held> =
        (0..5).flat_map(|fold| self::fold(&rows, &profiles, fold, DRAWS)).collect();
    let report = |what: &str, own: &dyn Fn(&Held) -> bool| {
        let of: Vec<&Held> = held.iter().filter(|one| own(one)).collect();
        let inside = of.iter().filter(|one| one.inside).count() as f64 / of.len() as f64;
        let errors = of.iter().map(|one| ((-one.residual).exp(), 1.0));
        let mean = Errors::of(errors).unwrap().mean_absolute_percent;
        println!(
            "{what}: {} rows, mean error {mean:.2} %, {:.1} % within",
            of.len(),
            inside * 100.0
        );
        inside
    };
    let all = report("all", &|_| true);
    let within = report("one node", &|one| !one.across);
    let across = report("many nodes", &|one| one.across);
    for covered in [all, within, across] {
        assert!((0.85..=0.95).contains(&covered), "{covered}");
    }
}

#[test]
fn intervals_are_the_same_every_time_and_hold_their_prediction() {
    let certainty = certainty().unwrap();
    let profile = preset("a100-80gb-8-4nic").unwrap();
    let step = |hidden: u64, micro_batch: u64| {
        let gpt = Gpt { layers: 24, hidden, heads: 16, vocabulary: 51_200 };
        Step {
            model: Subject::Gpt(gpt),
            workload: Workload { global_batch: 64, sequence_length: 2048, micro_batch },
            strategy: Baseline::FullrankTp,
            recompute: Recompute::Block,
            norm: NormRule::Auto,
            weights: WeightRule::Any,
            zero: Zero::Off,
        }
    };
    let mut widths = vec![];
    for (tensor, data, hidden) in [(2, 1, 2048), (2, 1, 32_768), (8, 8, 2048)] {
        let mesh = Mesh { tensor, pipeline: 1, data };
        let step = step(hidden, 1);
        let time = step_s(&step, mesh, &profile, &FRAMEWORK).unwrap();
        let interval = || certainty.interval_s(&step, mesh, &profile, &FRAMEWORK).unwrap();
        let [low, high] = interval();
        assert_eq!(interval(), [low, high]);
        assert!(low < time && time < high, "{low} {time} {high}");
        widths.push((high / low).ln());
    }
    // Four octaves beyond the widest model that was measured, and across the network.
    assert!(widths[1] > 1.5 * widths[0] && widths[2] > widths[0], "{widths:?}");
}

/// Rows of the fit are told from others, whatever is assumed of them.
#[test]
fn rows_say_whether_something_was_fitted_to_them() {
    let Some((rows, profiles)) = both() else { return };
    assert_eq!(rows.iter().filter(|row| row.fitted).count(), 270);
    for row in &rows {
        let Measured::Step(step) = &row.measured else { panic!("rows are steps") };
        let (mesh, measured_s) = (row.mesh, row.measured_s(&profiles[0]));
        let assumed = Step { recompute: Recompute::Latents, ..step.as_ref().clone() };
        assert!(was_fitted_to(&assumed, mesh, measured_s));
        let mut other = assumed.clone();
        other.workload.global_batch *= 2;
        assert!(!was_fitted_to(&other, mesh, measured_s));
        assert!(!was_fitted_to(&assumed, mesh, measured_s * 1.001));
    }
}

/// Digests of the rows, sorted: no order of theirs says anything.
fn digests(rows: &[Measurement], profile: &Profile) -> String {
    let digest = |row: &Measurement| {
        let Measured::Step(step) = &row.measured else { panic!("rows are steps") };
        digest(step, row.mesh, row.measured_s(profile)).unwrap() + "\n"
    };
    let mut digests: Vec<String> = rows.iter().map(digest).collect();
    digests.sort();
    digests.concat()
}

#[test]
#[ignore = "a tool: with NARROWS_BLESS=1 writes data/fits/gpt-a100-rows.txt, which rows were fitted to"]
fn name_rows() {
    let Some((rows, profiles)) = both() else { return };
    let digests = digests(&rows, &profiles[0]);
    println!("{digests}");
    if std::env::var_os("NARROWS_BLESS").is_some() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/fits/gpt-a100-rows.txt");
        std::fs::write(path, digests).unwrap();
    }
}

#[test]
#[ignore = "a tool: prints fitted numbers; with NARROWS_BLESS=1 writes data/fits/gpt-a100.json"]
fn refit() {
    let Some((rows, profiles)) = both() else { return };
    let all = counted(rows.iter(), &profiles);
    let fitted = all.fit();
    for (name, number) in NAMES.iter().zip(&fitted) {
        println!("{name} = {number:.4e}");
    }
    let own = numbers(&FRAMEWORK, &profiles[1]);
    let bootstrap = all.bootstrap(own, DRAWS, SEED);
    let mut certainty = Certainty::of(&all, &own, &bootstrap, provenance());
    let round = |number: &mut f64| *number = (*number * 1e4).round() / 1e4;
    certainty.draws.iter_mut().flatten().for_each(round);
    certainty.within_a_node.iter_mut().for_each(round);
    certainty.across_nodes.iter_mut().for_each(round);
    certainty.sizes.iter_mut().flatten().for_each(round);
    if std::env::var_os("NARROWS_BLESS").is_some() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/fits/gpt-a100.json");
        let text = serde_json::to_string(&certainty).unwrap().replace("],[", "],\n[");
        std::fs::write(path, text + "\n").unwrap();
    }
}
