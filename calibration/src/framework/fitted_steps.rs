//! Recognises the steps that the tables were fitted to, which must not count as predicted.
//!
//! A step is recognised by its sizes (those of its model, its workload and its mesh), and by a time within 5 % of the published
//! one, so that rounded times are recognised too. No other property of a step counts: some change no price.

use std::sync::LazyLock;

use narrows_plan::{Mesh, Workload};

use crate::measurements::{DecoderModel, MeasuredQuantity, Measurement, TrainingStep};
use crate::step_rows::measurements_from_rows;

/// The rows of the fits; `refit_tables` repeats the fits.
const ROWS: &str = include_str!("../../data/fits/framework-rows.json");

/// Largest relative difference of a time from that of its row.
const TIME_TOLERANCE: f64 = 0.05;

/// Whether a table was fitted to this step.
pub(crate) fn is_fitted_step(step: &TrainingStep, mesh: Mesh, measured_s: f64) -> bool {
    static KNOWN: LazyLock<Vec<Measurement>> = LazyLock::new(|| {
        measurements_from_rows(ROWS, "rows", None).map_or_else(|_| vec![], |file| file.measurements)
    });
    let sizes = sizes(step);
    sizes.is_some()
        && KNOWN.iter().any(|row| {
            matches!(&row.measured, MeasuredQuantity::Step(known) if self::sizes(known) == sizes)
                && row.mesh == mesh
                && (measured_s / row.value - 1.0).abs() < TIME_TOLERANCE
        })
}

/// Sizes of the model and the workload; `None` for a model with a plan, which no table prices.
fn sizes(step: &TrainingStep) -> Option<(DecoderModel, Workload)> {
    step.decoder().map(|(model, _)| (model, step.workload))
}

#[cfg(test)]
mod tests {
    use narrows_plan::strategy::Baseline;

    use super::*;

    #[test]
    fn the_rows_of_the_fits_are_recognised() {
        let file = measurements_from_rows(ROWS, "rows", None).unwrap();
        assert_eq!(file.measurements.len(), 73);
        for row in &file.measurements {
            let MeasuredQuantity::Step(step) = &row.measured else { panic!("a step") };
            assert!(is_fitted_step(step, row.mesh, 1.01 * row.value), "{}", row.name);
            assert!(!is_fitted_step(step, row.mesh, 1.2 * row.value), "{}", row.name);

            // Names of a sharding that is none, and settings of planned steps.
            let mut other = step.as_ref().clone();
            other.strategy = Baseline::of_dense_model(true);
            other.overlap_tensor_collectives = true;
            assert!(is_fitted_step(&other, row.mesh, row.value), "{}", row.name);
            other.workload.sequence_length += 1;
            assert!(!is_fitted_step(&other, row.mesh, row.value), "{}", row.name);
        }
    }
}
