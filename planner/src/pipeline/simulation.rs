//! Step times of partitions before lowering.

use narrows_cost_model::{
    BucketTime, EarlyBucket, GatherTime, PassTimes, SegmentTime, StageOverlap, StageTime, StepPart,
    SyncedStages, schedule_time,
};
use narrows_plan::program::{MicrobatchPass, StageSchedule};
use narrows_plan::{BucketSplit, Context, Seconds};

use super::assignment::StageAssignment;
use super::interleaved::chunk_passes;
use super::overhead::{BeforeBlocks, PipelineOverheads, StageOverhead, StepSyncs};
use super::partition::Partition;

/// Simulates a step of a partition from its stage times. The result equals the simulation of the lowered program, and
/// for ZeRO-2 and ZeRO-3 with overlap, and for passes of two microbatches, is a lower bound: how much of a collective a pass
/// hides depends on its neighbours.
pub(crate) fn simulate_partition(
    context: &Context,
    partition: &Partition,
    overheads: &PipelineOverheads,
) -> Seconds {
    let (_, time) = with_fastest_buckets(context, partition, overheads);
    time
}

/// The context with the fastest buckets of first blocks, and the time of its step.
pub(crate) fn with_fastest_buckets(
    context: &Context,
    partition: &Partition,
    overheads: &PipelineOverheads,
) -> (Context, Seconds) {
    let simulated = |context: Context| (context, simulate_context(&context, partition, overheads));
    let faster = |a: (Context, Seconds), b: (Context, Seconds)| if b.1 < a.1 { b } else { a };
    let whole = context.with_whole_buckets();
    let mut fastest = simulated(whole);
    // On one stage, reductions and gathers add to a step independently of each other.
    for last_gradient_bucket in BucketSplit::SPLITS {
        if context.can_split_gradient_bucket() {
            fastest = faster(fastest, simulated(Context { last_gradient_bucket, ..whole }));
        }
    }
    let whole_gathers = fastest.0;
    for first_gather_bucket in BucketSplit::SPLITS {
        if context.gathers_in_forward() {
            fastest = faster(fastest, simulated(Context { first_gather_bucket, ..whole_gathers }));
        }
    }
    fastest
}

fn simulate_context(
    context: &Context,
    partition: &Partition,
    overheads: &PipelineOverheads,
) -> Seconds {
    let overheads = overheads.of(&partition.counts);
    let (mut times, mut passes) = (vec![], vec![]);
    for (index, (stage, overhead)) in partition.stages.iter().zip(overheads).enumerate() {
        let schedule = StageSchedule::of(context, index as u64);
        let is_deferred =
            schedule.defers_weight_gradients() && stage.weight_gradient > Seconds(0.0);
        let weight_gradient = if is_deferred { stage.weight_gradient } else { Seconds(0.0) };
        let of_one_chunk = || PassTimes {
            forward: stage.forward + overhead.forward,
            backward: stage.backward + overhead.backward - weight_gradient,
            weight_gradient,
        };
        let of_microbatch = StageTime {
            chunks: match context.chunks {
                1 => vec![of_one_chunk()],
                _ => chunk_passes(stage, overhead),
            },
            step_phase: step_parts(context, overhead, stage),
            overlap: stage_overlap(context, overhead, stage, is_deferred),
        };
        times.push(of_pass(context, of_microbatch));
        passes.push(schedule.passes(is_deferred));
    }
    let passes: Vec<&[MicrobatchPass]> = passes.iter().map(Vec::as_slice).collect();
    schedule_time(&times, &passes)
}

/// The times of a stage whose passes run as many microbatches as those of the context, of one whose passes run one.
fn of_pass(context: &Context, mut stage: StageTime) -> StageTime {
    let microbatches = context.pass_microbatches() as f64;
    for time in &mut stage.chunks {
        time.forward = time.forward * microbatches;
        time.backward = time.backward * microbatches;
        time.weight_gradient = time.weight_gradient * microbatches;
    }
    if let Some(StageOverlap { buckets, gathers, .. }) = &mut stage.overlap {
        buckets.iter_mut().for_each(|bucket| bucket.ready = bucket.ready * microbatches);
        gathers.iter_mut().for_each(|bucket| bucket.needed = bucket.needed * microbatches);
    }
    stage
}

/// The reductions during the last pass of a stage, one bucket for each segment that has any. The last pass is a
/// weight-gradient pass, to which only blocks contribute, where weight gradients are deferred. It is one through the
/// first chunk: the gradients of other chunks are complete before.
fn stage_overlap(
    context: &Context,
    overhead: &StageOverhead,
    blocks: &StageAssignment,
    is_deferred: bool,
) -> Option<StageOverlap> {
    let slowdown = overhead.slowdown?;
    let chunks = context.chunks as usize;
    let BeforeBlocks { backward, overlapped } = overhead.before_blocks;
    let (first_chunk, later_chunks) = blocks.blocks.split_at(blocks.blocks.len() / chunks);
    let begin = Seconds(0.0);
    let mut ready = if is_deferred { begin } else { backward };
    let head_ready = if chunks > 1 { begin } else { ready };
    let mut buckets = vec![BucketTime { ready: head_ready, reduction: overlapped }];
    let complete = later_chunks.iter().rev();
    buckets.extend(
        complete.map(|block| BucketTime { ready: begin, reduction: block.time.overlapped }),
    );
    for block in first_chunk.iter().skip(1).rev() {
        ready += if is_deferred { block.time.weight_gradient } else { block.time.backward };
        buckets.push(BucketTime { ready, reduction: block.time.overlapped });
    }
    let first = first_chunk.first();
    if let Some(split) = first.and_then(|first| first.split_bucket(context.last_gradient_bucket)) {
        let part = |bucket: &EarlyBucket| BucketTime {
            ready: ready + if is_deferred { bucket.weight_gradient } else { bucket.backward },
            reduction: bucket.reduction,
        };
        buckets.extend(split.early.iter().map(part));
    }
    buckets.retain(|bucket| bucket.reduction > Seconds(0.0));
    let gathers = stage_gathers(context, overhead, blocks);
    let is_empty = buckets.is_empty() && gathers.is_empty();
    (!is_empty).then_some(StageOverlap { buckets, gathers, slowdown })
}

/// The gathers during the first pass of a stage, one bucket for each segment that has any.
fn stage_gathers(
    context: &Context,
    overhead: &StageOverhead,
    blocks: &StageAssignment,
) -> Vec<GatherTime> {
    let mut needed = overhead.forward_before_blocks;
    let mut gathers = vec![];
    for (index, block) in blocks.blocks.iter().enumerate() {
        let split = block.split_bucket(context.first_gather_bucket).filter(|_| index == 0);
        match split {
            Some(split) => gathers.extend(
                split
                    .gathers
                    .iter()
                    .map(|part| GatherTime { needed: needed + part.needed, gather: part.gather }),
            ),
            None => gathers.push(GatherTime { needed, gather: block.time.gathered }),
        }
        needed += block.time.forward;
    }
    gathers.push(GatherTime { needed, gather: overhead.head_gathered });
    gathers.retain(|bucket| bucket.gather > Seconds(0.0));
    gathers
}

/// The step phase of a stage in the order of its lowered program.
fn step_parts(
    context: &Context,
    overhead: &StageOverhead,
    blocks: &StageAssignment,
) -> Vec<StepPart> {
    let stages = context.mesh.pipeline as usize;
    let StepSyncs { begin, tied, norm, update } = overhead.syncs;
    // The step phase of a segment counts the least time that its reductions add during the backward pass, and its gathers
    // during the forward pass. The reductions of the first block, or the last of them, run after the backward pass.
    let hidden_cost = overhead.slowdown.map_or(0.0, |slowdown| slowdown.hidden_cost());
    let of_blocks = |time: fn(&SegmentTime) -> Seconds| -> Seconds {
        blocks.blocks.iter().map(|block| time(&block.time)).sum()
    };
    let first = blocks.blocks.first().map_or(Seconds(0.0), |block| {
        match block.split_bucket(context.last_gradient_bucket) {
            Some(split) => split.late,
            None => block.time.overlapped,
        }
    });
    let hidden = of_blocks(|time| time.overlapped + time.gathered) * hidden_cost;
    let uncounted = of_blocks(|time| time.uncounted);
    let reduce_blocks = blocks.step_phase + uncounted - blocks.update - hidden + first;
    let syncs = begin + tied.unwrap_or_default() + norm.unwrap_or_default();
    let hidden = (overhead.before_blocks.overlapped + overhead.head_gathered) * hidden_cost;
    let counted = hidden + overhead.first_block_min + overhead.first_gather_min;
    let reduce_ends = overhead.step_phase + overhead.uncounted - update - syncs - counted;
    let mut parts = vec![StepPart::Local(begin + reduce_blocks)];
    parts.extend(
        tied.map(|time| StepPart::Synchronised(SyncedStages::first_and_last(stages), time)),
    );
    parts.push(StepPart::Local(reduce_ends));
    parts.extend(norm.map(|time| StepPart::Synchronised(SyncedStages::all(stages), time)));
    parts.push(StepPart::Local(update + blocks.update));
    parts
}
