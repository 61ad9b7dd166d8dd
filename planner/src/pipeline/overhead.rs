//! Times of a stage besides its blocks.

use narrows_cost_model::OverlapSlowdown;
use narrows_plan::emit::{
    InstrTemplate, StageBoundary, clear_square_sum, reduce_square_sum, reduce_tied_gradient,
    stage_transfers,
};
use narrows_plan::graph::{BoundaryTensor, SegmentKind};
use narrows_plan::program::Extent;
use narrows_plan::strategy::{BoundaryLayout, TiedWeightLayout, op_parameters};
use narrows_plan::{BucketSplit, Context, Seconds};

use super::embedding_and_head::EmbeddingAndHead;
use super::sharding::uncounted_sharding;
use crate::request::Request;
use crate::segment::{SegmentSolver, SegmentSpec, SolvedSegment};

/// The stages of a pipeline without blocks: any of the first and the last one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct EmptyStages {
    first: bool,
    last: bool,
}

impl EmptyStages {
    /// The stages without blocks of a division.
    fn of(counts: &[usize]) -> EmptyStages {
        let is_empty = |count: Option<&usize>| counts.len() > 1 && count == Some(&0);
        EmptyStages { first: is_empty(counts.first()), last: is_empty(counts.last()) }
    }

    /// All that allow a division of this many blocks, with a block on every other stage.
    fn all(context: &Context, blocks: usize) -> impl Iterator<Item = EmptyStages> {
        let stages = context.mesh.pipeline as usize;
        // Chunks of an interleaved pipeline have equal numbers of blocks.
        let may_be_empty = context.chunks == 1;
        let all = [[false, false], [true, false], [false, true], [true, true]];
        all.into_iter().map(|[first, last]| EmptyStages { first, last }).filter(move |empty| {
            let with_blocks = stages.saturating_sub(empty.count());
            (1..=blocks).contains(&with_blocks) && (may_be_empty || empty.count() == 0)
        })
    }

    fn count(self) -> usize {
        usize::from(self.first) + usize::from(self.last)
    }

    fn contains(self, stage: u64, stages: u64) -> bool {
        self.first && stage == 0 || self.last && stage + 1 == stages
    }
}

/// The overheads of all stages, for all choices of stages without blocks.
pub(crate) struct PipelineOverheads {
    /// Layouts of embedding and head.
    layouts: (BoundaryLayout, Option<TiedWeightLayout>),
    of_choices: Vec<(EmptyStages, Vec<StageOverhead>)>,
}

impl PipelineOverheads {
    /// The overheads of the stages of a context.
    pub(crate) fn new(
        request: &Request,
        segments: &SegmentSolver,
        context: &Context,
        embedding_and_head: &EmbeddingAndHead,
    ) -> PipelineOverheads {
        let stages = context.mesh.pipeline;
        let of_stage = |stage, empty| {
            StageOverhead::of_stage(request, segments, context, embedding_and_head, stage, empty)
        };
        let mut with_blocks: Vec<StageOverhead> = vec![];
        for stage in 0..stages {
            // Stages between the second and the last have the same neighbours, transfers and kernels as the second.
            let overhead = match with_blocks.get(1) {
                Some(second) if stage + 1 < stages => second.clone(),
                _ => of_stage(stage, EmptyStages::default()),
            };
            with_blocks.push(overhead);
        }
        let of_choice = |empty: EmptyStages| {
            let mut overheads = with_blocks.clone();
            // An empty stage and its neighbour exchange the hidden state alone.
            for (stage, overhead) in (0..stages).zip(&mut overheads) {
                let is_changed = [stage.wrapping_sub(1), stage, stage + 1]
                    .into_iter()
                    .any(|near| near < stages && empty.contains(near, stages));
                if is_changed {
                    *overhead = of_stage(stage, empty);
                }
            }
            (empty, overheads)
        };
        let of_choices = EmptyStages::all(context, segments.layer_shapes().len()).map(of_choice);
        let layouts = (embedding_and_head.boundary, embedding_and_head.tied_weight);
        PipelineOverheads { layouts, of_choices: of_choices.collect() }
    }

    /// Layouts of embedding and head.
    pub(crate) fn layouts(&self) -> (BoundaryLayout, Option<TiedWeightLayout>) {
        self.layouts
    }

    /// The overheads of the stages of a division.
    pub(crate) fn of(&self, counts: &[usize]) -> &[StageOverhead] {
        let empty = EmptyStages::of(counts);
        let found = self.of_choices.iter().find(|(other, _)| *other == empty);
        let (_, overheads) = found.unwrap_or_else(|| unreachable!("{counts:?} is no division"));
        overheads
    }

    /// The overheads of all stages by the choice of stages without blocks.
    pub(super) fn choices(&self) -> impl Iterator<Item = &[StageOverhead]> {
        self.of_choices.iter().map(|(_, overheads)| overheads.as_slice())
    }

    /// All overheads of one stage.
    pub(crate) fn of_stage_mut(
        &mut self,
        stage: usize,
    ) -> impl Iterator<Item = &mut StageOverhead> {
        self.of_choices.iter_mut().map(move |(_, overheads)| &mut overheads[stage])
    }
}

/// Times of a stage besides its blocks.
#[derive(Clone, Debug, Default)]
pub struct StageOverhead {
    /// Whether the stage has no block.
    pub(crate) is_empty: bool,
    /// Forward pass of one microbatch: embedding, head, transfers.
    pub forward: Seconds,
    /// Backward pass of one microbatch.
    pub backward: Seconds,
    /// The parts of the forward and the backward pass that belong to each chunk.
    pub(crate) chunks: Vec<[Seconds; 2]>,
    /// The transfers of these parts.
    pub(crate) transfers: Vec<[Seconds; 2]>,
    /// Step phase.
    pub step_phase: Seconds,
    /// Forward pass, backward pass and step phase without embedding and head.
    pub(crate) besides_ends: [Seconds; 3],
    /// Time of embedding and head in the step phase that `step_phase` leaves out.
    pub(crate) uncounted: Seconds,
    /// Lower bound on the step phase under other solutions of embedding and head.
    pub step_phase_min: Seconds,
    /// The parts of the step phase around synchronisations of stages.
    pub(crate) syncs: StepSyncs,
    /// The backward pass before the stage's blocks.
    pub(crate) before_blocks: BeforeBlocks,
    /// Forward pass of one microbatch before the stage's blocks: the embedding, or the receive.
    pub(crate) forward_before_blocks: Seconds,
    /// Gathers of the head's updated weights, which overlap with the first forward pass of the next step.
    pub(crate) head_gathered: Seconds,
    /// Least time that gathers of updated weights add to a step, over their time alone, where they begin with their first
    /// forward pass; 0 where no gathers overlap with passes.
    pub(crate) gather_hidden_cost: f64,
    /// Lower bound on the time that the stage's first block adds because only the embedding can hide the gather of its
    /// weights. Counted in `step_phase`.
    pub(crate) first_gather_min: Seconds,
    /// Lower bound on the time that the stage's first block adds because its reductions follow the last backward pass
    /// instead of overlapping with it. Counted in `step_phase`.
    pub(crate) first_block_min: Seconds,
    /// Slowdown of passes and of the collectives over the data axis that overlap with them.
    pub(crate) slowdown: Option<OverlapSlowdown>,
}

/// The part of a stage's backward pass that precedes its blocks, with the head's overlapped reductions.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BeforeBlocks {
    /// Backward pass of one microbatch: the receive, or the head.
    pub backward: Seconds,
    /// Gradient reductions of the head, which overlap with the rest of the pass.
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
    /// The overhead of a stage.
    fn of_stage(
        request: &Request,
        segments: &SegmentSolver,
        context: &Context,
        embedding_and_head: &EmbeddingAndHead,
        stage: u64,
        empty: EmptyStages,
    ) -> StageOverhead {
        let prices = segments.prices(context);
        let price = |template: &InstrTemplate| prices.kernel_time(&template.kernel());
        let stages = context.mesh.pipeline;
        let once: Seconds =
            reduce_square_sum(context).iter().chain([&clear_square_sum()]).map(price).sum();
        // The reduction over the stages is the last one.
        let norm = reduce_square_sum(context).last().filter(|_| stages > 1).map(price);
        let syncs = StepSyncs { begin: price(&clear_square_sum()), norm, ..StepSyncs::default() };
        let hidden = [BoundaryTensor::hidden(request.model.hidden)];
        let boundary = |stage: u64| StageBoundary {
            tensors: match empty.contains(stage, stages) || empty.contains(stage + 1, stages) {
                true => &hidden,
                false => segments.narrowest_carried(),
            },
            layout: embedding_and_head.boundary,
        };
        let (before, after) = (boundary(stage.saturating_sub(1)), boundary(stage));
        let transfers = |chunk| {
            let virtual_stage = context.virtual_stage(stage as usize, chunk);
            stage_transfers(&before, &after, virtual_stage, context)
        };
        let total = |templates: &[InstrTemplate]| templates.iter().map(price).sum();
        let transfers: Vec<_> = (0..context.chunks as usize).map(transfers).collect();
        let times =
            |(forward, backward): &(Vec<_>, Vec<_>)| [forward, backward].map(|pass| total(pass));
        let chunks: Vec<[Seconds; 2]> = transfers.iter().map(times).collect();
        let mut overhead = StageOverhead {
            is_empty: empty.contains(stage, stages),
            forward: chunks.iter().map(|[forward, _]| *forward).sum(),
            backward: chunks.iter().map(|[_, backward]| *backward).sum(),
            transfers: chunks.clone(),
            chunks,
            step_phase: once,
            syncs,
            slowdown: prices.overlap_slowdown(),
            ..StageOverhead::default()
        };
        // Before the blocks of the first chunk, the last to run backward: the head, or the gradient from the next
        // virtual stage.
        let head = &embedding_and_head.head;
        let is_last = stage + 1 == stages;
        if is_last {
            overhead.before_blocks.overlapped = head.time.overlapped;
            overhead.head_gathered = head.time.gathered;
        }
        overhead.before_blocks.backward = match transfers[0].1.first() {
            _ if is_last && context.chunks == 1 => head.time.backward,
            received => received.map(price).unwrap_or_default(),
        };
        overhead.forward_before_blocks = match (stage, transfers[0].0.first()) {
            (0, _) => embedding_and_head.embedding.time.forward,
            (_, received) => received.map(price).unwrap_or_default(),
        };
        overhead.gather_hidden_cost = match overhead.slowdown {
            Some(slowdown) if context.gathers_in_forward() => slowdown.hidden_cost(),
            _ => 0.0,
        };
        if request.model.tied && stages > 1 && (stage == 0 || is_last) {
            let tied = tied_gradient(&embedding_and_head.head, context);
            overhead.syncs.tied = tied.map(|extent| price(&reduce_tied_gradient(extent, context)));
            overhead.step_phase += overhead.syncs.tied.unwrap_or_default();
        }
        if !overhead.is_empty {
            overhead.first_block_min =
                first_block_min(segments, context, stage, embedding_and_head.boundary);
            overhead.first_gather_min =
                first_gather_min(segments, context, stage, embedding_and_head);
            let [forward, backward] =
                uncounted_sharding(segments, context, stage, embedding_and_head);
            overhead.step_phase += overhead.first_block_min + overhead.first_gather_min;
            overhead.forward += forward;
            overhead.backward += backward;
        }
        overhead.besides_ends = [overhead.forward, overhead.backward, overhead.step_phase];
        if stage == 0 {
            overhead.add(0, &embedding_and_head.embedding);
        }
        if is_last {
            overhead.add(context.chunks as usize - 1, head);
        }
        overhead.step_phase_min = overhead.step_phase;
        overhead
    }

    fn add(&mut self, chunk: usize, solved: &SolvedSegment) {
        self.forward += solved.time.forward;
        self.backward += solved.time.backward;
        let [forward, backward] = &mut self.chunks[chunk];
        *forward += solved.time.forward;
        *backward += solved.time.backward;
        self.step_phase += solved.time.step_phase;
        self.uncounted += solved.time.uncounted;
        self.syncs.update += solved.time.update;
    }
}

/// Lower bound on the time that the first block of a stage adds because its reductions, or some of them, follow the last
/// backward pass.
fn first_block_min(
    segments: &SegmentSolver,
    context: &Context,
    stage: u64,
    boundary: BoundaryLayout,
) -> Seconds {
    // The first block of a later stage is any of them.
    let shapes = match (stage, segments.layer_shapes().first()) {
        (0, Some(first)) => *first..first + 1,
        _ => 0..segments.shape_count(),
    };
    let of_shape = |shape| segments.first_block_min(SegmentSpec::block(shape, boundary), context);
    Seconds(shapes.map(of_shape).reduce(f64::min).unwrap_or(0.0))
}

/// Lower bound on the time that the first block of a stage adds because the first gather of its weights overlaps with what
/// precedes their first reader alone: the embedding, and perhaps collectives and kernels of the block. On later stages the gather
/// also overlaps with the wait for the first microbatch.
fn first_gather_min(
    segments: &SegmentSolver,
    context: &Context,
    stage: u64,
    embedding_and_head: &EmbeddingAndHead,
) -> Seconds {
    let (Some(slowdown), 0, Some(first)) =
        (segments.prices(context).overlap_slowdown(), stage, segments.layer_shapes().first())
    else {
        return Seconds(0.0);
    };
    let is_sharded = context.tensor_size() > 1;
    // The bounds of a pipeline weigh the embedding in several ways, each with a least solution of its own.
    if is_sharded && context.mesh.pipeline > 1 {
        return Seconds(0.0);
    }
    let EmbeddingAndHead { embedding, boundary, tied_weight, .. } = embedding_and_head;
    let block = SegmentSpec::block(*first, *boundary);
    let spec = SegmentSpec::embedding_or_head(SegmentKind::Embedding, *boundary, *tied_weight);
    // The embedding has one solution on one device of the tensor axis. Of several, some have longer forward passes. A second
    // more of these hides less than a second of the gather, so the bound is least where they take all of the least total.
    let only = segments.fastest(spec, context).filter(|_| !is_sharded);
    let forward_max = || {
        let microbatches = context.workload.microbatches(&context.mesh);
        let [step_phase_min, _] = segments.step_phase_range(spec, context);
        let passes = (embedding.time.total(microbatches).0 - step_phase_min) / microbatches as f64;
        let backward_min = segments.min_pass_times_with_flows(spec, context).backward;
        Seconds((passes - backward_min).max(0.0))
    };
    let of_embedding = only.map_or_else(forward_max, |only| only.time.forward);
    let before_reader = of_embedding + Seconds(segments.forward_before_gathers_max(block, context));
    let hidden = slowdown.hidden_cost();
    let of_splits = BucketSplit::ALL.into_iter().zip(segments.first_gathers_min(block, context));
    let added = of_splits.map(|(split, [first, beyond_whole])| {
        // The begin of a block waits for a whole bucket, unless passes run two microbatches.
        let waits_for_reader = split != BucketSplit::Whole || context.overlap_microbatch_pairs;
        let of_microbatch = if waits_for_reader { before_reader } else { of_embedding };
        let during_gather = of_microbatch * context.pass_microbatches() as f64;
        // Where both slow each other much, more computation adds more.
        let exposed = slowdown.exposed(Seconds(first), during_gather).0.min(first);
        // The step phase of the block counts the hidden time of a whole bucket.
        exposed - (first - beyond_whole) * hidden
    });
    Seconds(added.reduce(f64::min).unwrap_or(0.0))
}

/// The gradient of the weight that the first and the last stage share.
fn tied_gradient(head: &SolvedSegment, context: &Context) -> Option<Extent> {
    let op = head.segment.vocabulary_op()?;
    let strategy = head.choice.ops[op.0 as usize].choice.strategy;
    let parameters = op_parameters(head.segment.op(op), strategy, context)?;
    Some(parameters.gradient_extent(context))
}
