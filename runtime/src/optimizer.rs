//! AdamW with gradient clipping and a learning-rate schedule, as all backends compute it.
//!
//! Steps t count from 1. The gradients g are those of the mean loss over all predicted tokens of the step,
//! each multiplied by min(1, clip/G), where G is the norm of all gradients together. Then, for every
//! element (AdamW: Kingma & Ba 2015, Loshchilov & Hutter 2019):
//!
//! ```text
//! m ← β₁·m + (1−β₁)·g          v ← β₂·v + (1−β₂)·g²
//! w ← (1−ηλ)·w − η·(m / (1−β₁ᵗ)) / (√(v / (1−β₂ᵗ)) + ε)
//! ```
//!
//! λ is 0 for scales and biases of norms unless [`DecayedWeights::All`] are decayed. η follows the
//! schedule (`learning_rate.rs`).
//!
//! With [`Loro`] factors of pairs have a learning rate of their own, which is 0 in exact steps, and moments begin anew from
//! time to time: t counts the steps since then. ε is then added to √v, as in its original code, so that it becomes ε/√(1 − β₂ᵗ)
//! above.

use narrows_plan::model::WeightId;
use serde::{Deserialize, Serialize};

use crate::learning_rate::{LearningRateSchedule, ScheduleSpan, StepCount};
use crate::loro::{FactorRateScale, Loro};
use crate::parameters::{LogicalParameter, ParameterKind};

/// Weights that decay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DecayedWeights {
    /// Matrices: linears, factors, gates, embedding and head.
    #[default]
    Matrices,
    /// Also scales and biases of norms, as PyTorch's AdamW without parameter groups.
    All,
}

/// Weights that the optimizer updates with the same coefficients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum UpdateGroup {
    /// Matrices that are not factors.
    Matrix,
    /// Scales and biases of norms, and biases of linears.
    Vector,
    /// Factors of pairs.
    Factor {
        /// The rank over the width of the hidden state.
        rank_ratio: f64,
    },
}

impl UpdateGroup {
    /// The group of a parameter of a model whose hidden state has this width.
    pub fn of(parameter: &LogicalParameter, hidden: u64) -> UpdateGroup {
        let factor =
            |rank: u64| UpdateGroup::Factor { rank_ratio: rank as f64 / hidden.max(1) as f64 };
        match (parameter.id.weight, parameter.kind) {
            (WeightId::FactorA(_), _) => factor(parameter.columns),
            (WeightId::FactorB(_), _) => factor(parameter.rows),
            (_, ParameterKind::Matrix) => UpdateGroup::Matrix,
            (_, ParameterKind::Vector) => UpdateGroup::Vector,
        }
    }
}

/// Hyper-parameters of the optimizer and the learning rate schedule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Optimizer {
    /// Largest learning rate η.
    pub peak_learning_rate: f64,
    /// Course of the learning rate after the warm-up.
    pub schedule: LearningRateSchedule,
    /// Steps until the learning rate reaches its peak; with 0 it starts there.
    pub warm_up_steps: u64,
    /// Steps until the learning rate reaches its final value, which it then keeps.
    pub total_steps: u64,
    /// Final learning rate over the peak.
    pub final_fraction: f64,
    /// Position of the first step in the schedule.
    pub step_count: StepCount,
    /// Decay β₁ of the first moment.
    pub beta1: f64,
    /// Decay β₂ of the second moment.
    pub beta2: f64,
    /// ε, added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay λ.
    pub weight_decay: f64,
    /// Weights that decay.
    pub decayed: DecayedWeights,
    /// Largest norm of all gradients together; larger gradients are scaled down to it.
    pub clip_norm: f64,
    /// Settings of LORO; `None` for AdamW of all weights.
    pub loro: Option<Loro>,
}

/// Coefficients of the AdamW update of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepCoefficients {
    /// η of the step.
    pub learning_rate: f64,
    /// t: number of steps, including this one, since the moments were zero.
    pub moment_steps: u64,
    /// 1 − β₁ᵗ.
    pub bias_correction1: f64,
    /// 1 − β₂ᵗ.
    pub bias_correction2: f64,
    /// ε, added to √(v / (1 − β₂ᵗ)).
    pub epsilon: f64,
    /// λ of weights that are not factors.
    pub weight_decay: f64,
    /// Weights that decay.
    pub decayed: DecayedWeights,
    /// Learning rate of factors.
    pub factors: FactorRate,
}

/// Learning rate of factors in one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FactorRate {
    /// η times a constant.
    Scaled(f64),
    /// η times the rank over the width of the hidden state.
    RankRatio,
    /// AdamW updates the moments alone: neither a step nor decay.
    Exact,
}

impl StepCoefficients {
    /// Learning rate of a group over η.
    pub fn rate_scale(&self, group: UpdateGroup) -> f64 {
        match (group, self.factors) {
            (UpdateGroup::Matrix | UpdateGroup::Vector, _) => 1.0,
            (UpdateGroup::Factor { .. }, FactorRate::Scaled(scale)) => scale,
            (UpdateGroup::Factor { rank_ratio }, FactorRate::RankRatio) => rank_ratio,
            (UpdateGroup::Factor { .. }, FactorRate::Exact) => 0.0,
        }
    }

    /// λ of a group.
    pub fn decay_of(&self, group: UpdateGroup) -> f64 {
        match group {
            UpdateGroup::Vector if self.decayed == DecayedWeights::Matrices => 0.0,
            UpdateGroup::Factor { .. } if self.factors == FactorRate::Exact => 0.0,
            _ => self.weight_decay,
        }
    }

    /// Factor of the weights of a group: 1 − ηλ.
    pub fn decay_factor(&self, group: UpdateGroup) -> f64 {
        1.0 - self.learning_rate * self.decay_of(group)
    }

    /// Direction of the update of an element with these moments, to be multiplied by −η.
    pub fn direction(&self, first_moment: f64, second_moment: f64) -> f64 {
        let root = (second_moment / self.bias_correction2).sqrt();
        first_moment / self.bias_correction1 / (root + self.epsilon)
    }
}

impl Optimizer {
    /// The hyper-parameters of LLaMA (Touvron et al. 2023, §2.3): β = (0.9, 0.95), ε = 1e-8, λ = 0.1,
    /// clipping at 1, and a cosine to a tenth of the peak.
    pub fn new(peak_learning_rate: f64, warm_up_steps: u64, total_steps: u64) -> Optimizer {
        Optimizer {
            peak_learning_rate,
            schedule: LearningRateSchedule::Cosine,
            warm_up_steps,
            total_steps,
            final_fraction: 0.1,
            step_count: StepCount::FromOne,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            decayed: DecayedWeights::Matrices,
            clip_norm: 1.0,
            loro: None,
        }
    }

    /// Learning rate of a step, counted from 1.
    ///
    /// ```
    /// let optimizer = narrows_runtime::Optimizer::new(1.0, 4, 12);
    /// assert_eq!(optimizer.learning_rate(1), 0.25);
    /// assert_eq!(optimizer.learning_rate(4), 1.0);
    /// assert_eq!(optimizer.learning_rate(8), 0.55);
    /// assert_eq!(optimizer.learning_rate(12), 0.1);
    /// assert_eq!(optimizer.learning_rate(99), 0.1);
    /// ```
    pub fn learning_rate(&self, step: u64) -> f64 {
        let Optimizer { warm_up_steps, total_steps, final_fraction, .. } = *self;
        let span = ScheduleSpan { warm_up_steps, total_steps, final_fraction };
        let position = self.step_count.position(step);
        self.peak_learning_rate * self.schedule.fraction(position, &span)
    }

    /// Clipping factor of every gradient, for this norm of all gradients together.
    pub fn clip_factor(&self, norm: f64) -> f64 {
        self.gradient_factor(norm, 1.0)
    }

    /// Factor on every gradient that scales it by `scale` and clips the result; `norm` is the norm of all
    /// gradients together before both.
    pub fn gradient_factor(&self, norm: f64, scale: f64) -> f64 {
        if norm * scale > self.clip_norm { self.clip_norm / norm } else { scale }
    }

    /// Number of steps, including this one, that are in the moments after it.
    pub fn steps_in_moments(&self, step: u64) -> u64 {
        match self.loro {
            Some(loro) if loro.refreshes_after(step) => 0,
            Some(loro) if step > 0 => loro.moment_steps(step),
            _ => step,
        }
    }

    /// Coefficients of a step, counted from 1.
    pub fn coefficients(&self, step: u64) -> StepCoefficients {
        let moment_steps = self.loro.map_or(step, |loro| loro.moment_steps(step));
        let [bias_correction1, bias_correction2] =
            [self.beta1, self.beta2].map(|beta| 1.0 - beta.powf(moment_steps as f64));
        let (epsilon, factors) = match self.loro {
            None => (self.epsilon, FactorRate::Scaled(1.0)),
            Some(loro) => {
                let factors = match loro.rate_scale {
                    _ if loro.is_exact(step) => FactorRate::Exact,
                    FactorRateScale::RankOverHidden => FactorRate::RankRatio,
                    FactorRateScale::Constant(scale) => FactorRate::Scaled(scale),
                };
                (self.epsilon / bias_correction2.sqrt(), factors)
            }
        };
        StepCoefficients {
            learning_rate: self.learning_rate(step),
            moment_steps,
            bias_correction1,
            bias_correction2,
            epsilon,
            weight_decay: self.weight_decay,
            decayed: self.decayed,
            factors,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedules_without_warm_up_or_without_decay() {
        let flat = Optimizer::new(2.0, 0, 10);
        assert_eq!(flat.learning_rate(0), 2.0);
        assert!(flat.learning_rate(1) < 2.0);
        let warming = Optimizer::new(2.0, 10, 5);
        assert_eq!(warming.learning_rate(5), 1.0);
        assert_eq!(warming.learning_rate(10), 0.2);
    }

    #[test]
    fn only_large_gradients_are_clipped() {
        let optimizer = Optimizer::new(1.0, 1, 10);
        let norms = [0.0, 0.5, 1.0, 4.0];
        assert_eq!(norms.map(|norm| optimizer.clip_factor(norm)), [1.0, 1.0, 1.0, 0.25]);
    }
}
