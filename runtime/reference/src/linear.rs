//! A linear of a block: one matrix, or a factor pair with or without a crossing (DESIGN §3.1).
//!
//! ```text
//! dense                y = x·W
//! pair                 u = x·A    h = φ(u)                     y = h·B
//! paper's crossing     u = x·A    h = φ(u)   z = h + Gate(p)   y = z·B
//! released crossing    u = x·A    v = u + Gate(p)   h = φ(LayerNorm(v))   y = h·B
//! ```
//!
//! p is what the same linear of the previous block sends on. In every form that is h, what comes
//! out of the sender's own φ: before the crossing is added in the paper's form, after it in the
//! released one. Block 0 has no p, and so no crossing.

use narrows_plan::model::{CrossingForm, FactorPair, Linear, Weight};

use super::{Float, Matrix, Parameters, activation, crossing_gate, norm};

/// What the backward pass of a linear needs besides its input.
pub(super) enum LinearTape<T> {
    Dense,
    Pair(LatentTape<T>),
}

pub(super) struct LatentTape<T> {
    /// v, when a LayerNorm was applied to it.
    unnormed: Option<Matrix<T>>,
    /// What φ was applied to.
    unactivated: Matrix<T>,
    /// h, which the next block's crossing reads.
    h: Matrix<T>,
    /// z, where it is not h.
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

/// y and the trace, for the linear whose parameters are called `name` (`layer 3 q`); `before` is
/// what the same linear of the previous block sent.
pub(super) fn forward<T: Float>(
    linear: &Linear,
    name: &str,
    parameters: &Parameters<T>,
    x: &Matrix<T>,
    before: Option<&Matrix<T>>,
) -> (Matrix<T>, LinearTape<T>) {
    let Weight::Pair(pair) = &linear.weight else {
        return (x.times(parameters.of(name)), LinearTape::Dense);
    };
    let u = x.times(parameters.of(&format!("{name}.a")));
    let gated = crossing(pair, before)
        .map(|(form, gate, before)| (form, crossing_gate::forward(gate, name, parameters, before)));
    let latent = match gated {
        Some((CrossingForm::Released, gated)) => {
            let v = u.plus(&gated);
            let scale = parameters.of(&format!("{name}.latent_norm.scale"));
            let bias = parameters.of(&format!("{name}.latent_norm.bias"));
            let unactivated = norm::layer_forward(&v, scale, bias);
            let h = activation::forward(pair.activation, &unactivated);
            LatentTape { unnormed: Some(v), unactivated, h, crossed: None }
        }
        paper_or_none => {
            let h = activation::forward(pair.activation, &u);
            let crossed = paper_or_none.map(|(_, gated)| h.plus(&gated));
            LatentTape { unnormed: None, unactivated: u, h, crossed }
        }
    };
    let entering = latent.crossed.as_ref().unwrap_or(&latent.h);
    (entering.times(parameters.of(&format!("{name}.b"))), LinearTape::Pair(latent))
}

/// What a linear read and what is known of the gradients of what it made.
pub(super) struct LinearGradientInput<'a, T> {
    pub x: &'a Matrix<T>,
    pub before: Option<&'a Matrix<T>>,
    pub trace: &'a LinearTape<T>,
    /// The gradient of y.
    pub dy: &'a Matrix<T>,
    /// The gradient of what was sent to the next block, where that read it.
    pub dsent: Option<&'a Matrix<T>>,
}

/// The gradients of x and, with a crossing, of `before`; those of the weights are added to
/// `gradients`.
pub(super) fn backward<T: Float>(
    linear: &Linear,
    name: &str,
    parameters: &Parameters<T>,
    gradients: &mut Parameters<T>,
    known: LinearGradientInput<'_, T>,
) -> (Matrix<T>, Option<Matrix<T>>) {
    let LinearGradientInput { x, before, trace, dy, dsent } = known;
    let (Weight::Pair(pair), LinearTape::Pair(latent)) = (&linear.weight, trace) else {
        gradients.add(name, &x.transposed_times(dy));
        return (dy.times_transposed(parameters.of(name)), None);
    };
    let (a, b) = (format!("{name}.a"), format!("{name}.b"));
    let entering = latent.crossed.as_ref().unwrap_or(&latent.h);
    gradients.add(&b, &entering.transposed_times(dy));
    let dentering = dy.times_transposed(parameters.of(&b));
    let dh = match dsent {
        Some(dsent) => dentering.plus(dsent),
        None => dentering.clone(),
    };
    let mut du = activation::backward(pair.activation, &latent.unactivated, &dh);
    if let Some(v) = &latent.unnormed {
        let scale = format!("{name}.latent_norm.scale");
        let (dv, dscale, dbias) = norm::layer_backward(v, parameters.of(&scale), &du);
        gradients.add(&scale, &dscale);
        gradients.add(&format!("{name}.latent_norm.bias"), &dbias);
        du = dv;
    }
    let dbefore = crossing(pair, before).map(|(form, gate, before)| {
        let dgated = match form {
            CrossingForm::Paper => &dentering,
            CrossingForm::Released => &du,
        };
        crossing_gate::backward(gate, name, parameters, gradients, (before, dgated))
    });
    gradients.add(&a, &x.transposed_times(&du));
    (du.times_transposed(parameters.of(&a)), dbefore)
}

/// The crossing with the latent it reads, where there are both.
fn crossing<'a, T>(
    pair: &'a FactorPair,
    before: Option<&'a Matrix<T>>,
) -> Option<(CrossingForm, &'a narrows_plan::model::CrossingGate, &'a Matrix<T>)> {
    let crossing = pair.crossing.as_ref()?;
    Some((crossing.form, &crossing.gate, before?))
}
