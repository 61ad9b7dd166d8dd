//! Step times predicted without the figure itself.
//!
//! Of the steps of a program's executor, one number is fitted to those that are marked: the factor by which
//! steps take longer than their kernels. It is the one that makes the geometric mean of measured over predicted
//! one, so that without figure i of n
//!
//! ```text
//! predicted without i = predicted · (∏ measuredⱼ / predictedⱼ over j ≠ i)^(1/(n − 1))
//! ```
//! Steps of GPTs have nine numbers, fitted by a search: they are left out in `calibration/tests/gpt`.

use narrows_calibration::measurements::{MeasuredQuantity, TrainedModel};
use narrows_cost_model::Executor;

use super::ComparedFigure;

/// A geometric mean further from one than this is none that a factor was fitted by.
const FITTED_WITHIN: f64 = 0.005;

/// A figure, predicted by what was fitted to the others.
pub struct LeftOut<'a> {
    /// The figure.
    pub figure: &'a ComparedFigure<'a>,
    /// Its predicted time without it, in seconds.
    pub predicted_s: f64,
}

impl LeftOut<'_> {
    /// predicted / measured − 1.
    pub fn error(&self) -> f64 {
        self.predicted_s / self.figure.measured_s - 1.0
    }
}

/// What has a factor of its own: a file's figures of one hardware and one executor.
type FactorKey<'a> = (&'a str, &'a str, Executor);

/// The figures that the factor of steps was fitted to, each left out in turn; none of a file, a hardware and an
/// executor where the factor was not fitted to the marked ones, or to one alone.
pub fn left_out<'a>(compared: &'a [ComparedFigure<'a>]) -> Vec<LeftOut<'a>> {
    let mut groups: Vec<(FactorKey, Vec<&ComparedFigure>)> = vec![];
    for one in compared.iter().filter(|one| one.fitted && is_planned_step(one)) {
        let key = (one.file, one.measurement.hardware.as_str(), one.measurement.executor);
        match groups.iter_mut().find(|(known, _)| *known == key) {
            Some((_, figures)) => figures.push(one),
            None => groups.push((key, vec![one])),
        }
    }
    groups.iter().flat_map(|(_, figures)| each_without(figures)).collect()
}

fn is_planned_step(one: &ComparedFigure) -> bool {
    match &one.measurement.measured {
        MeasuredQuantity::Step(step) => {
            !matches!(step.model, TrainedModel::Gpt(_)) && one.step_factor != 1.0
        }
        _ => false,
    }
}

fn each_without<'a>(figures: &[&'a ComparedFigure<'a>]) -> Vec<LeftOut<'a>> {
    let ratio = |one: &ComparedFigure| (one.measured_s / one.predicted_s).ln();
    let (sum, count) = (figures.iter().map(|one| ratio(one)).sum::<f64>(), figures.len() as f64);
    if figures.len() < 2 || (sum / count).abs() > FITTED_WITHIN {
        return vec![];
    }
    let without = |one: &&'a ComparedFigure<'a>| {
        let rest = (sum - ratio(one)) / (count - 1.0);
        LeftOut { figure: one, predicted_s: one.predicted_s * rest.exp() }
    };
    figures.iter().map(without).collect()
}
