//! Leave-one-out errors of fitted step times.
//!
//! One number is fitted to the steps of an executor: the factor of a step's time over that of its kernels. It makes the
//! geometric mean of measured over predicted equal to 1. Without figure i of n the prediction is
//!
//! ```text
//! predicted without i = predicted · (∏ measuredⱼ / predictedⱼ over j ≠ i)^(1/(n − 1))
//! ```
//! Steps of GPTs have nine fitted coefficients, which the tests of [`framework`](crate::framework) cross-validate.

use narrows_cost_model::Executor;

use super::compare::ComparedFigure;
use crate::measurements::{MeasuredQuantity, TrainedModel};

/// Largest |ln| of the geometric mean of measured over predicted for which figures count as those of the fit.
const FITTED_WITHIN: f64 = 0.005;

/// A figure predicted by a fit to the other figures.
pub struct LeftOutFigure<'a> {
    /// The figure.
    pub figure: &'a ComparedFigure<'a>,
    /// The predicted time in seconds.
    pub predicted_s: f64,
}

impl LeftOutFigure<'_> {
    /// predicted / measured − 1.
    pub fn error(&self) -> f64 {
        self.predicted_s / self.figure.measured_s - 1.0
    }
}

/// File, hardware and executor of a fitted factor.
type FactorKey<'a> = (&'a str, &'a str, Executor);

/// Leaves out in turn each figure that a step factor was fitted to. Files, hardware and executors whose factor was fitted
/// to other figures, or to only one, are skipped.
pub fn leave_one_out<'a>(compared: &'a [ComparedFigure<'a>]) -> Vec<LeftOutFigure<'a>> {
    let mut groups: Vec<(FactorKey, Vec<&ComparedFigure>)> = vec![];
    for figure in compared.iter().filter(|figure| figure.fitted && is_planned_step(figure)) {
        let measurement = figure.measurement;
        let key = (figure.file, measurement.hardware.as_str(), measurement.executor);
        match groups.iter_mut().find(|(known, _)| *known == key) {
            Some((_, figures)) => figures.push(figure),
            None => groups.push((key, vec![figure])),
        }
    }
    groups.iter().flat_map(|(_, figures)| leave_each_out(figures)).collect()
}

fn is_planned_step(figure: &ComparedFigure) -> bool {
    match &figure.measurement.measured {
        MeasuredQuantity::Step(step) => {
            !matches!(step.model, TrainedModel::Gpt(_)) && figure.step_factor != 1.0
        }
        _ => false,
    }
}

fn leave_each_out<'a>(figures: &[&'a ComparedFigure<'a>]) -> Vec<LeftOutFigure<'a>> {
    let log_ratio = |figure: &ComparedFigure| (figure.measured_s / figure.predicted_s).ln();
    let sum = figures.iter().map(|figure| log_ratio(figure)).sum::<f64>();
    let count = figures.len() as f64;
    if figures.len() < 2 || (sum / count).abs() > FITTED_WITHIN {
        return vec![];
    }
    let left_out = |figure: &&'a ComparedFigure<'a>| {
        let others = (sum - log_ratio(figure)) / (count - 1.0);
        LeftOutFigure { figure, predicted_s: figure.predicted_s * others.exp() }
    };
    figures.iter().map(left_out).collect()
}
