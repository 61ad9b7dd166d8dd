//! Pipelines whose stages have several chunks of the model.
//!
//! All chunks have the same number of blocks, so the division of the blocks follows from the numbers of stages and
//! chunks: virtual stage k, on stage k mod P of P, has the k-th run of blocks.

use std::ops::Range;

use narrows_cost_model::PassTimes;
use narrows_plan::{Context, Seconds};

use super::assignment::StageAssignment;
use super::overhead::StageOverhead;

/// The blocks of a virtual stage, of this many blocks of the model.
pub(crate) fn chunk_blocks(context: &Context, virtual_stage: usize, blocks: usize) -> Range<usize> {
    let count = blocks / context.virtual_stages() as usize;
    virtual_stage * count..(virtual_stage + 1) * count
}

/// The blocks of the chunks of a stage, in order.
pub(crate) fn stage_blocks(
    context: &Context,
    stage: usize,
    blocks: usize,
) -> impl Iterator<Item = usize> {
    let virtual_stages =
        (stage..context.virtual_stages() as usize).step_by(context.mesh.pipeline as usize);
    let context = *context;
    virtual_stages.flat_map(move |virtual_stage| chunk_blocks(&context, virtual_stage, blocks))
}

/// The passes of one microbatch through each chunk of a stage.
pub(super) fn chunk_passes(blocks: &StageAssignment, overhead: &StageOverhead) -> Vec<PassTimes> {
    let chunks = overhead.chunks.iter();
    let count = (blocks.blocks.len() / overhead.chunks.len().max(1)).max(1);
    chunks
        .zip(blocks.blocks.chunks(count))
        .map(|([forward, backward], blocks)| PassTimes {
            forward: *forward + blocks.iter().map(|block| block.time.forward).sum::<Seconds>(),
            backward: *backward + blocks.iter().map(|block| block.time.backward).sum::<Seconds>(),
            weight_gradient: Seconds(0.0),
        })
        .collect()
}

/// Lower bound in seconds on the passes of a step. `chunks` are the times of one microbatch through each virtual stage.
///
/// Stage s begins after the forward passes of the first chunks of the stages before it, and after its last pass these
/// run the backward passes of theirs.
pub(crate) fn passes_bound(chunks: &[f64], stages: usize, microbatches: u64) -> f64 {
    let (mut before, mut bound) = (0.0, 0.0_f64);
    for stage in 0..stages {
        let own: f64 = chunks.iter().skip(stage).step_by(stages).sum();
        bound = bound.max(before + microbatches as f64 * own);
        before += chunks[stage];
    }
    bound
}
