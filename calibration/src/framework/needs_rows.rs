//! Errors of predicted steps of GPTs, and coverage of their intervals, on the rows of the fit of `megatron-deepspeed`.
//!
//! `cargo test --release -p narrows-calibration needs_rows -- --ignored --nocapture` prints them.
//! `narrows_test_support::rows` says where the rows are looked for.

use std::fs;

use narrows_cost_model::profile::preset;
use narrows_plan::strategy::Recompute;
use narrows_test_support::rows::rows_folder;

use super::fitted_rows::row_digest;
use super::{
    FitConditions, FrameworkTable, LeftOut, PredictedRow, TableParameter, TableRows,
    fit_conditions_of,
};
use crate::measurements::{
    Citation, MeasuredQuantity, Measurement, StepRecompute, TrainedModel, TrainingStep,
};
use crate::{CsvDefaults, measurements_from_csv};

/// A file of rows, with the properties that it does not state.
struct RowFile {
    name: &'static str,
    hardware: &'static str,
    recompute: Recompute,
    /// Largest accepted mean errors in percent: of the fit, and with models left out.
    errors_max: [f64; 2],
}

/// The files of the fit: within a node, and across nodes.
const ROW_FILES: [RowFile; 2] = [
    RowFile {
        name: "vtrain-a100-single-sample.csv",
        hardware: "a100-80gb-8",
        recompute: Recompute::None,
        errors_max: [5.4, 5.5],
    },
    RowFile {
        name: "vtrain-a100-multi-sample.csv",
        hardware: "a100-80gb-8-4nic",
        recompute: Recompute::Block,
        errors_max: [8.6, 8.6],
    },
];

/// The values that were fitted.
const FITTED: [TableParameter; 6] = [
    TableParameter::Memory,
    TableParameter::Operator,
    TableParameter::Block,
    TableParameter::Step,
    TableParameter::Lockstep,
    TableParameter::DeviceOperator,
];

impl RowFile {
    fn read(&self) -> Vec<Measurement> {
        let text = fs::read_to_string(rows_folder().join(self.name)).unwrap();
        let source = Citation { citation: self.name.into(), conditions: String::new() };
        let (name, hardware) = ("rows".into(), self.hardware.into());
        let recompute = self.recompute;
        let defaults = CsvDefaults { name, source, hardware, vocabulary: 51_200, recompute };
        measurements_from_csv(&text, &defaults).unwrap().measurements
    }
}

fn all_rows() -> Vec<Measurement> {
    ROW_FILES.iter().flat_map(RowFile::read).collect()
}

fn step_of(row: &Measurement) -> &TrainingStep {
    let MeasuredQuantity::Step(step) = &row.measured else { panic!("a step") };
    step
}

/// Ratios of fitted to shipped values, and predictions by fits that leave groups of rows out.
fn predict(left_out: LeftOut) -> (Vec<f64>, Vec<PredictedRow>) {
    let table = FrameworkTable::built_in("megatron-deepspeed").unwrap();
    TableRows::of(table, all_rows(), &[]).unwrap().predict(&FITTED, left_out)
}

/// Mean absolute error in percent and the share of rows in their interval, on the hardware of a file.
fn summary(file: &RowFile, predicted: &[PredictedRow]) -> [f64; 2] {
    let own: Vec<_> = predicted.iter().filter(|row| row.hardware == file.hardware).collect();
    let error = |row: &&PredictedRow| 100.0 * ((-row.residual).exp() - 1.0).abs();
    let mean = own.iter().map(error).sum::<f64>() / own.len() as f64;
    let inside = own.iter().filter(|row| row.inside).count();
    println!("{}: mean error {mean:.2} %, {inside} of {} within", file.name, own.len());
    [mean, inside as f64 / own.len() as f64]
}

#[test]
#[ignore = "needs NARROWS_ROWS"]
fn shipped_values_are_those_of_the_fit() {
    let (ratios, predicted) = predict(LeftOut::Nothing);
    assert!(ratios.iter().all(|ratio| (ratio - 1.0).abs() < 0.02), "{ratios:?}");
    for file in &ROW_FILES {
        let [mean, _] = summary(file, &predicted);
        assert!(mean < file.errors_max[0], "{}: {mean}", file.name);
    }
}

/// All rows of a model are left out together, as those of an unmeasured model are.
#[test]
#[ignore = "needs NARROWS_ROWS"]
fn intervals_cover_the_models_that_are_left_out() {
    let (_, predicted) = predict(LeftOut::Models);
    for file in &ROW_FILES {
        let [mean, covered] = summary(file, &predicted);
        assert!(mean < file.errors_max[1], "{}: {mean}", file.name);
        assert!((0.85..=0.95).contains(&covered), "{}: {covered}", file.name);
    }
}

/// The shipped digests are those of the rows, under the conditions of each file, sorted to hide the order of the rows.
#[test]
#[ignore = "needs NARROWS_ROWS"]
fn shipped_digests_are_those_of_the_rows() {
    let of_file = |file: &RowFile| {
        let (profile, rows) = (preset(file.hardware).unwrap(), file.read());
        let TrainedModel::Gpt(gpt) = step_of(&rows[0]).model else { panic!("a GPT") };
        let (hardware, recompute) = (file.hardware.to_owned(), step_of(&rows[0]).recompute);
        let conditions = FitConditions { hardware, recompute, vocabulary: gpt.vocabulary };
        let digest = |row: &Measurement| {
            row_digest(step_of(row), row.mesh, row.measured_s(&profile)).unwrap() + "\n"
        };
        let mut digests: Vec<String> = rows.iter().map(digest).collect();
        digests.sort();
        format!("{}\n{}", conditions.labels().join(" "), digests.concat())
    };
    let shipped = include_str!("../../data/fits/gpt-a100-rows.txt");
    assert!(ROW_FILES.iter().map(of_file).collect::<String>() == shipped, "the digests differ");
}

/// Rows are recognised whatever recomputation is assumed, and with rounded times.
#[test]
#[ignore = "needs NARROWS_ROWS"]
fn rows_of_the_fit_are_recognised() {
    let (rows, profiles) = (all_rows(), ROW_FILES.map(|file| preset(file.hardware).unwrap()));
    assert_eq!(rows.iter().filter(|row| row.fitted).count(), 270);
    for row in &rows {
        let (step, mesh, measured_s) = (step_of(row), row.mesh, row.measured_s(&profiles[0]));
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
