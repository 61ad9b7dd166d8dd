//! A linear of a block: one matrix, or a factor pair with or without a crossing (DESIGN §3.1).
//!
//! ```text
//! dense                y = x·W
//! pair                 u = x·A    h = φ(u)                     y = h·B
//! paper's crossing     u = x·A    h = φ(u)   z = h + Gate(p)   y = z·B
//! released crossing    u = x·A    v = u + Gate(p)   h = φ(LayerNorm(v))   y = h·B
//! ```
//!
//! p is the latent h of the same linear in the previous block, in every form: in the paper's form it is
//! taken before the crossing of that block is added, in the released form after it. Block 0 has no p,
//! and so no crossing.

use narrows_plan::model::{CrossingForm, FactorPair, Linear, Weight, WeightId};

use super::linear_id::LinearId;
use super::{Float, Matrix, Parameters, activation, crossing_gate, norm};

/// The intermediate values that the backward pass of a linear reads, besides its input.
pub(super) enum LinearTape<T> {
    Dense,
    Pair(LatentTape<T>),
}

pub(super) struct LatentTape<T> {
    /// v, the input of the LayerNorm if there is one.
    unnormed: Option<Matrix<T>>,
    /// The input of φ.
    unactivated: Matrix<T>,
    /// h, which the crossing of the next block reads.
    h: Matrix<T>,
    /// z, if it differs from h.
    crossed: Option<Matrix<T>>,
}

impl<T> LinearTape<T> {
    /// The latent that is sent to the next block; a dense linear has none.
    pub(super) fn sent(&self) -> Option<&Matrix<T>> {
        match self {
            LinearTape::Dense => None,
            LinearTape::Pair(latent) => Some(&latent.h),
        }
    }
}

/// Returns y and the tape; `previous` is the latent of the same linear in the previous block, and
/// `norm_epsilon` the ε of its LayerNorm.
pub(super) fn forward<T: Float>(
    linear: &Linear,
    id: LinearId,
    parameters: &Parameters<T>,
    x: &Matrix<T>,
    previous: Option<&Matrix<T>>,
    norm_epsilon: f64,
) -> (Matrix<T>, LinearTape<T>) {
    let Weight::Pair(pair) = &linear.weight else {
        return (x.times(parameters.checked(id.parameter(WeightId::Dense))), LinearTape::Dense);
    };
    let u = x.times(parameters.checked(id.parameter(WeightId::FactorA)));
    let gated = crossing(pair, previous).map(|(form, gate, previous)| {
        (form, crossing_gate::forward(gate, id, parameters, previous))
    });
    let latent = match gated {
        Some((CrossingForm::Released, gated)) => {
            let v = u.plus(&gated);
            let scale = parameters.checked(id.parameter(WeightId::LatentNormScale));
            let bias = parameters.checked(id.parameter(WeightId::LatentNormBias));
            let unactivated = norm::layer_forward(&v, scale, bias, norm_epsilon);
            let h = activation::forward(pair.activation, &unactivated);
            LatentTape { unnormed: Some(v), unactivated, h, crossed: None }
        }
        paper_or_none => {
            let h = activation::forward(pair.activation, &u);
            let crossed = paper_or_none.map(|(_, gated)| h.plus(&gated));
            LatentTape { unnormed: None, unactivated: u, h, crossed }
        }
    };
    let latent_out = latent.crossed.as_ref().unwrap_or(&latent.h);
    (
        latent_out.times(parameters.checked(id.parameter(WeightId::FactorB))),
        LinearTape::Pair(latent),
    )
}

/// Values of the forward pass, and gradients of the outputs.
pub(super) struct LinearBackwardInput<'a, T> {
    pub x: &'a Matrix<T>,
    pub previous: Option<&'a Matrix<T>>,
    pub tape: &'a LinearTape<T>,
    /// The gradient of y.
    pub dy: &'a Matrix<T>,
    /// The gradient of the latent from the crossing of the next block, if it has one.
    pub dsent: Option<&'a Matrix<T>>,
    /// ε of the LayerNorm of the latent.
    pub norm_epsilon: f64,
}

/// Returns the gradients of x and, with a crossing, of `previous`. Adds those of the weights to
/// `gradients`.
pub(super) fn backward<T: Float>(
    linear: &Linear,
    id: LinearId,
    parameters: &Parameters<T>,
    gradients: &mut Parameters<T>,
    input: LinearBackwardInput<'_, T>,
) -> (Matrix<T>, Option<Matrix<T>>) {
    let LinearBackwardInput { x, previous, tape, dy, dsent, norm_epsilon } = input;
    let (Weight::Pair(pair), LinearTape::Pair(latent)) = (&linear.weight, tape) else {
        gradients.add(id.parameter(WeightId::Dense), &x.transposed_times(dy));
        return (dy.times_transposed(parameters.checked(id.parameter(WeightId::Dense))), None);
    };
    let (a, b) = (id.parameter(WeightId::FactorA), id.parameter(WeightId::FactorB));
    let latent_out = latent.crossed.as_ref().unwrap_or(&latent.h);
    gradients.add(b, &latent_out.transposed_times(dy));
    let dlatent_out = dy.times_transposed(parameters.checked(b));
    let dh = match dsent {
        Some(dsent) => dlatent_out.plus(dsent),
        None => dlatent_out.clone(),
    };
    let mut du = activation::backward(pair.activation, &latent.unactivated, &dh);
    if let Some(v) = &latent.unnormed {
        let scale = id.parameter(WeightId::LatentNormScale);
        let (dv, dscale, dbias) =
            norm::layer_backward(v, parameters.checked(scale), norm_epsilon, &du);
        gradients.add(scale, &dscale);
        gradients.add(id.parameter(WeightId::LatentNormBias), &dbias);
        du = dv;
    }
    let dprevious = crossing(pair, previous).map(|(form, gate, previous)| {
        let dgated = match form {
            CrossingForm::Paper => &dlatent_out,
            CrossingForm::Released => &du,
        };
        crossing_gate::backward(gate, id, parameters, gradients, (previous, dgated))
    });
    gradients.add(a, &x.transposed_times(&du));
    (du.times_transposed(parameters.checked(a)), dprevious)
}

/// Form and gate of the crossing and the latent it reads, if there are both.
fn crossing<'a, T>(
    pair: &'a FactorPair,
    previous: Option<&'a Matrix<T>>,
) -> Option<(CrossingForm, &'a narrows_plan::model::CrossingGate, &'a Matrix<T>)> {
    let crossing = pair.crossing.as_ref()?;
    Some((crossing.form, &crossing.gate, previous?))
}
