//! Forward and backward pass of the whole model: embedding, blocks, final norm, head.

use narrows_plan::model::{Model, ParameterId, WeightId};

use super::attention::BatchShape;
use super::block::{self, BlockInput, Latents};
use super::{Batch, Float, Matrix, Parameters, embedding_and_loss, norm};

const EMBEDDING: ParameterId = ParameterId { block: None, weight: WeightId::Embedding };
const FINAL_NORM: ParameterId = ParameterId { block: None, weight: WeightId::FinalNorm };
const HEAD: ParameterId = ParameterId { block: None, weight: WeightId::Head };

/// The intermediate values that the backward pass of a model reads.
pub(super) struct ModelTape<T> {
    blocks: Vec<block::BlockTape<T>>,
    /// Output of the last block.
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
    let mut x = embedding_and_loss::embedding_forward(parameters.checked(EMBEDDING), batch.tokens);
    let mut blocks: Vec<block::BlockTape<T>> = vec![];
    for index in 0..model.blocks.len() {
        let (output, tape) = block_context(model, parameters, batch, &blocks, index).forward(x);
        blocks.push(tape);
        x = output;
    }
    let normed = norm::rms_forward(&x, parameters.checked(FINAL_NORM), model.norm_epsilon);
    let logits = if model.tied {
        normed.times_transposed(parameters.checked(EMBEDDING))
    } else {
        normed.times(parameters.checked(HEAD))
    };
    ModelTape { blocks, x, normed, logits }
}

/// Adds the gradients of all parameters to `gradients`, given the gradient of the logits.
pub(super) fn backward<T: Float>(
    model: &Model,
    parameters: &Parameters<T>,
    batch: Batch<'_>,
    tape: &ModelTape<T>,
    dlogits: &Matrix<T>,
    gradients: &mut Parameters<T>,
) {
    let dnormed = if model.tied {
        gradients.add(EMBEDDING, &dlogits.transposed_times(&tape.normed));
        dlogits.times(parameters.checked(EMBEDDING))
    } else {
        gradients.add(HEAD, &tape.normed.transposed_times(dlogits));
        dlogits.times_transposed(parameters.checked(HEAD))
    };
    let scale = parameters.checked(FINAL_NORM);
    let (mut dx, dscale) = norm::rms_backward(&tape.x, scale, model.norm_epsilon, &dnormed);
    gradients.add(FINAL_NORM, &dscale);
    let mut dsent: Latents<T> = Default::default();
    for index in (0..model.blocks.len()).rev() {
        let context = block_context(model, parameters, batch, &tape.blocks, index);
        (dx, dsent) = context.backward(&tape.blocks[index], dx, &dsent, gradients);
    }
    gradients.add(EMBEDDING, &embedding_and_loss::embedding_backward(model, batch.tokens, &dx));
}

fn block_context<'a, T>(
    model: &'a Model,
    parameters: &'a Parameters<T>,
    batch: Batch<'_>,
    blocks: &'a [block::BlockTape<T>],
    index: usize,
) -> BlockInput<'a, T> {
    let window = model.blocks[index].attention.window(batch.length as u64);
    let shape = BatchShape {
        sequences: batch.sequences,
        length: batch.length,
        heads: model.heads as usize,
        kv_heads: model.kv_heads as usize,
        head_dim: model.head_dim as usize,
        window: window.map_or(batch.length, |window| window as usize),
    };
    let previous = index.checked_sub(1).map(|previous| &blocks[previous].linears);
    BlockInput { model, index, shape, parameters, previous }
}
