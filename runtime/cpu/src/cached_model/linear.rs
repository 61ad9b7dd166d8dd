//! A linear of a block: one matrix, or a factor pair with or without a crossing (DESIGN §3.1).
//!
//! With p, the latent h of the same linear in the previous block:
//!
//! ```text
//! dense                y = x·W
//! pair                 h = φ(x·A)                              y = h·B
//! paper's crossing     h = φ(x·A)                              y = (h + Gate(p))·B
//! released crossing    h = φ(LayerNorm(x·A + Gate(p)))         y = h·B
//! ```
//!
//! A crossing joins blocks at one token, so that nothing of it is cached.

use narrows_plan::model::{
    Activation, CrossingForm, CrossingGate, LatentCrossing, LinearKind, Weight, WeightId,
};

use super::block_context::BlockContext;
use crate::kernels::{
    LayerNorm, MatrixView, MatrixViewMut, TensorGate, WriteMode, add_into, gemm_forward,
    latent_forward, layer_norm_forward, tensor_gate_forward,
};

/// The latent h of each linear of a block, in the order of [`Block::linears`](narrows_plan::model::Block::linears),
/// `[tokens, r]`; `None` for dense linears, and before the first block.
pub(super) type Latents = [Option<Vec<f32>>; 7];

/// Returns y, `[tokens, d_out]`. `latent` is p, which h replaces.
pub(super) fn forward(
    block: &BlockContext<'_>,
    slot: usize,
    x: &[f32],
    latent: &mut Option<Vec<f32>>,
) -> Vec<f32> {
    let (kind, linear) = block.model.blocks[block.index].linears()[slot];
    let previous = latent.take();
    let Weight::Pair(pair) = &linear.weight else {
        return multiply(block, x, block.weight(WeightId::Dense(kind)));
    };
    let u = multiply(block, x, block.weight(WeightId::FactorA(kind)));
    let crossing = pair.crossing.as_ref().zip(previous.as_deref());
    let (h, crossed) = match crossing {
        None => (activate(block, &u, pair.activation), None),
        Some((crossing @ LatentCrossing { form: CrossingForm::Paper, .. }, previous)) => {
            let h = activate(block, &u, pair.activation);
            let mut crossed = h.clone();
            add_gated(block, (kind, crossing.gate), previous, &mut crossed);
            (h, Some(crossed))
        }
        Some((crossing @ LatentCrossing { form: CrossingForm::Released, .. }, previous)) => {
            let mut v = u;
            add_gated(block, (kind, crossing.gate), previous, &mut v);
            (normalise(block, kind, &v, pair.activation), None)
        }
    };
    let b = block.weight(WeightId::FactorB(kind));
    let y = multiply(block, crossed.as_ref().unwrap_or(&h), b);
    *latent = Some(h);
    y
}

/// x·W, for x `[tokens, d_in]` and W `[d_in, d_out]`.
fn multiply(block: &BlockContext<'_>, x: &[f32], weight: &[f32]) -> Vec<f32> {
    let d_in = x.len() / block.tokens;
    let mut y = vec![0.0; weight.len() / d_in * block.tokens];
    multiply_into(block, x, weight, &mut y, WriteMode::Replace);
    y
}

fn multiply_into(
    block: &BlockContext<'_>,
    x: &[f32],
    weight: &[f32],
    y: &mut [f32],
    write: WriteMode,
) {
    let (d_in, d_out) = (x.len() / block.tokens, y.len() / block.tokens);
    let weight = MatrixView::new(weight, d_in, d_out);
    let y = MatrixViewMut::new(y, block.tokens, d_out);
    gemm_forward(MatrixView::new(x, block.tokens, d_in), weight, y, 1, write, block.parallel);
}

/// φ(u).
fn activate(block: &BlockContext<'_>, u: &[f32], activation: Activation) -> Vec<f32> {
    let (tokens, rank) = (block.tokens, u.len() / block.tokens);
    let mut h = vec![0.0; u.len()];
    let output = MatrixViewMut::new(&mut h, tokens, rank);
    latent_forward(MatrixView::new(u, tokens, rank), activation, output, block.parallel);
    h
}

/// φ(LayerNorm(v)).
fn normalise(
    block: &BlockContext<'_>,
    kind: LinearKind,
    v: &[f32],
    activation: Activation,
) -> Vec<f32> {
    let (tokens, rank) = (block.tokens, v.len() / block.tokens);
    let norm = LayerNorm {
        scale: block.weight(WeightId::LatentNormScale(kind)),
        bias: block.weight(WeightId::LatentNormBias(kind)),
        epsilon: block.model.latent_norm_epsilon as f32,
        phi: activation,
    };
    let mut h = vec![0.0; v.len()];
    let output = MatrixViewMut::new(&mut h, tokens, rank);
    layer_norm_forward(MatrixView::new(v, tokens, rank), norm, output, block.parallel);
    h
}

/// Adds a bias to every row.
pub(super) fn add_to_rows(bias: &[f32], rows: &mut [f32]) {
    for row in rows.chunks_mut(bias.len()) {
        row.iter_mut().zip(bias).for_each(|(element, bias)| *element += bias);
    }
}

/// Adds Gate(p) to a latent.
fn add_gated(
    block: &BlockContext<'_>,
    (kind, gate): (LinearKind, CrossingGate),
    previous: &[f32],
    latent: &mut [f32],
) {
    match gate {
        CrossingGate::Identity => add_into(previous, latent, block.parallel),
        CrossingGate::Dense | CrossingGate::Affine => {
            if gate == CrossingGate::Affine {
                add_to_rows(block.weight(WeightId::CrossingGateBias(kind)), latent);
            }
            let gate = block.weight(WeightId::CrossingGate(kind));
            multiply_into(block, previous, gate, latent, WriteMode::Add);
        }
        CrossingGate::Tensor { a, b } => {
            let (a, b) = (a as usize, b as usize);
            let gate = TensorGate {
                u: MatrixView::new(block.weight(WeightId::CrossingGateU(kind)), a, a),
                v: MatrixView::new(block.weight(WeightId::CrossingGateV(kind)), b, b),
            };
            let mut scratch = vec![0.0; gate.scratch_elements(block.parallel)];
            let (tokens, add) = (block.tokens, WriteMode::Add);
            tensor_gate_forward(tokens, gate, previous, latent, add, &mut scratch, block.parallel);
        }
    }
}
