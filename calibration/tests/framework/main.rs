//! How well GPT steps are predicted, on rows that lie beside the repository and never in it.
//!
//! `cargo test --release -p narrows-calibration --test gpt -- --nocapture` prints the errors;
//! and the five-fold cross-validation; `… -- --ignored --nocapture` fits [`Framework`] again.

use std::collections::BTreeSet;
use std::path::Path;

use narrows_calibration::framework::{
    COEFFICIENT_NAMES, FITTED_FRAMEWORK, FitConditions, Framework, HoldOut, IntervalModel, StepRow,
    StepRows, fit_conditions_of, row_digest, shipped_interval_model, step_time_s,
};
use narrows_calibration::measurements::{
    Citation, GptModel, MeasuredQuantity, Measurement, TrainedModel, TrainingStep,
};
use narrows_calibration::validation::ErrorSummary;
use narrows_calibration::{CsvDefaults, measurements_from_csv};
use narrows_cost_model::profile::{Profile, Provenance, ProvenanceKind, preset};
use narrows_plan::{Mesh, Workload};
use narrows_plan::{
    Zero,
    strategy::{Baseline, NormRule, Recompute, WeightRule},
};

/// Draws of a bootstrap.
const DRAWS: usize = 16;
const SEED: u64 = 270;

/// A file of rows, what it does not say, and the bar on its mean error in percent.
const ROWS: [(&str, &str, Recompute, f64); 2] = [
    ("vtrain-a100-single-sample.csv", "a100-80gb-8", Recompute::None, 8.0),
    ("vtrain-a100-multi-sample.csv", "a100-80gb-8-4nic", Recompute::Block, 12.0),
];

fn rows(file: &str, hardware: &str, recompute: Recompute) -> Option<Vec<Measurement>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data").join(file);
    let Ok(text) = std::fs::read_to_string(&path) else {
        println!("skipped: {file} is not beside the repository");
        return None;
    };
    let source = Citation { citation: file.into(), conditions: String::new() };
    let (name, hardware) = (file.into(), hardware.into());
    let assumed = CsvDefaults { name, source, hardware, vocabulary: 51_200, recompute };
    Some(
        measurements_from_csv(&text, &CsvDefaults { name: "rows".into(), ..assumed })
            .unwrap()
            .measurements,
    )
}

/// The profile of a file's rows, with the network's share replaced.
fn profile(name: &str, network: f64) -> Profile {
    let mut file = preset(name).unwrap().file().clone();
    file.links.inter_node.efficiency = network;
    file.resolve().unwrap()
}

fn predicted_s(row: &Measurement, profile: &Profile, framework: &Framework) -> f64 {
    let MeasuredQuantity::Step(step) = &row.measured else { panic!("rows are steps") };
    step_time_s(step, row.mesh, profile, framework).unwrap()
}

#[test]
fn rows_beside_the_repository_are_predicted() {
    for (file, hardware, recompute, bar) in ROWS {
        let Some(rows) = rows(file, hardware, recompute) else { continue };
        let profile = preset(hardware).unwrap();
        let pairs = rows
            .iter()
            .map(|row| (predicted_s(row, &profile, &FITTED_FRAMEWORK), row.measured_s(&profile)));
        let errors = ErrorSummary::of(pairs).unwrap();
        println!("{file}: {errors:?}");
        assert!(errors.mean_absolute_percent < bar, "{file}: {errors:?}");
    }
}

/// What is shipped is what the search finds, so that anyone who has the rows finds it again.
#[test]
fn shipped_numbers_are_those_of_the_fit() {
    let Some((rows, profiles)) = both() else { return };
    let fitted = counted(rows.iter(), &profiles).fit();
    let shipped = FITTED_FRAMEWORK.coefficients(&profiles[1]);
    for ((name, fitted), shipped) in COEFFICIENT_NAMES.iter().zip(&fitted).zip(&shipped) {
        assert!((shipped / fitted - 1.0).abs() < 2e-3, "{name}: {shipped}, and fitted {fitted}");
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
) -> StepRows<'a> {
    let row = |row: &'a Measurement| {
        let MeasuredQuantity::Step(step) = &row.measured else { panic!("rows are steps") };
        let profile = profiles.iter().find(|profile| profile.name() == row.hardware).unwrap();
        StepRow { step, mesh: row.mesh, profile, measured_s: row.measured_s(profile) }
    };
    StepRows::new(rows.map(row).collect())
}

/// What a fold says of the rows that it left out.
struct Held {
    across: bool,
    /// ln(measured / predicted)
    residual: f64,
    inside: bool,
}

/// Rows that are left out, by a fit and a bootstrap of all others.
fn left_out(
    rows: &[Measurement],
    profiles: &[Profile; 2],
    out: impl Fn(usize, &Measurement) -> bool,
    drawn: HoldOut,
) -> Vec<Held> {
    let of = |left_out: bool| {
        let own = rows.iter().enumerate().filter(|(index, row)| out(*index, row) == left_out);
        counted(own.map(|(_, row)| row), profiles)
    };
    let (rest, left_out) = (of(false), of(true));
    let fitted = rest.fit();
    let bootstrap = rest.bootstrap(drawn, fitted, DRAWS, SEED);
    let certainty = IntervalModel::of(&rest, &fitted, &bootstrap, &bootstrap, provenance());
    let own = Framework::from_coefficients(&fitted);
    let network = fitted[8].clamp(0.05, 1.0);
    let held = |(row, residual): (&StepRow, f64)| {
        let profile = profile(row.profile.name(), network);
        let [low, high] = certainty.interval_s(row.step, row.mesh, &profile, &own).unwrap();
        assert!(low <= high && low > 0.0);
        let inside = (low..=high).contains(&row.measured_s);
        Held { across: row.crosses_nodes(), residual, inside }
    };
    left_out.rows().iter().zip(left_out.residuals(&fitted)).map(held).collect()
}

fn provenance() -> Provenance {
    Provenance {
        kind: ProvenanceKind::Published,
        source: "240 steps on one node and 30 on 8 to 64 nodes of the validation rows of vTrain (KAIST); \
                 draws and residuals by `cargo test --release -p narrows-calibration --test gpt`"
            .into(),
        date: "2026-11-22".into(),
        assumed: vec![],
    }
}

/// Prints mean error and coverage of all, those of one node and of many; the shares within.
fn report(held: &[Held]) -> [f64; 3] {
    let of = |what: &str, own: &dyn Fn(&Held) -> bool| {
        let of: Vec<&Held> = held.iter().filter(|one| own(one)).collect();
        let inside = of.iter().filter(|one| one.inside).count() as f64 / of.len() as f64;
        let errors = of.iter().map(|one| ((-one.residual).exp(), 1.0));
        let mean = ErrorSummary::of(errors).unwrap().mean_absolute_percent;
        println!(
            "{what}: {} rows, mean error {mean:.2} %, {:.1} % within",
            of.len(),
            inside * 100.0
        );
        inside
    };
    [of("all", &|_| true), of("one node", &|one| !one.across), of("many nodes", &|one| one.across)]
}

/// Of the rows that each fold leaves out, nine in ten lie within their intervals, give or take what so
/// many rows can say (28 of 30 is 93 %).
#[test]
fn intervals_cover_the_rows_that_folds_leave_out() {
    let Some((rows, profiles)) = both() else { return };
    let fold =
        |fold: usize| left_out(&rows, &profiles, |index, _| index % 5 == fold, HoldOut::Rows);
    let held: Vec<Held> = (0..5).flat_map(fold).collect();
    for covered in report(&held) {
        assert!((0.85..=0.95).contains(&covered), "{covered}");
    }
}

/// The same where all rows of a model are left out: its interval is that of a model nobody measured.
#[test]
fn intervals_cover_the_models_that_are_left_out() {
    let Some((rows, profiles)) = both() else { return };
    let model = |row: &Measurement| {
        let MeasuredQuantity::Step(step) = &row.measured else { panic!("rows are steps") };
        let TrainedModel::Gpt(gpt) = &step.model else { panic!("rows are GPTs'") };
        (gpt.hidden, gpt.layers, gpt.heads)
    };
    let models: BTreeSet<_> = rows.iter().map(model).collect();
    let one = |out| left_out(&rows, &profiles, |_, row| model(row) == out, HoldOut::Models);
    let held: Vec<Held> = models.into_iter().flat_map(one).collect();
    for covered in report(&held) {
        assert!((0.85..=0.95).contains(&covered), "{covered}");
    }
}

#[test]
fn intervals_are_the_same_every_time_and_hold_their_prediction() {
    let certainty = shipped_interval_model().unwrap();
    let profile = preset("a100-80gb-8-4nic").unwrap();
    let step = |hidden: u64, micro_batch: u64| {
        let gpt = GptModel { layers: 24, hidden, heads: 16, vocabulary: 51_200 };
        TrainingStep {
            model: TrainedModel::Gpt(gpt),
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
        let time = step_time_s(&step, mesh, &profile, &FITTED_FRAMEWORK).unwrap();
        let interval = || certainty.interval_s(&step, mesh, &profile, &FITTED_FRAMEWORK).unwrap();
        let [low, high] = interval();
        assert_eq!(interval(), [low, high]);
        assert!(low < time && time < high, "{low} {time} {high}");
        widths.push((high / low).ln());
    }
    // Four octaves beyond the widest model that was measured, and across the network.
    assert!(widths[1] > 1.5 * widths[0] && widths[2] > widths[0], "{widths:?}");
}

/// A model that nobody measured, and hardware that nothing was fitted on, are less certain.
#[test]
fn other_models_and_other_hardware_are_less_certain() {
    let certainty = shipped_interval_model().unwrap();
    let width = |profile: &Profile, layers: u64| {
        let gpt = GptModel { layers, hidden: 2048, heads: 16, vocabulary: 51_200 };
        let step = TrainingStep {
            model: TrainedModel::Gpt(gpt),
            workload: Workload { global_batch: 16, sequence_length: 1024, micro_batch: 2 },
            strategy: Baseline::FullrankTp,
            recompute: Recompute::None,
            norm: NormRule::Auto,
            weights: WeightRule::Any,
            zero: Zero::Off,
        };
        let mesh = Mesh { tensor: 2, pipeline: 1, data: 1 };
        let [low, high] = certainty.interval_s(&step, mesh, profile, &FITTED_FRAMEWORK).unwrap();
        (high / low).ln()
    };
    let a100 = preset("a100-80gb-8").unwrap();
    let own = width(&a100, 20);
    assert!(width(&a100, 21) > 1.02 * own, "{own} {}", width(&a100, 21));
    let (mut named_otherwise, mut named_alike) = (a100.file().clone(), a100.file().clone());
    named_otherwise.name = "a100-elsewhere".into();
    named_alike.device.memory_bandwidth_bytes_per_s *= 1.5;
    let made = [named_otherwise, named_alike].map(|file| file.resolve().unwrap());
    for other in made.into_iter().chain([preset("h100-sxm").unwrap()]) {
        let other = width(&other, 20);
        assert!(other > 1.3 * own, "{own} {other}");
    }
}

/// What was measured within a node says less of the network. No row is missing from what is said of other
/// models, and across nodes those are less certain too.
#[test]
fn other_models_are_less_certain_across_nodes() {
    let certainty = shipped_interval_model().unwrap();
    assert_eq!(
        [&certainty.by_row, &certainty.by_model].map(|held| held.across_nodes.len()),
        [30, 30]
    );
    let profile = preset("a100-80gb-8-4nic").unwrap();
    let width = |layers: u64, hidden: u64, heads: u64| {
        let gpt = GptModel { layers, hidden, heads, vocabulary: 51_200 };
        let step = TrainingStep {
            model: TrainedModel::Gpt(gpt),
            workload: Workload { global_batch: 64, sequence_length: 2048, micro_batch: 1 },
            strategy: Baseline::FullrankTp,
            recompute: Recompute::Block,
            norm: NormRule::Auto,
            weights: WeightRule::Any,
            zero: Zero::Off,
        };
        let mesh = Mesh { tensor: 8, pipeline: 1, data: 8 };
        let [low, high] = certainty.interval_s(&step, mesh, &profile, &FITTED_FRAMEWORK).unwrap();
        (high / low).ln()
    };
    // The model of 3.6 B parameters was measured across nodes, that of width 2048 within one alone.
    let (known, within, nowhere) = (width(30, 3072, 32), width(24, 2048, 16), width(29, 3072, 32));
    assert!(nowhere > 1.02 * known && within > 1.02 * known, "{known} {within} {nowhere}");
}

/// No row within a node recomputes: such a step is less certain than one like the rows.
#[test]
fn recomputation_that_nobody_measured_is_less_certain() {
    let certainty = shipped_interval_model().unwrap();
    let profile = preset("a100-80gb-8").unwrap();
    let width = |recompute| {
        let gpt = GptModel { layers: 20, hidden: 2048, heads: 16, vocabulary: 51_200 };
        let step = TrainingStep {
            model: TrainedModel::Gpt(gpt),
            workload: Workload { global_batch: 16, sequence_length: 1024, micro_batch: 2 },
            strategy: Baseline::FullrankTp,
            recompute,
            norm: NormRule::Auto,
            weights: WeightRule::Any,
            zero: Zero::Off,
        };
        let mesh = Mesh { tensor: 2, pipeline: 1, data: 1 };
        let [low, high] = certainty.interval_s(&step, mesh, &profile, &FITTED_FRAMEWORK).unwrap();
        (high / low).ln()
    };
    let (seen, unseen) = (width(Recompute::None), width(Recompute::Block));
    assert!(unseen > 1.1 * seen, "{seen} {unseen}");
}

/// Rows of the fit are told from others, whatever is assumed of them and however their times are rounded.
#[test]
fn rows_say_whether_something_was_fitted_to_them() {
    let Some((rows, profiles)) = both() else { return };
    assert_eq!(rows.iter().filter(|row| row.fitted).count(), 270);
    for row in &rows {
        let MeasuredQuantity::Step(step) = &row.measured else { panic!("rows are steps") };
        let (mesh, measured_s) = (row.mesh, row.measured_s(&profiles[0]));
        let own = profiles.iter().find(|profile| profile.name() == row.hardware).unwrap();
        let terms = fit_conditions_of(step, mesh, measured_s).unwrap();
        assert!(terms.match_step(step, own), "{terms:?}");
        let two_digits: f64 = format!("{measured_s:.1e}").parse().unwrap();
        for rounded in [two_digits, measured_s * 0.96, measured_s * 1.04] {
            assert_eq!(
                fit_conditions_of(step, mesh, rounded),
                Some(terms),
                "{rounded} for {measured_s}"
            );
        }
        let recompute = match step.recompute {
            Recompute::None => Recompute::Block,
            _ => Recompute::None,
        };
        let assumed = TrainingStep { recompute, ..step.as_ref().clone() };
        assert_eq!(fit_conditions_of(&assumed, mesh, measured_s), Some(terms));
        assert!(
            !terms.match_step(&assumed, own)
                && !terms.match_step(step, &preset("a100-80gb").unwrap())
        );
        let mut other = assumed.clone();
        other.workload.global_batch *= 2;
        assert_eq!(fit_conditions_of(&other, mesh, measured_s), None);
        assert_eq!(fit_conditions_of(step, mesh, measured_s * 1.2), None);
    }
}

/// Digests of the rows below the terms of their file, sorted: no order of theirs says anything.
fn digests(rows: &[Measurement], profiles: &[Profile; 2]) -> String {
    let of_one = |profile: &Profile| {
        let own = rows.iter().filter(|row| row.hardware == profile.name());
        let digest = |row: &Measurement| {
            let MeasuredQuantity::Step(step) = &row.measured else { panic!("rows are steps") };
            let TrainedModel::Gpt(gpt) = step.model else { panic!("rows are steps of GPTs") };
            let (hardware, recompute) = (row.hardware.clone(), step.recompute);
            let terms = FitConditions { hardware, recompute, vocabulary: gpt.vocabulary };
            let digest = row_digest(step, row.mesh, row.measured_s(profile)).unwrap();
            (terms.labels().join(" "), digest)
        };
        let mut digests: Vec<(String, String)> = own.map(digest).collect();
        digests.sort();
        let heading = digests[0].0.clone();
        assert!(
            digests.iter().all(|(terms, _)| *terms == heading),
            "one file is on the same terms"
        );
        let lines = digests.into_iter().map(|(_, digest)| digest + "\n");
        format!("{heading}\n{}", lines.collect::<String>())
    };
    profiles.iter().map(of_one).collect()
}

#[test]
#[ignore = "a tool: with NARROWS_BLESS=1 writes calibration/data/fits/gpt-a100-rows.txt, which rows were fitted to"]
fn name_rows() {
    let Some((rows, profiles)) = both() else { return };
    let digests = digests(&rows, &profiles);
    println!("{digests}");
    if std::env::var_os("NARROWS_BLESS").is_some() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/fits/gpt-a100-rows.txt");
        std::fs::write(path, digests).unwrap();
    }
}

#[test]
#[ignore = "a tool: prints fitted numbers; with NARROWS_BLESS=1 writes calibration/data/fits/gpt-a100.json"]
fn refit() {
    let Some((rows, profiles)) = both() else { return };
    let all = counted(rows.iter(), &profiles);
    let fitted = all.fit();
    for (name, number) in COEFFICIENT_NAMES.iter().zip(&fitted) {
        println!("{name} = {number:.4e}");
    }
    let own = FITTED_FRAMEWORK.coefficients(&profiles[1]);
    let [by_row, by_model] =
        [HoldOut::Rows, HoldOut::Models].map(|drawn| all.bootstrap(drawn, own, DRAWS, SEED));
    let mut certainty = IntervalModel::of(&all, &own, &by_row, &by_model, provenance());
    let round = |number: &mut f64| *number = (*number * 1e4).round() / 1e4;
    for held in [&mut certainty.by_row, &mut certainty.by_model] {
        held.draws.iter_mut().flatten().for_each(round);
        held.within_a_node.iter_mut().for_each(round);
        held.across_nodes.iter_mut().for_each(round);
    }
    certainty.log_size_ranges.iter_mut().flatten().for_each(round);
    if std::env::var_os("NARROWS_BLESS").is_some() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/fits/gpt-a100.json");
        let text = serde_json::to_string(&certainty).unwrap().replace("],[", "],\n[");
        std::fs::write(path, text + "\n").unwrap();
    }
}
