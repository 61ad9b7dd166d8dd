//! AdamW and LORO, with the formulas of [`Optimizer`].

use narrows_plan::model::{Model, ParameterId, WeightId};
use narrows_runtime::{
    FactorStep, Optimizer, PairShape, StepCoefficients, UpdateGroup, exact_step, logical_parameters,
};

use super::{Float, Parameters, ReferenceError};

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
    ///
    /// # Errors
    /// An exact step of LORO without a result; the state is then that of an unfinished step.
    pub(super) fn update(
        &mut self,
        model: &Model,
        optimizer: &Optimizer,
        parameters: &mut Parameters<T>,
        gradients: &Parameters<T>,
    ) -> Result<(T, f64), ReferenceError> {
        self.steps += 1;
        let coefficients = optimizer.coefficients(self.steps);
        let norm = gradients.norm();
        let clip = T::from_f64(optimizer.clip_factor(norm.to_f64().unwrap_or(f64::NAN)));
        let [beta1, beta2, epsilon] =
            [optimizer.beta1, optimizer.beta2, coefficients.epsilon].map(T::from_f64);
        let [correction1, correction2] =
            [coefficients.bias_correction1, coefficients.bias_correction2].map(T::from_f64);
        for parameter in logical_parameters(model) {
            let id = parameter.id;
            let group = UpdateGroup::of(&parameter, model.hidden);
            let decay = T::from_f64(coefficients.decay_factor(group));
            let rate = T::from_f64(coefficients.rate_scale(group) * coefficients.learning_rate);
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
        if let Some(loro) = optimizer.loro {
            if loro.is_exact(self.steps) {
                self.exact_step(model, &coefficients, parameters)?;
            }
            if loro.refreshes_after(self.steps) {
                (self.first, self.second) = (Parameters::zeros(model), Parameters::zeros(model));
            }
        }
        Ok((norm, coefficients.learning_rate))
    }

    /// The exact step of every factor pair.
    fn exact_step(
        &self,
        model: &Model,
        coefficients: &StepCoefficients,
        parameters: &mut Parameters<T>,
    ) -> Result<(), ReferenceError> {
        let to_f64 = |x: &T| x.to_f64().unwrap_or(f64::NAN);
        for (block, shape) in (0..).zip(&model.blocks) {
            for (kind, linear) in shape.linears() {
                let Some(shape) = PairShape::of(linear) else { continue };
                let ids = [WeightId::FactorA(kind), WeightId::FactorB(kind)]
                    .map(|weight| ParameterId { block: Some(block), weight });
                let [a, b] = ids.map(|id| {
                    let moments = self.first.checked(id).elements().iter();
                    let moments = moments.zip(self.second.checked(id).elements());
                    let direction = |(m, v)| coefficients.direction(to_f64(m), to_f64(v));
                    FactorStep {
                        weights: parameters.checked(id).elements().iter().map(to_f64).collect(),
                        direction: moments.map(direction).collect(),
                    }
                });
                let updated = exact_step(shape, &a, &b, coefficients.learning_rate)
                    .map_err(|fault| ReferenceError::ExactStep { block, kind, fault })?;
                for (id, values) in ids.into_iter().zip(updated) {
                    let Some(matrix) = parameters.get_mut(id) else {
                        unreachable!("{id} was validated");
                    };
                    let elements = matrix.elements_mut().iter_mut();
                    elements.zip(values).for_each(|(x, value)| *x = T::from_f64(value));
                }
            }
        }
        Ok(())
    }
}
