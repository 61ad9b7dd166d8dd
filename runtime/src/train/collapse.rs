//! Collapse of a run: signs that a model has stopped learning, found while it trains.
//!
//! A model that predicts every token of a vocabulary of V with equal probability has the loss ln V. Losses start
//! there, so that a loss near ln V is a sign of collapse only after it was clearly lower, or long after the
//! warm-up.

use std::fmt;

/// A loss above this part of ln V is that of a uniform prediction.
const UNIFORM: f64 = 0.99;

/// A loss above this part of ln V is clearly higher.
const WORSE: f64 = 1.01;

/// A loss below this part of ln V is clearly lower.
const LEARNED: f64 = 0.9;

/// Steps after the warm-up in which a loss may still be that of a uniform prediction.
const PATIENCE_STEPS: u64 = 200;

/// A sign that a model has stopped learning.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Collapse {
    /// All gradients are zero.
    ZeroGradients,
    /// The loss has returned to that of a uniform prediction, or is higher.
    UniformAgain {
        /// The loss.
        loss: f64,
        /// ln V.
        uniform_loss: f64,
        /// The lowest loss before.
        lowest_loss: f64,
    },
    /// The loss has never been lower than that of a uniform prediction.
    NeverLearned {
        /// The loss.
        loss: f64,
        /// ln V.
        uniform_loss: f64,
    },
}

impl fmt::Display for Collapse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Collapse::ZeroGradients => {
                f.write_str("all gradients are zero, so that no weight learns")
            }
            Collapse::UniformAgain { loss, uniform_loss, lowest_loss } => {
                write_loss(f, *loss, *uniform_loss, "back at")?;
                write!(f, ", after it was {lowest_loss:.4}")
            }
            Collapse::NeverLearned { loss, uniform_loss } => {
                write_loss(f, *loss, *uniform_loss, "still")?;
                write!(f, ", {PATIENCE_STEPS} steps after the warm-up")
            }
        }
    }
}

/// Writes a loss, which is described by `place` where it is close to that of a uniform prediction.
fn write_loss(
    f: &mut fmt::Formatter<'_>,
    loss: f64,
    uniform_loss: f64,
    place: &str,
) -> fmt::Result {
    f.write_str("the loss is ")?;
    match loss > WORSE * uniform_loss {
        true => write!(f, "{loss:.4}, above")?,
        false => f.write_str(place)?,
    }
    write!(f, " ln V = {uniform_loss:.4}, that of predicting every token alike")
}

/// Watches the steps of a run. Reports each kind of collapse once while it lasts, when it begins or, after an earlier
/// report of its kind, when the run has twice as many steps as then: a model on the edge would otherwise fill the log.
#[derive(Clone, Debug)]
pub struct CollapseWatch {
    uniform_loss: f64,
    warm_up_steps: u64,
    lowest_loss: f64,
    zero_gradients: Episodes,
    uniform_again: Episodes,
    never_learned: Episodes,
}

/// The times during which a run is in one kind of collapse.
#[derive(Clone, Copy, Debug, Default)]
struct Episodes {
    /// Whether the present one is reported.
    is_reported: bool,
    /// The first step at which another one may be reported.
    next_report: u64,
}

impl Episodes {
    /// Whether the episode that a step belongs to, if any, is to be reported at it.
    fn push(&mut self, step: u64, is_collapsed: bool) -> bool {
        let reports = is_collapsed && !self.is_reported && step >= self.next_report;
        self.is_reported = is_collapsed && (self.is_reported || reports);
        if reports {
            self.next_report = step.saturating_mul(2);
        }
        reports
    }
}

impl CollapseWatch {
    /// A watch of a model with this vocabulary, trained with this warm-up.
    pub fn new(vocabulary: u64, warm_up_steps: u64) -> CollapseWatch {
        CollapseWatch {
            uniform_loss: (vocabulary as f64).ln(),
            warm_up_steps,
            lowest_loss: f64::INFINITY,
            zero_gradients: Episodes::default(),
            uniform_again: Episodes::default(),
            never_learned: Episodes::default(),
        }
    }

    /// The collapse to report at a step, counted from 1.
    pub fn push(&mut self, step: u64, loss: f64, gradient_norm: f64) -> Option<Collapse> {
        let lowest_loss = self.lowest_loss;
        self.lowest_loss = lowest_loss.min(loss);
        let uniform_loss = self.uniform_loss;
        let has_learned = lowest_loss < LEARNED * uniform_loss;
        let is_late = step > self.warm_up_steps.saturating_add(PATIENCE_STEPS);
        let is_uniform = loss > UNIFORM * uniform_loss;
        let zero_gradients = self.zero_gradients.push(step, gradient_norm == 0.0);
        let again = self.uniform_again.push(step, is_uniform && has_learned);
        let never = self.never_learned.push(step, is_uniform && !has_learned && is_late);
        match (zero_gradients, again, never) {
            (true, _, _) => Some(Collapse::ZeroGradients),
            (_, true, _) => Some(Collapse::UniformAgain { loss, uniform_loss, lowest_loss }),
            (_, _, true) => Some(Collapse::NeverLearned { loss, uniform_loss }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOCABULARY: u64 = 1000;

    /// The steps at which a curve of (loss, gradient norm) is reported.
    fn reported(curve: &[(f64, f64)]) -> Vec<(usize, Collapse)> {
        let mut watch = CollapseWatch::new(VOCABULARY, 2);
        let steps = curve.iter().enumerate();
        let push = |(index, (loss, norm)): (usize, &(f64, f64))| {
            Some((index + 1, watch.push(index as u64 + 1, *loss, *norm)?))
        };
        steps.filter_map(push).collect()
    }

    #[test]
    fn each_collapse_is_reported_once_when_it_begins() {
        let uniform_loss = (VOCABULARY as f64).ln();
        let fallen = [(uniform_loss, 1.0), (5.0, 1.0), (4.0, 1.0)];
        assert_eq!(reported(&fallen), []);
        let back = [&fallen[..], &[(uniform_loss, 1.0); 3]].concat();
        let again = Collapse::UniformAgain { loss: uniform_loss, uniform_loss, lowest_loss: 4.0 };
        assert_eq!(reported(&back), [(4, again)]);
        let dead = [(5.0, 1.0), (5.0, 0.0), (5.0, 0.0), (5.0, 1.0), (5.0, 0.0)];
        assert_eq!(reported(&dead), [(2, Collapse::ZeroGradients), (5, Collapse::ZeroGradients)]);
        let never = vec![(uniform_loss, 1.0); 300];
        let never_learned = Collapse::NeverLearned { loss: uniform_loss, uniform_loss };
        assert_eq!(reported(&never), [(203, never_learned)]);
        assert_eq!(reported(&[(uniform_loss, 1.0); 50]), []);
        let on_the_edge = [(4.0, 1.0), (uniform_loss, 1.0)].repeat(500_000);
        let steps: Vec<usize> = reported(&on_the_edge).into_iter().map(|(step, _)| step).collect();
        assert_eq!(steps[..5], [2, 4, 8, 16, 32]);
        assert_eq!(steps.len(), 19);
        // A short collapse at step 20 does not hide a lasting one from step 25 on.
        let mut curve = vec![(4.0, 1.0); 100];
        curve[19].0 = uniform_loss;
        curve[24..].iter_mut().for_each(|(loss, _)| *loss = uniform_loss);
        assert_eq!(reported(&curve), [(20, again), (40, again)]);
    }

    #[test]
    fn a_loss_far_above_that_of_a_uniform_prediction_is_not_back_at_it() {
        assert_eq!(reported(&[(12.61, 1.0)]), [], "a first step has nothing to return from");
        let message = |loss: f64| {
            let curve = reported(&[(4.0, 1.0), (loss, 1.0)]);
            let [(2, collapse)] = curve[..] else { panic!("{curve:?}") };
            collapse.to_string()
        };
        let of_uniform = "ln V = 6.9078, that of predicting every token alike";
        assert_eq!(message(6.9), format!("the loss is back at {of_uniform}, after it was 4.0000"));
        assert_eq!(
            message(12.61),
            format!("the loss is 12.6100, above {of_uniform}, after it was 4.0000")
        );
    }
}
