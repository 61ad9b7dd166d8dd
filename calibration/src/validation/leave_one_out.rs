//! Leave-one-out errors of fitted step times.
//!
//! One number is fitted to the steps of an executor: its time of a step beyond kernels, or, where it has none, the factor of a
//! step's time over that of its kernels. Σ ln(measured / predicted) is 0 over the steps of the fit. Without measurement i the
//! prediction is
//!
//! ```text
//! predicted without i = predicted + x  or  predicted · eˣ,   Σ ln(measuredⱼ / predicted without i, of j) = 0 over j ≠ i
//! ```
//! Steps of GPTs have nine fitted coefficients, which the tests of [`framework`](crate::framework) cross-validate.

use narrows_cost_model::Executor;

use super::compare::ComparedMeasurement;
use crate::measurements::{MeasuredQuantity, TrainedModel};

/// Largest |ln| of the geometric mean of measured over predicted for which measurements count as those of the fit.
const FITTED_WITHIN: f64 = 0.005;
/// Largest change of a fitted number by leaving out a step: seconds, or the logarithm of a factor.
const RANGE_MAX: f64 = 10.0;
/// Halvings of that range, to less than a nanosecond.
const BISECTIONS: u32 = 60;

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

/// File, hardware and executor of a fitted number.
type FitKey<'a> = (&'a str, &'a str, Executor);

/// Leaves out in turn each measurement that the number of an executor was fitted to. Files, hardware and executors whose number
/// was fitted to other measurements, or to only one, are skipped.
pub fn leave_one_out<'a>(compared: &'a [ComparedMeasurement<'a>]) -> Vec<LeftOutMeasurement<'a>> {
    let mut groups: Vec<(FitKey, Vec<&ComparedMeasurement>)> = vec![];
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
            !matches!(step.model, TrainedModel::Gpt(_))
                && (entry.step_factor != 1.0 || entry.step_s > 0.0)
        }
        _ => false,
    }
}

fn leave_each_out<'a>(measurements: &[&'a ComparedMeasurement<'a>]) -> Vec<LeftOutMeasurement<'a>> {
    let log_ratios = |measurements: &[&ComparedMeasurement], x: f64| -> f64 {
        measurements.iter().map(|entry| (entry.measured_s / refitted_s(entry, x)).ln()).sum()
    };
    let count = measurements.len() as f64;
    if measurements.len() < 2 || (log_ratios(measurements, 0.0) / count).abs() > FITTED_WITHIN {
        return vec![];
    }
    let left_out = |(index, entry): (usize, &&'a ComparedMeasurement<'a>)| {
        let others = [&measurements[..index], &measurements[index + 1..]].concat();
        // The sum falls as x rises.
        let mut low = if entry.step_s > 0.0 { -entry.step_s } else { -RANGE_MAX };
        let mut high = RANGE_MAX;
        for _ in 0..BISECTIONS {
            let middle = (low + high) / 2.0;
            if log_ratios(&others, middle) > 0.0 { low = middle } else { high = middle }
        }
        LeftOutMeasurement { measurement: entry, predicted_s: refitted_s(entry, high) }
    };
    measurements.iter().enumerate().map(left_out).collect()
}

/// The prediction with another value of the fitted number: x seconds more, or eˣ times the factor.
fn refitted_s(entry: &ComparedMeasurement, x: f64) -> f64 {
    if entry.step_s > 0.0 { entry.predicted_s + x } else { entry.predicted_s * x.exp() }
}
