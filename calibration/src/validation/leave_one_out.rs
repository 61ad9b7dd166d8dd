//! Leave-one-out errors of fitted step times.
//!
//! One number is fitted to the steps of an executor: the factor of a step's time over that of its kernels. It makes the
//! geometric mean of measured over predicted equal to 1. Without measurement i of n the prediction is
//!
//! ```text
//! predicted without i = predicted · (∏ measuredⱼ / predictedⱼ over j ≠ i)^(1/(n − 1))
//! ```
//! Steps of GPTs have nine fitted coefficients, which the tests of [`framework`](crate::framework) cross-validate.

use narrows_cost_model::Executor;

use super::compare::ComparedMeasurement;
use crate::measurements::{MeasuredQuantity, TrainedModel};

/// Largest |ln| of the geometric mean of measured over predicted for which measurements count as those of the fit.
const FITTED_WITHIN: f64 = 0.005;

/// A measurement predicted by a fit to the other measurements.
pub struct LeftOutMeasurement<'a> {
    /// The measurement.
    pub measurement: &'a ComparedMeasurement<'a>,
    /// The predicted time in seconds.
    pub predicted_s: f64,
}

impl LeftOutMeasurement<'_> {
    /// predicted / measured − 1.
    pub fn error(&self) -> f64 {
        self.predicted_s / self.measurement.measured_s - 1.0
    }
}

/// File, hardware and executor of a fitted factor.
type FactorKey<'a> = (&'a str, &'a str, Executor);

/// Leaves out in turn each measurement that a step factor was fitted to. Files, hardware and executors whose factor was fitted
/// to other measurements, or to only one, are skipped.
pub fn leave_one_out<'a>(compared: &'a [ComparedMeasurement<'a>]) -> Vec<LeftOutMeasurement<'a>> {
    let mut groups: Vec<(FactorKey, Vec<&ComparedMeasurement>)> = vec![];
    for entry in compared.iter().filter(|entry| entry.fitted && is_planned_step(entry)) {
        let measurement = entry.measurement;
        let key = (entry.file, measurement.hardware.as_str(), measurement.executor);
        match groups.iter_mut().find(|(known, _)| *known == key) {
            Some((_, measurements)) => measurements.push(entry),
            None => groups.push((key, vec![entry])),
        }
    }
    groups.iter().flat_map(|(_, measurements)| leave_each_out(measurements)).collect()
}

fn is_planned_step(entry: &ComparedMeasurement) -> bool {
    match &entry.measurement.measured {
        MeasuredQuantity::Step(step) => {
            !matches!(step.model, TrainedModel::Gpt(_)) && entry.step_factor != 1.0
        }
        _ => false,
    }
}

fn leave_each_out<'a>(measurements: &[&'a ComparedMeasurement<'a>]) -> Vec<LeftOutMeasurement<'a>> {
    let log_ratio = |entry: &ComparedMeasurement| (entry.measured_s / entry.predicted_s).ln();
    let sum = measurements.iter().map(|entry| log_ratio(entry)).sum::<f64>();
    let count = measurements.len() as f64;
    if measurements.len() < 2 || (sum / count).abs() > FITTED_WITHIN {
        return vec![];
    }
    let left_out = |entry: &&'a ComparedMeasurement<'a>| {
        let others = (sum - log_ratio(entry)) / (count - 1.0);
        LeftOutMeasurement { measurement: entry, predicted_s: entry.predicted_s * others.exp() }
    };
    measurements.iter().map(left_out).collect()
}
