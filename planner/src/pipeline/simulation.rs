//! Step times of partitions before lowering.

use narrows_cost_model::{
    BucketTime, StageOverlap, StageTime, StepPart, SyncedStages, schedule_time,
};
use narrows_plan::program::{MicrobatchPass, one_forward_one_backward};
use narrows_plan::{Context, Seconds};

use super::assignment::StageAssignment;
use super::overhead::{BeforeBlocks, StageOverhead, StepSyncs};
use super::partition::Partition;

/// Simulates a step of a partition from its stage times. The result equals the simulation of the lowered program.
pub(crate) fn simulate_partition(
    context: &Context,
    partition: &Partition,
    overheads: &[StageOverhead],
) -> Seconds {
    let stages = context.mesh.pipeline;
    let microbatches = context.workload.microbatches(&context.mesh);
    let times: Vec<StageTime> = partition
        .stages
        .iter()
        .zip(overheads)
        .map(|(stage, overhead)| StageTime {
            forward: stage.forward + overhead.forward,
            backward: stage.backward + overhead.backward,
            step_phase: step_parts(overhead, stage, stages as usize),
            overlap: stage_overlap(overhead, stage),
        })
        .collect();
    let schedules: Vec<Vec<MicrobatchPass>> =
        (0..stages).map(|stage| one_forward_one_backward(stage, stages, microbatches)).collect();
    let schedules: Vec<&[MicrobatchPass]> = schedules.iter().map(Vec::as_slice).collect();
    schedule_time(&times, &schedules)
}

/// The reductions beside the last backward pass of a stage, one bucket for each segment that has any.
fn stage_overlap(overhead: &StageOverhead, blocks: &StageAssignment) -> Option<StageOverlap> {
    let slowdown = overhead.slowdown?;
    let BeforeBlocks { backward, overlapped } = overhead.before_blocks;
    let mut ready = backward;
    let mut buckets = vec![BucketTime { ready, reduction: overlapped }];
    for block in blocks.blocks.iter().skip(1).rev() {
        ready += block.time.backward;
        buckets.push(BucketTime { ready, reduction: block.time.overlapped });
    }
    buckets.retain(|bucket| bucket.reduction > Seconds(0.0));
    (!buckets.is_empty()).then_some(StageOverlap { buckets, slowdown })
}

/// The step phase of a stage in the order of its lowered program.
fn step_parts(overhead: &StageOverhead, blocks: &StageAssignment, stages: usize) -> Vec<StepPart> {
    let StepSyncs { begin, tied, norm, update } = overhead.syncs;
    let update = update + blocks.update;
    let syncs = begin + tied.unwrap_or_default() + norm.unwrap_or_default();
    let reductions = blocks.blocks.iter().map(|block| block.time.overlapped);
    let overlapped = reductions.sum::<Seconds>() + overhead.before_blocks.overlapped;
    // The step phase of a segment has the least that its reductions add beside the backward pass; those of the first
    // block run after it.
    let hidden =
        overhead.slowdown.map_or(Seconds(0.0), |slowdown| overlapped * slowdown.hidden_cost());
    let first = blocks.blocks.first().map_or(Seconds(0.0), |block| block.time.overlapped);
    let counted = hidden + overhead.first_block_min;
    let reduce = overhead.step_phase + blocks.step_phase - update - syncs - counted + first;
    let mut parts = vec![StepPart::Local(begin)];
    parts.extend(
        tied.map(|time| StepPart::Synchronized(SyncedStages::first_and_last(stages), time)),
    );
    parts.push(StepPart::Local(reduce));
    parts.extend(norm.map(|time| StepPart::Synchronized(SyncedStages::all(stages), time)));
    parts.push(StepPart::Local(update));
    parts
}
