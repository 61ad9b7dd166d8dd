//! Times of a stage besides its blocks.

use narrows_cost_model::OverlapSlowdown;
use narrows_plan::emit::{
    InstrTemplate, StageBoundary, clear_square_sum, reduce_square_sum, reduce_tied_gradient,
    stage_transfers,
};
use narrows_plan::program::Extent;
use narrows_plan::strategy::{BoundaryLayout, op_parameters};
use narrows_plan::{Context, Seconds};

use super::embedding_and_head::EmbeddingAndHead;
use super::sharding::sharding_beside_blocks;
use crate::request::Request;
use crate::segment::{SegmentSolver, SegmentSpec, SolvedSegment};

/// Times of a stage besides its blocks.
#[derive(Clone, Debug, Default)]
pub struct StageOverhead {
    /// Forward pass of one microbatch: embedding, head, transfers.
    pub forward: Seconds,
    /// Backward pass of one microbatch.
    pub backward: Seconds,
    /// The parts of the forward and the backward pass that belong to each chunk.
    pub(crate) chunks: Vec<[Seconds; 2]>,
    /// Step phase.
    pub step_phase: Seconds,
    /// Lower bound on the step phase under other solutions of embedding and head.
    pub step_phase_min: Seconds,
    /// The parts of the step phase around synchronisations of stages.
    pub(crate) syncs: StepSyncs,
    /// The backward pass before the stage's blocks.
    pub(crate) before_blocks: BeforeBlocks,
    /// Lower bound on what the reductions of the stage's first block add to those of other blocks: none of them runs
    /// beside the last backward pass. Counted in `step_phase`.
    pub(crate) first_block_min: Seconds,
    /// Slowdown of the last backward pass and reductions beside it.
    pub(crate) slowdown: Option<OverlapSlowdown>,
}

/// The backward pass of a stage before that of its blocks, with the head's reductions beside the last one.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BeforeBlocks {
    /// Backward pass of one microbatch: the receive, or the head.
    pub backward: Seconds,
    /// Gradient reductions of the head beside the rest of the pass.
    pub overlapped: Seconds,
}

/// The parts of a stage's step phase at which stages wait for each other, all counted in [`StageOverhead::step_phase`].
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StepSyncs {
    /// Work before the first synchronisation.
    pub begin: Seconds,
    /// All-reduce of a tied weight's gradient between the first and the last stage.
    pub tied: Option<Seconds>,
    /// All-reduce of the squared gradient norm over all stages; `None` on one stage.
    pub norm: Option<Seconds>,
    /// Optimizer updates of embedding and head, which follow the norm.
    pub update: Seconds,
}

impl StageOverhead {
    /// The overheads of all stages.
    pub(crate) fn of_stages(
        request: &Request,
        segments: &SegmentSolver,
        context: &Context,
        embedding_and_head: &EmbeddingAndHead,
    ) -> Vec<StageOverhead> {
        let prices = segments.prices();
        let price = |template: &InstrTemplate| prices.kernel_time(&template.kernel());
        let stages = context.mesh.pipeline;
        let once: Seconds =
            reduce_square_sum(context).iter().chain([&clear_square_sum()]).map(price).sum();
        // The reduction over the stages is the last one.
        let norm = reduce_square_sum(context).last().filter(|_| stages > 1).map(price);
        let syncs = StepSyncs { begin: price(&clear_square_sum()), norm, ..StepSyncs::default() };
        (0..stages)
            .map(|stage| {
                let boundary = StageBoundary {
                    tensors: segments.narrowest_carried(),
                    layout: embedding_and_head.boundary,
                };
                let transfers = |chunk| {
                    let virtual_stage = context.virtual_stage(stage as usize, chunk);
                    stage_transfers(&boundary, &boundary, virtual_stage, context)
                };
                let total = |templates: &[InstrTemplate]| templates.iter().map(price).sum();
                let transfers: Vec<_> = (0..context.chunks as usize).map(transfers).collect();
                let times = |(forward, backward): &(Vec<_>, Vec<_>)| {
                    [forward, backward].map(|pass| total(pass))
                };
                let chunks: Vec<[Seconds; 2]> = transfers.iter().map(times).collect();
                let mut overhead = StageOverhead {
                    forward: chunks.iter().map(|[forward, _]| *forward).sum(),
                    backward: chunks.iter().map(|[_, backward]| *backward).sum(),
                    chunks,
                    step_phase: once,
                    syncs,
                    slowdown: prices.overlap_slowdown(),
                    ..StageOverhead::default()
                };
                if stage == 0 {
                    overhead.add(0, &embedding_and_head.embedding);
                }
                // Before the blocks of the first chunk, the last to run backward: the head, or the gradient from the next
                // virtual stage.
                let head = &embedding_and_head.head;
                let is_last = stage + 1 == stages;
                if is_last {
                    overhead.before_blocks.overlapped = head.time.overlapped;
                    overhead.add(context.chunks as usize - 1, head);
                }
                overhead.before_blocks.backward = match transfers[0].1.first() {
                    _ if is_last && context.chunks == 1 => head.time.backward,
                    received => received.map(price).unwrap_or_default(),
                };
                if request.model.tied && stages > 1 && (stage == 0 || stage + 1 == stages) {
                    let tied = tied_gradient(&embedding_and_head.head, context);
                    overhead.syncs.tied =
                        tied.map(|extent| price(&reduce_tied_gradient(extent, context)));
                    overhead.step_phase += overhead.syncs.tied.unwrap_or_default();
                }
                overhead.first_block_min =
                    first_block_min(segments, context, stage, embedding_and_head.boundary);
                overhead.step_phase += overhead.first_block_min;
                let [forward, backward] =
                    sharding_beside_blocks(segments, context, stage, embedding_and_head);
                overhead.forward += forward;
                overhead.backward += backward;
                overhead.step_phase_min = overhead.step_phase;
                overhead
            })
            .collect()
    }

    fn add(&mut self, chunk: usize, solved: &SolvedSegment) {
        self.forward += solved.time.forward;
        self.backward += solved.time.backward;
        let [forward, backward] = &mut self.chunks[chunk];
        *forward += solved.time.forward;
        *backward += solved.time.backward;
        self.step_phase += solved.time.step_phase;
        self.syncs.update += solved.time.update;
    }
}

/// Lower bound on what the reductions of the first block of a stage add to those of other blocks.
fn first_block_min(
    segments: &SegmentSolver,
    context: &Context,
    stage: u64,
    boundary: BoundaryLayout,
) -> Seconds {
    let Some(slowdown) = segments.prices().overlap_slowdown() else { return Seconds(0.0) };
    // The first block of a later stage is any of them.
    let shapes = match (stage, segments.layer_shapes().first()) {
        (0, Some(first)) => *first..first + 1,
        _ => 0..segments.shape_count(),
    };
    let overlapped =
        |shape: usize| segments.overlapped_min(SegmentSpec::block(shape, boundary), context);
    let least = shapes.map(overlapped).reduce(f64::min).unwrap_or(0.0);
    Seconds(least * (1.0 - slowdown.hidden_cost()))
}

/// The gradient of the weight that the first and the last stage share.
fn tied_gradient(head: &SolvedSegment, context: &Context) -> Option<Extent> {
    let op = head.segment.vocabulary_op()?;
    let strategy = head.choice.ops[op.0 as usize].choice.strategy;
    let parameters = op_parameters(head.segment.op(op), strategy, context)?;
    Some(parameters.gradient_extent(context))
}
