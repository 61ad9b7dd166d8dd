//! Pipelines whose stages have several chunks of the model.
//!
//! All chunks have the same number of blocks, so the division of the blocks follows from the numbers of stages and
//! chunks: virtual stage k, on stage k mod P of P, has the k-th run of blocks.
//!
//! Let t, f and u be the times of both passes of a microbatch, of the forward pass, and of the step phase, of all chunks of a
//! stage, and t' and f' those of its first chunk. A step S of m microbatches takes at least
//!
//! ```text
//! S ≥ Σ_{j<s} t'ⱼ + m·tₛ + u₀        S ≥ Σ_{j<s} f'ⱼ + m·tₛ + uₛ        for every stage s > 0
//! S ≥ m·t₀ + u₀ + Σ_{j>0} t''ⱼ − (P − 1)·(f''₀ + f'₀)                 without f'₀ where m = P
//! ```
//! Stage s begins after the forward passes of the first chunks of the stages before it, and after its last pass these
//! run the backward passes of theirs, and the first stage its step phase. The first backward pass of the first stage is one through
//! its last chunk, of times t'' and f''. It follows the forward pass of the first microbatch through this chunk, and the round trip
//! through the last chunks of the later stages, while the first stage runs at most its next 2·(P − 1) forward passes: those of the
//! other microbatches of the first group through the last chunk, and of the second group through the first chunk.
//!
//! A solution with a small t may have a large u, so a bound whose terms are minimised one by one may be less than any step. A mean of
//! these bounds is a bound as well, and its terms of one block are minimised together.

use std::ops::Range;

use narrows_cost_model::PassTimes;
use narrows_plan::strategy::BoundaryLayout;
use narrows_plan::{Context, Seconds};

use super::assignment::StageAssignment;
use super::overhead::StageOverhead;
use super::partition::PruningCutoff;
use crate::segment::{SegmentSolver, SegmentSpec};

/// The blocks of a virtual stage, of this many blocks of the model.
pub(super) fn chunk_blocks(context: &Context, virtual_stage: usize, blocks: usize) -> Range<usize> {
    let first = |virtual_stage: usize| virtual_stage * blocks / context.virtual_stages();
    first(virtual_stage)..first(virtual_stage + 1)
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

/// Lower bounds on the cost a·t + c·u of a block, or of the overhead of a stage, for both passes t of a microbatch and a step
/// phase u, in seconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct WeightedCostMin {
    /// Least u.
    pub step_phase: f64,
    /// Least t + u.
    pub single_microbatch_step: f64,
    /// Least m·t + u in a step of m microbatches.
    pub step: f64,
    /// Least t.
    pub microbatch: f64,
}

impl WeightedCostMin {
    /// Lower bound on a·t + c·u, which is concave in (a, c) and proportional to it: between two weights at which it is known, no
    /// less than their sum.
    fn at(&self, passes: f64, step_phases: f64, microbatches: f64) -> f64 {
        let WeightedCostMin { step_phase, single_microbatch_step, step, microbatch } = *self;
        if passes >= microbatches * step_phases {
            step_phases * step + (passes - microbatches * step_phases) * microbatch
        } else if passes >= step_phases {
            let of_step = (passes - step_phases) / (microbatches - 1.0);
            of_step * step + (step_phases - of_step) * single_microbatch_step
        } else {
            passes * single_microbatch_step + (step_phases - passes) * step_phase
        }
    }
}

/// Lower bounds on a chunk of a stage.
pub(super) struct ChunkMin {
    /// Costs of its blocks, and of the overhead of the stage in its passes.
    pub costs: Vec<WeightedCostMin>,
    /// Forward pass of a microbatch, in seconds.
    pub forward: f64,
    /// Backward pass of a microbatch, in seconds.
    pub backward: f64,
}

impl ChunkMin {
    /// The bounds on all chunks of each stage, without the memory limit, where `least` are those of the blocks.
    pub(super) fn of_stages(
        segments: &SegmentSolver,
        context: &Context,
        boundary: BoundaryLayout,
        overheads: &[StageOverhead],
        least: &PruningCutoff,
    ) -> Vec<Vec<ChunkMin>> {
        let microbatches = context.workload.microbatches(&context.mesh);
        let of_layers = segments.of_layers(|shape| {
            let spec = SegmentSpec::block(shape, boundary);
            let fastest = segments.fastest(spec, context);
            let step = fastest.map_or(0.0, |fastest| fastest.time.total(microbatches).0);
            (step, segments.min_pass_times(spec, context))
        });
        let of_block = |block: usize| WeightedCostMin {
            step_phase: least.step_phase_times_min[block],
            single_microbatch_step: least.single_microbatch_steps_min[block],
            step: of_layers[block].0,
            microbatch: least.microbatch_times_min[block],
        };
        let of_chunk = |overhead: &StageOverhead, chunk: usize, blocks: Range<usize>| {
            let [forward, backward] = overhead.chunks[chunk].map(|time| time.0);
            let time = forward + backward;
            // The head of the last stage belongs to its last chunk, but means weigh all chunks of this stage alike.
            let [step_phase, step_phase_min] = match chunk {
                0 => [overhead.step_phase.0, overhead.step_phase_min.0],
                _ => [0.0, 0.0],
            };
            let of_overhead = WeightedCostMin {
                step_phase: step_phase_min,
                single_microbatch_step: time + step_phase_min,
                step: microbatches as f64 * time + step_phase,
                microbatch: time,
            };
            let passes = of_layers[blocks.clone()].iter().map(|(_, passes)| passes);
            ChunkMin {
                forward: forward + passes.clone().map(|passes| passes.forward).sum::<f64>(),
                backward: backward + passes.map(|passes| passes.backward).sum::<f64>(),
                costs: blocks.map(of_block).chain([of_overhead]).collect(),
            }
        };
        let of_stage = |(stage, overhead): (usize, &StageOverhead)| {
            let chunks = stage_chunks(context, stage, of_layers.len()).enumerate();
            chunks.map(|(chunk, blocks)| of_chunk(overhead, chunk, blocks)).collect()
        };
        overheads.iter().enumerate().map(of_stage).collect()
    }

    /// Lower bound on both passes of a microbatch.
    fn passes(&self) -> f64 {
        self.costs.iter().map(|cost| cost.microbatch).sum()
    }

    /// Lower bound on the cost with weights of its passes and of its step phase.
    fn cost(&self, passes: f64, step_phases: f64, microbatches: f64) -> f64 {
        self.costs.iter().map(|cost| cost.at(passes, step_phases, microbatches)).sum()
    }
}

/// Parts into which the weights of means are divided.
const WEIGHT_PARTS: u64 = 8;

/// Lower bound in seconds on the step of an interleaved pipeline with these chunks of each stage: the largest mean of three bounds,
/// that of a stage before the first stage's step phase, of the stage before its own, and of the first stage, which waits.
pub(super) fn mean_bound(stages: &[Vec<ChunkMin>], microbatches: u64) -> f64 {
    let Some((first, later)) = stages.split_first() else { return 0.0 };
    let (last, unwaited) = (first.len() - 1, stages.len() as f64 - 1.0);
    let is_one_group = microbatches <= stages.len() as u64;
    let microbatches = microbatches as f64;
    let waited: f64 = later.iter().filter_map(|chunks| Some(chunks.last()?.passes())).sum();
    // The cost of the first stage: `returned` passes of its first chunk, those of a step and the wait for `alone`, and its step
    // phase for both.
    let of_first = |returned: f64, alone: f64| {
        let of_chunk = |(at, chunk): (usize, &ChunkMin)| {
            let is_short = at == last || at == 0 && !is_one_group;
            let short = if is_short { alone * unwaited } else { 0.0 };
            let returned_passes = if at == 0 { returned } else { 0.0 };
            let passes = returned_passes + alone * microbatches - short;
            chunk.cost(passes, returned + alone, microbatches) + short * chunk.backward
        };
        first.iter().enumerate().map(of_chunk).sum::<f64>() + alone * waited
    };
    let mut bound = 0.0_f64;
    let (mut passes_before, mut forward_before) = (0.0, first[0].forward);
    for stage in later {
        for parts in 0..=WEIGHT_PARTS {
            for own in 0..=WEIGHT_PARTS - parts {
                let [returned, own] = [parts, own].map(|of| of as f64 / WEIGHT_PARTS as f64);
                let passes = microbatches * (returned + own);
                let of_stage: f64 =
                    stage.iter().map(|chunk| chunk.cost(passes, own, microbatches)).sum();
                let before = returned * passes_before + own * forward_before;
                bound = bound.max(of_first(returned, 1.0 - returned - own) + of_stage + before);
            }
        }
        passes_before += stage[0].passes();
        forward_before += stage[0].forward;
    }
    bound
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
