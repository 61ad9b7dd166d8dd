//! AdamW, with the formulas of [`Optimizer`].

use narrows_plan::model::Model;
use narrows_runtime::{Optimizer, logical_parameters};

use super::{Float, Parameters};

/// The state of AdamW.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct AdamWMoments<T> {
    /// Completed steps.
    steps: u64,
    first: Parameters<T>,
    second: Parameters<T>,
}

/// Result of a training step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReferenceStep<T> {
    /// The mean loss over all tokens of the step, before the update.
    pub loss: T,
    /// The Euclidean norm of all gradients together, before clipping.
    pub gradient_norm: T,
    /// The learning rate of the step.
    pub learning_rate: f64,
}

impl<T: Float> AdamWMoments<T> {
    pub(super) fn zeros(model: &Model) -> Self {
        AdamWMoments { steps: 0, first: Parameters::zeros(model), second: Parameters::zeros(model) }
    }

    /// Clips the gradients and updates every parameter. Returns the gradient norm before clipping and the
    /// learning rate.
    pub(super) fn update(
        &mut self,
        model: &Model,
        optimizer: &Optimizer,
        parameters: &mut Parameters<T>,
        gradients: &Parameters<T>,
    ) -> (T, f64) {
        self.steps += 1;
        let coefficients = optimizer.coefficients(self.steps);
        let norm = gradients.norm();
        let clip = T::from_f64(optimizer.clip_factor(norm.to_f64().unwrap_or(f64::NAN)));
        let [beta1, beta2, epsilon, rate] =
            [optimizer.beta1, optimizer.beta2, optimizer.epsilon, coefficients.learning_rate]
                .map(T::from_f64);
        let [correction1, correction2] =
            [coefficients.bias_correction1, coefficients.bias_correction2].map(T::from_f64);
        for parameter in logical_parameters(model) {
            let id = parameter.id;
            let decay = match optimizer.decayed.contain(parameter.kind) {
                true => T::from_f64(coefficients.decay_factor),
                false => T::one(),
            };
            let g = gradients.checked(id);
            let (Some(w), Some(m), Some(v)) =
                (parameters.get_mut(id), self.first.get_mut(id), self.second.get_mut(id))
            else {
                unreachable!("{id} was validated");
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
        (norm, coefficients.learning_rate)
    }
}
