//! The times of a stage's passes and of the parts of its step phase.

use narrows_plan::program::{Action, ChunkPhase, Instr, Phase};
use narrows_plan::{Axis, DeviceGroup, Mesh, Seconds};

use crate::overlap::{BucketTime, GatherTime, GatheredPass, OverlapSlowdown, OverlappedPass};

/// Times of the passes of one microbatch through a chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PassTimes {
    /// Forward pass, transfers included.
    pub forward: Seconds,
    /// Backward pass, transfers included.
    pub backward: Seconds,
    /// Weight-gradient pass; zero where the backward pass computes all weight gradients.
    pub weight_gradient: Seconds,
}

/// Times of one stage's passes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StageTime {
    /// The passes through each chunk.
    pub chunks: Vec<PassTimes>,
    /// Parts of the step phase, in order.
    pub step_phase: Vec<StepPart>,
    /// Collectives during the first and the last pass, with the slowdown of the streams.
    pub overlap: Option<StageOverlap>,
}

/// Gradient reductions during the last pass of a stage, and gathers of weights during its first pass.
#[derive(Clone, Debug, PartialEq)]
pub struct StageOverlap {
    /// Time of each gradient bucket, in order.
    pub buckets: Vec<BucketTime>,
    /// Time of each gather bucket, in order.
    pub gathers: Vec<GatherTime>,
    /// The slowdown of the two streams.
    pub slowdown: OverlapSlowdown,
}

/// A part of a stage's step phase, between or during synchronisations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StepPart {
    /// Work of the stage alone.
    Local(Seconds),
    /// A collective with other stages: its time from the arrival of the last one.
    Synchronised(SyncedStages, Seconds),
}

/// The stages of a synchronisation: `size` of them at distance `stride`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SyncedStages {
    first: usize,
    stride: usize,
    size: usize,
}

impl StageTime {
    /// Time of a pass of one microbatch; zero for the step phase, which is no pass.
    pub(crate) fn pass(&self, at: ChunkPhase) -> Seconds {
        let passes = self.chunks[at.chunk];
        match at.phase {
            Phase::Forward => passes.forward,
            Phase::Backward => passes.backward,
            Phase::WeightGradient => passes.weight_gradient,
            Phase::Step => Seconds(0.0),
        }
    }

    /// Time of all passes of one microbatch through all chunks.
    pub(crate) fn microbatch(&self) -> Seconds {
        self.chunks.iter().map(|c| c.forward + c.backward + c.weight_gradient).sum()
    }

    /// The last pass with the reductions that overlap with it; `None` without reductions.
    pub(crate) fn overlapped_pass(&self, last: ChunkPhase) -> Option<OverlappedPass> {
        let StageOverlap { buckets, slowdown, .. } = self.overlap.as_ref()?;
        let pass = || OverlappedPass::new(self.pass(last), buckets, *slowdown);
        (!buckets.is_empty()).then(pass)
    }

    /// The first pass, before which the stage is idle for a time in seconds, with the gathers that overlap with it; `None`
    /// without gathers.
    pub(crate) fn gathered_pass(&self, first: ChunkPhase, idle: f64) -> Option<GatheredPass> {
        let StageOverlap { gathers, slowdown, .. } = self.overlap.as_ref()?;
        let pass = || GatheredPass::new(self.pass(first), idle, gathers, *slowdown);
        (!gathers.is_empty()).then(pass)
    }
}

impl SyncedStages {
    /// All stages of a pipeline.
    pub fn all(stages: usize) -> SyncedStages {
        SyncedStages { first: 0, stride: 1, size: stages }
    }

    /// The first and the last stage of a pipeline.
    pub fn first_and_last(stages: usize) -> SyncedStages {
        SyncedStages { first: 0, stride: stages - 1, size: 2 }
    }

    /// The stages of a collective that `stage` takes part in; strides of `group` are in devices.
    pub(crate) fn containing(stage: usize, group: &DeviceGroup, mesh: &Mesh) -> SyncedStages {
        let stride = (group.stride / mesh.group(Axis::Pipeline).stride) as usize;
        let size = group.size as usize;
        let before = stage / stride % size;
        SyncedStages { first: stage - before * stride, stride, size }
    }

    /// The stages, in order.
    pub(crate) fn stages(self) -> impl Iterator<Item = usize> {
        (0..self.size).map(move |at| self.first + at * self.stride)
    }
}

impl StepPart {
    /// Time of the part without waiting.
    pub fn time(&self) -> Seconds {
        match self {
            StepPart::Local(time) | StepPart::Synchronised(_, time) => *time,
        }
    }
}

/// The device group of an instruction that synchronises stages: a collective over the pipeline axis.
pub fn stage_sync_group(instr: &Instr) -> Option<&DeviceGroup> {
    match &instr.action {
        Action::Collective(collective) if collective.axis == Axis::Pipeline => {
            Some(&collective.group)
        }
        _ => None,
    }
}
