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
fn chunk_blocks(context: &Context, virtual_stage: usize, blocks: usize) -> Range<usize> {
    let count = blocks / context.virtual_stages();
    virtual_stage * count..(virtual_stage + 1) * count
}

/// The blocks of each chunk of a stage, of this many blocks of the model.
pub(crate) fn stage_chunks(
    context: &Context,
    stage: usize,
    blocks: usize,
) -> impl Iterator<Item = Range<usize>> {
    (0..context.chunks as usize)
        .map(move |chunk| chunk_blocks(context, context.virtual_stage(stage, chunk), blocks))
}

/// The passes of one microbatch through each chunk of a stage.
pub(super) fn chunk_passes(blocks: &StageAssignment, overhead: &StageOverhead) -> Vec<PassTimes> {
    let chunks = overhead.chunks.iter().zip(blocks.chunks(overhead.chunks.len()));
    chunks
        .map(|([forward, backward], blocks)| PassTimes {
            forward: *forward + blocks.iter().map(|block| block.time.forward).sum::<Seconds>(),
            backward: *backward + blocks.iter().map(|block| block.time.backward).sum::<Seconds>(),
            weight_gradient: Seconds(0.0),
        })
        .collect()
}

/// Lower bounds on the blocks of the model, in seconds and in model order.
#[derive(Clone, Copy)]
pub(crate) struct BlockTimesMin<'a> {
    /// Forward plus backward time of one microbatch.
    pub microbatch: &'a [f64],
    /// Step phase.
    pub step_phase: &'a [f64],
}

impl BlockTimesMin<'_> {
    /// Lower bound in seconds on an interleaved step of equal chunks. The first stage ends its passes last, and then runs
    /// its step phase. `beside_blocks` is the time of one microbatch through a virtual stage besides its blocks, and
    /// `stage_blocks` a lower bound on one microbatch through all blocks of a stage.
    pub(crate) fn step_bound(
        &self,
        context: &Context,
        beside_blocks: impl Fn(usize) -> f64,
        stage_blocks: impl Fn(usize) -> f64,
    ) -> f64 {
        let blocks = self.microbatch.len();
        let virtual_stage = |at: usize| {
            let own: f64 = self.microbatch[chunk_blocks(context, at, blocks)].iter().sum();
            own + beside_blocks(at)
        };
        let times: Vec<f64> = (0..context.virtual_stages()).map(virtual_stage).collect();
        let step_phase: f64 =
            stage_chunks(context, 0, blocks).flatten().map(|block| self.step_phase[block]).sum();
        let microbatches = context.workload.microbatches(&context.mesh);
        let stages = context.mesh.pipeline as usize;
        let stage_microbatch = |stage: usize| {
            let chunks = (stage..times.len()).step_by(stages);
            stage_blocks(stage) + chunks.map(&beside_blocks).sum::<f64>()
        };
        passes_bound(&times, stages, microbatches, stage_microbatch) + step_phase
    }
}

/// Lower bound in seconds on the passes of a step. `chunks` are the times of one microbatch through each virtual stage, and
/// `stage_microbatch` is a lower bound on one microbatch through all chunks of a stage.
///
/// Stage s begins after the forward passes of the first chunks of the stages before it, and after its last pass these
/// run the backward passes of theirs.
pub(super) fn passes_bound(
    chunks: &[f64],
    stages: usize,
    microbatches: u64,
    stage_microbatch: impl Fn(usize) -> f64,
) -> f64 {
    let (mut before, mut bound) = (0.0, 0.0_f64);
    for stage in 0..stages {
        let of_chunks: f64 = chunks.iter().skip(stage).step_by(stages).sum();
        let own = of_chunks.max(stage_microbatch(stage));
        bound = bound.max(before + microbatches as f64 * own);
        before += chunks[stage];
    }
    bound
}
