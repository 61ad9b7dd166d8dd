//! Collapse of a run: signs that a model has stopped learning, found while it trains.
//!
//! A model that predicts every token of a vocabulary of V with equal probability has the loss ln V. Losses start
//! there, so that a loss near ln V is a sign of collapse only after it was clearly lower, or long after the
//! warm-up.

use std::fmt;

/// A loss above this part of ln V is that of a uniform prediction.
const UNIFORM: f64 = 0.99;

/// A loss below this part of ln V is clearly lower.
const LEARNED: f64 = 0.9;

/// Steps after the warm-up in which a loss may still be that of a uniform prediction.
const PATIENCE_STEPS: u64 = 200;

/// A sign that a model has stopped learning.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Collapse {
    /// All gradients are zero.
    ZeroGradients,
    /// The loss has returned to that of a uniform prediction.
    UniformAgain {
        /// ln V.
        uniform_loss: f64,
        /// The lowest loss before.
        lowest_loss: f64,
    },
    /// The loss has never left that of a uniform prediction.
    NeverLearned {
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
            Collapse::UniformAgain { uniform_loss, lowest_loss } => write!(
                f,
                "the loss is back at ln V = {uniform_loss:.4}, that of predicting every token alike, after it was \
                 {lowest_loss:.4}"
            ),
            Collapse::NeverLearned { uniform_loss } => write!(
                f,
                "the loss is still ln V = {uniform_loss:.4}, that of predicting every token alike, {PATIENCE_STEPS} \
                 steps after the warm-up"
            ),
        }
    }
}

/// Watches the steps of a run. Reports each kind of collapse when it begins, and one that comes back only when the run has
/// twice as many steps as at its last report: a model on the edge would otherwise fill the log.
#[derive(Clone, Debug)]
pub struct CollapseWatch {
    uniform_loss: f64,
    warm_up_steps: u64,
    lowest_loss: f64,
    is_uniform: bool,
    has_zero_gradients: bool,
    /// The next steps in which a uniform loss and zero gradients are reported.
    next_uniform: u64,
    next_zero_gradients: u64,
}

impl CollapseWatch {
    /// A watch of a model with this vocabulary, trained with this warm-up.
    pub fn new(vocabulary: u64, warm_up_steps: u64) -> CollapseWatch {
        CollapseWatch {
            uniform_loss: (vocabulary as f64).ln(),
            warm_up_steps,
            lowest_loss: f64::INFINITY,
            is_uniform: false,
            has_zero_gradients: false,
            next_uniform: 0,
            next_zero_gradients: 0,
        }
    }

    /// The collapse that begins with a step, counted from 1.
    pub fn push(&mut self, step: u64, loss: f64, gradient_norm: f64) -> Option<Collapse> {
        let had_zero_gradients =
            std::mem::replace(&mut self.has_zero_gradients, gradient_norm == 0.0);
        let lowest_loss = self.lowest_loss;
        self.lowest_loss = lowest_loss.min(loss);
        let uniform_loss = self.uniform_loss;
        let has_learned = lowest_loss < LEARNED * uniform_loss;
        let is_late = step > self.warm_up_steps.saturating_add(PATIENCE_STEPS);
        let is_uniform = loss > UNIFORM * uniform_loss && (has_learned || is_late);
        let was_uniform = std::mem::replace(&mut self.is_uniform, is_uniform);
        let begins = |is_so: bool, was_so: bool, next: &mut u64| {
            let reported = is_so && !was_so && step >= *next;
            if reported {
                *next = step.saturating_mul(2);
            }
            reported
        };
        if begins(self.has_zero_gradients, had_zero_gradients, &mut self.next_zero_gradients) {
            return Some(Collapse::ZeroGradients);
        }
        begins(is_uniform, was_uniform, &mut self.next_uniform).then_some(match has_learned {
            true => Collapse::UniformAgain { uniform_loss, lowest_loss },
            false => Collapse::NeverLearned { uniform_loss },
        })
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
        let again = Collapse::UniformAgain { uniform_loss, lowest_loss: 4.0 };
        assert_eq!(reported(&back), [(4, again)]);
        let dead = [(5.0, 1.0), (5.0, 0.0), (5.0, 0.0), (5.0, 1.0), (5.0, 0.0)];
        assert_eq!(reported(&dead), [(2, Collapse::ZeroGradients), (5, Collapse::ZeroGradients)]);
        let never = vec![(uniform_loss, 1.0); 300];
        assert_eq!(reported(&never), [(203, Collapse::NeverLearned { uniform_loss })]);
        assert_eq!(reported(&[(uniform_loss, 1.0); 50]), []);
        let on_the_edge = [(4.0, 1.0), (uniform_loss, 1.0)].repeat(500_000);
        let steps: Vec<usize> = reported(&on_the_edge).into_iter().map(|(step, _)| step).collect();
        assert_eq!(steps[..5], [2, 4, 8, 16, 32]);
        assert_eq!(steps.len(), 19);
    }
}
