//! The whole model forwards and backwards: embedding, blocks, final norm, head, loss.

use narrows_plan::model::Model;

use super::attention::BatchShape;
use super::block::{self, BlockContext, Latents};
use super::{Batch, Float, Matrix, Parameters, embedding_and_loss, norm};

/// What the backward pass of a model needs.
pub(super) struct ModelTape<T> {
    blocks: Vec<block::BlockTape<T>>,
    /// What the last block made.
    x: Matrix<T>,
    normed: Matrix<T>,
    /// tokens × vocab.
    pub logits: Matrix<T>,
}

pub(super) fn forward<T: Float>(
    model: &Model,
    parameters: &Parameters<T>,
    batch: Batch<'_>,
) -> ModelTape<T> {
    let mut x = embedding_and_loss::embedding_forward(parameters.of("embedding"), batch.tokens);
    let mut blocks: Vec<block::BlockTape<T>> = vec![];
    for index in 0..model.blocks.len() {
        let (output, trace) = site(model, parameters, batch, &blocks, index).forward(x);
        blocks.push(trace);
        x = output;
    }
    let normed = norm::rms_forward(&x, parameters.of("final_norm"), model.norm_epsilon);
    let logits = if model.tied {
        normed.times_transposed(parameters.of("embedding"))
    } else {
        normed.times(parameters.of("head"))
    };
    ModelTape { blocks, x, normed, logits }
}

/// Adds the gradients of all parameters, given that of the logits.
pub(super) fn backward<T: Float>(
    model: &Model,
    parameters: &Parameters<T>,
    batch: Batch<'_>,
    trace: &ModelTape<T>,
    dlogits: &Matrix<T>,
    gradients: &mut Parameters<T>,
) {
    let dnormed = if model.tied {
        gradients.add("embedding", &dlogits.transposed_times(&trace.normed));
        dlogits.times(parameters.of("embedding"))
    } else {
        gradients.add("head", &trace.normed.transposed_times(dlogits));
        dlogits.times_transposed(parameters.of("head"))
    };
    let scale = parameters.of("final_norm");
    let (mut dx, dscale) = norm::rms_backward(&trace.x, scale, model.norm_epsilon, &dnormed);
    gradients.add("final_norm", &dscale);
    let mut dsent: Latents<T> = Default::default();
    for index in (0..model.blocks.len()).rev() {
        let site = site(model, parameters, batch, &trace.blocks, index);
        (dx, dsent) = site.backward(&trace.blocks[index], dx, &dsent, gradients);
    }
    let vocab = model.vocab as usize;
    gradients.add("embedding", &embedding_and_loss::embedding_backward(vocab, batch.tokens, &dx));
}

fn site<'a, T>(
    model: &'a Model,
    parameters: &'a Parameters<T>,
    batch: Batch<'_>,
    blocks: &'a [block::BlockTape<T>],
    index: usize,
) -> BlockContext<'a, T> {
    let shape = BatchShape {
        sequences: batch.sequences,
        length: batch.length,
        heads: model.heads as usize,
        kv_heads: model.kv_heads as usize,
        head_dim: model.head_dim as usize,
    };
    let before = index.checked_sub(1).map(|before| &blocks[before].linears);
    BlockContext { model, index, shape, parameters, before }
}
