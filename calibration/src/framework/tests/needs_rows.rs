//! Errors of predicted steps and coverage of intervals, on the rows of the fit.
//!
//! `cargo test --release -p narrows-calibration needs_rows -- --ignored --nocapture` prints the errors and the five-fold
//! cross-validation. `narrows_test_support::rows` says where the rows are looked for.

use std::collections::BTreeSet;

use narrows_cost_model::profile::{Profile, preset};
use narrows_test_support::rows::rows_folder;

use super::super::coefficients::{COEFFICIENT_NAMES, NETWORK};
use super::super::fit::{FrameworkStep, HoldOut};
use super::super::interval::IntervalModel;
use super::super::model::FrameworkModel;
use super::super::refit::{DRAWS, FrameworkRows, ROW_FILES, SEED, gpt_step, provenance};
use super::super::{FITTED_FRAMEWORK, fit_conditions_of, step_time_s};
use crate::measurements::{Measurement, StepRecompute, TrainingStep};
use crate::validation::ErrorSummary;

/// Largest accepted mean errors of [`ROW_FILES`], in percent.
const MEAN_ERRORS_MAX: [f64; 2] = [8.0, 12.0];

fn all_rows() -> FrameworkRows {
    FrameworkRows::read(&rows_folder()).unwrap()
}

/// A profile with another efficiency of the network.
fn profile(name: &str, efficiency: f64) -> Profile {
    let mut file = preset(name).unwrap().file().clone();
    file.links.inter_node.efficiency = efficiency;
    file.resolve().unwrap()
}

fn predicted_s(row: &Measurement, profile: &Profile) -> f64 {
    let (step, _) = gpt_step(row).unwrap();
    step_time_s(step, row.mesh, profile, &FITTED_FRAMEWORK).unwrap()
}

#[test]
#[ignore = "needs NARROWS_ROWS"]
fn mean_errors_of_the_rows_are_small() {
    let rows = all_rows();
    for ((file, profile), error_max) in ROW_FILES.iter().zip(&rows.profiles).zip(MEAN_ERRORS_MAX) {
        let own = rows.rows.iter().filter(|row| row.hardware == file.hardware);
        let pairs = own.map(|row| (predicted_s(row, profile), row.measured_s(profile)));
        let errors = ErrorSummary::of(pairs).unwrap();
        println!("{}: {errors:?}", file.name);
        assert!(errors.mean_absolute_percent < error_max, "{}: {errors:?}", file.name);
    }
}

/// The shipped coefficients are reproducible from the rows.
#[test]
#[ignore = "needs NARROWS_ROWS"]
fn shipped_coefficients_are_those_of_the_fit() {
    let rows = all_rows();
    let fitted = rows.select(|_, _| true).fit();
    let shipped = FITTED_FRAMEWORK.coefficients(&rows.profiles[1]);
    for ((name, fitted), shipped) in COEFFICIENT_NAMES.iter().zip(&fitted).zip(&shipped) {
        assert!((shipped / fitted - 1.0).abs() < 2e-3, "{name}: {shipped}, and fitted {fitted}");
    }
}

/// The shipped digests are those of the rows.
#[test]
#[ignore = "needs NARROWS_ROWS"]
fn shipped_digests_are_those_of_the_rows() {
    let shipped = include_str!("../../../data/fits/gpt-a100-rows.txt");
    assert!(all_rows().digests() == shipped, "the digests differ");
}

/// A row that a fit left out.
struct HeldOutRow {
    crosses_nodes: bool,
    /// ln(measured / predicted).
    residual: f64,
    in_interval: bool,
}

/// The rows that `is_held_out` selects, with the fit and the bootstrap of all others.
fn hold_out(
    rows: &FrameworkRows,
    is_held_out: impl Fn(usize, &Measurement) -> bool,
    unit: HoldOut,
) -> Vec<HeldOutRow> {
    let select = |held_out: bool| rows.select(|index, row| is_held_out(index, row) == held_out);
    let (rest, held_out) = (select(false), select(true));
    let fitted = rest.fit();
    let bootstrap = rest.bootstrap(unit, fitted, DRAWS, SEED);
    let intervals = IntervalModel::of(&rest, &fitted, &bootstrap, &bootstrap, provenance());
    let framework = FrameworkModel::from_coefficients(&fitted);
    let efficiency = fitted[NETWORK].clamp(0.05, 1.0);
    let held_out_row = |(row, residual): (&FrameworkStep, f64)| {
        let profile = profile(row.profile.name(), efficiency);
        let [low, high] = intervals.interval_s(row.step, row.mesh, &profile, &framework).unwrap();
        assert!(low <= high && low > 0.0);
        let in_interval = (low..=high).contains(&row.measured_s);
        HeldOutRow { crosses_nodes: row.crosses_nodes(), residual, in_interval }
    };
    held_out.rows().iter().zip(held_out.residuals(&fitted)).map(held_out_row).collect()
}

/// Prints mean error and coverage of all rows, of the rows within a node and of the rows across nodes. Returns the
/// coverages.
fn report(rows: &[HeldOutRow]) -> [f64; 3] {
    let coverage = |name: &str, filter: &dyn Fn(&HeldOutRow) -> bool| {
        let selected: Vec<&HeldOutRow> = rows.iter().filter(|row| filter(row)).collect();
        let inside = selected.iter().filter(|row| row.in_interval).count();
        let covered = inside as f64 / selected.len() as f64;
        let errors = selected.iter().map(|row| ((-row.residual).exp(), 1.0));
        let mean = ErrorSummary::of(errors).unwrap().mean_absolute_percent;
        println!(
            "{name}: {} rows, mean error {mean:.2} %, {:.1} % within",
            selected.len(),
            covered * 100.0
        );
        covered
    };
    [
        coverage("all", &|_| true),
        coverage("one node", &|row| !row.crosses_nodes),
        coverage("many nodes", &|row| row.crosses_nodes),
    ]
}

/// The range of accepted coverages allows for the number of rows: 28 of 30 is 93 %.
#[test]
#[ignore = "needs NARROWS_ROWS"]
fn intervals_cover_the_rows_that_folds_leave_out() {
    let rows = all_rows();
    let fold = |fold: usize| hold_out(&rows, |index, _| index % 5 == fold, HoldOut::Rows);
    let held_out: Vec<HeldOutRow> = (0..5).flat_map(fold).collect();
    for covered in report(&held_out) {
        assert!((0.85..=0.95).contains(&covered), "{covered}");
    }
}

/// All rows of a model are left out together, so its intervals are those of an unmeasured model.
#[test]
#[ignore = "needs NARROWS_ROWS"]
fn intervals_cover_the_models_that_are_left_out() {
    let rows = all_rows();
    let model = |row: &Measurement| {
        let (_, gpt) = gpt_step(row).unwrap();
        (gpt.hidden, gpt.layers, gpt.heads)
    };
    let models: BTreeSet<_> = rows.rows.iter().map(model).collect();
    let hold_out_model =
        |held_out| hold_out(&rows, |_, row| model(row) == held_out, HoldOut::Models);
    let held_out: Vec<HeldOutRow> = models.into_iter().flat_map(hold_out_model).collect();
    for covered in report(&held_out) {
        assert!((0.85..=0.95).contains(&covered), "{covered}");
    }
}

/// Rows are recognised whatever recomputation is assumed, and with rounded times.
#[test]
#[ignore = "needs NARROWS_ROWS"]
fn rows_of_the_fit_are_recognised() {
    let FrameworkRows { rows, profiles } = all_rows();
    assert_eq!(rows.iter().filter(|row| row.fitted).count(), 270);
    for row in &rows {
        let (step, _) = gpt_step(row).unwrap();
        let (mesh, measured_s) = (row.mesh, row.measured_s(&profiles[0]));
        let profile = profiles.iter().find(|profile| profile.name() == row.hardware).unwrap();
        let conditions = fit_conditions_of(step, mesh, measured_s).unwrap();
        assert!(conditions.apply_to(step, profile), "{conditions:?}");
        let two_digits: f64 = format!("{measured_s:.1e}").parse().unwrap();
        for rounded in [two_digits, measured_s * 0.96, measured_s * 1.04] {
            assert_eq!(
                fit_conditions_of(step, mesh, rounded),
                Some(conditions),
                "{rounded} for {measured_s}"
            );
        }
        let recompute = match step.recompute {
            StepRecompute::None => StepRecompute::Block,
            _ => StepRecompute::None,
        };
        let assumed = TrainingStep { recompute, ..step.clone() };
        assert_eq!(fit_conditions_of(&assumed, mesh, measured_s), Some(conditions));
        assert!(
            !conditions.apply_to(&assumed, profile)
                && !conditions.apply_to(step, &preset("a100-80gb").unwrap())
        );
        let mut other = assumed.clone();
        other.workload.global_batch *= 2;
        assert_eq!(fit_conditions_of(&other, mesh, measured_s), None);
        assert_eq!(fit_conditions_of(step, mesh, measured_s * 1.2), None);
    }
}
