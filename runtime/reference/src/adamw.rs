//! One step of AdamW on all parameters; the formulas are those of [`Optimizer`].

use narrows_plan::model::Model;

use narrows_runtime::Optimizer;
use narrows_runtime::{ParameterKind, logical_parameters};

use super::{Float, Parameters};

/// AdamW's state.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct AdamWMoments<T> {
    /// Steps done.
    steps: u64,
    first: Parameters<T>,
    second: Parameters<T>,
}

/// What one step of training did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReferenceStep<T> {
    /// The mean loss over all tokens of the step, before the update.
    pub loss: T,
    /// The norm of all gradients together, before clipping.
    pub gradient_norm: T,
    /// The learning rate of the step.
    pub learning_rate: f64,
}

impl<T: Float> AdamWMoments<T> {
    pub(super) fn zeros(model: &Model) -> Self {
        AdamWMoments { steps: 0, first: Parameters::zeros(model), second: Parameters::zeros(model) }
    }

    /// Clips the gradients and updates every parameter with them.
    pub(super) fn update(
        &mut self,
        model: &Model,
        optimizer: &Optimizer,
        parameters: &mut Parameters<T>,
        gradients: &Parameters<T>,
    ) -> (T, f64) {
        self.steps += 1;
        let at = optimizer.coefficients(self.steps);
        let norm = gradients.norm();
        let clip = T::of(optimizer.clip_factor(norm.to_f64().unwrap_or(f64::NAN)));
        let [beta1, beta2, epsilon, rate] =
            [optimizer.beta1, optimizer.beta2, optimizer.epsilon, at.learning_rate].map(T::of);
        let [correction1, correction2] = [at.bias_correction1, at.bias_correction2].map(T::of);
        for parameter in logical_parameters(model) {
            let name = &parameter.name;
            let decay = match parameter.kind {
                ParameterKind::Matrix => T::of(at.decay_factor),
                ParameterKind::Vector => T::one(),
            };
            let g = gradients.of(name);
            let (Some(w), Some(m), Some(v)) =
                (parameters.get_mut(name), self.first.get_mut(name), self.second.get_mut(name))
            else {
                unreachable!("{name} was checked to be there");
            };
            let moments = m.elements_mut().iter_mut().zip(v.elements_mut());
            for ((w, g), (m, v)) in w.elements_mut().iter_mut().zip(g.elements()).zip(moments) {
                let g = *g * clip;
                *m = beta1 * *m + (T::one() - beta1) * g;
                *v = beta2 * *v + (T::one() - beta2) * g * g;
                let step = (*m / correction1) / ((*v / correction2).sqrt() + epsilon);
                *w = decay * *w - rate * step;
            }
        }
        (norm, at.learning_rate)
    }
}
