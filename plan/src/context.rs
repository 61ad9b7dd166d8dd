//! The context of a plan: mesh, workload, number formats, ZeRO stage, schedule and overlap.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::mesh::{Axis, Mesh, Workload};
use crate::program::StageSchedule;
use crate::{DType, Dim, Layout, Precision};

/// Optimizer sharding over the data axis.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Zero {
    /// All optimizer states on every replica; gradients are all-reduced.
    Off,
    /// ZeRO-1: gradients are reduce-scattered, each replica updates its part of the fp32 states,
    /// new weights are all-gathered.
    One,
}

/// The order in which pipeline stages run the passes of their microbatches.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    JsonSchema,
)]
pub enum PipelineSchedule {
    /// One forward and one backward pass in turn.
    #[default]
    #[serde(rename = "1f1b")]
    OneForwardOneBackward,
    /// 1F1B with the weight gradients of blocks in passes of their own, which fill the time in which stages would wait.
    #[serde(rename = "zero-bubble")]
    ZeroBubble,
}

impl PipelineSchedule {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            PipelineSchedule::OneForwardOneBackward => "1F1B",
            PipelineSchedule::ZeroBubble => "zero-bubble",
        }
    }

    pub(crate) fn is_default(&self) -> bool {
        *self == PipelineSchedule::default()
    }
}

/// Mesh, workload, number formats, ZeRO stage, schedule and overlap, which strategies and their instructions depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Context {
    /// The device mesh.
    pub mesh: Mesh,
    /// The work of a step.
    pub workload: Workload,
    /// Number formats.
    pub precision: Precision,
    /// Optimizer sharding.
    pub zero: Zero,
    /// The order of passes.
    pub schedule: PipelineSchedule,
    /// Whether reductions of gradients over the data axis run beside the last backward pass.
    pub overlap_grad_reduce: bool,
    /// Whether tensor-axis collectives of activation gradients run beside the weight-gradient GEMMs of the linears that
    /// computed them.
    pub overlap_tensor_collectives: bool,
}

impl Context {
    /// A context with the 1F1B schedule and without overlap.
    pub fn new(mesh: Mesh, workload: Workload, precision: Precision, zero: Zero) -> Context {
        Context {
            mesh,
            workload,
            precision,
            zero,
            schedule: PipelineSchedule::OneForwardOneBackward,
            overlap_grad_reduce: false,
            overlap_tensor_collectives: false,
        }
    }

    /// The position of a stage in the schedule.
    pub fn stage_schedule(&self, stage: u64) -> StageSchedule {
        StageSchedule {
            schedule: self.schedule,
            stage,
            stages: self.mesh.pipeline,
            microbatches: self.workload.microbatches(&self.mesh),
        }
    }

    /// Devices along the tensor axis.
    pub fn tensor_size(&self) -> u64 {
        self.mesh.tensor
    }

    /// Format of weights and activations.
    pub fn compute_dtype(&self) -> DType {
        self.precision.compute_dtype()
    }

    /// The dim on which tokens may be sharded over the tensor axis, if any.
    ///
    /// Whole sequences where they divide, otherwise positions. Kernels and bytes are equal for both, but
    /// with whole sequences attention is local and no reshard packs, so positions are never cheaper.
    pub fn token_dim(&self) -> Option<Dim> {
        let devices = self.tensor_size();
        if devices == 1 {
            None
        } else if self.workload.micro_batch.is_multiple_of(devices) {
            Some(Dim::Sequence)
        } else if self.workload.sequence_length.is_multiple_of(devices) {
            Some(Dim::Position)
        } else {
            None
        }
    }

    /// Tokens of one microbatch.
    pub fn tokens(&self) -> u64 {
        self.workload.tokens()
    }

    /// Rows (tokens) of an activation in `layout` on one device.
    pub fn rows(&self, layout: Layout) -> u64 {
        match layout {
            Layout::Sharded(Dim::Sequence | Dim::Position) => self.tokens() / self.tensor_size(),
            _ => self.tokens(),
        }
    }

    /// Features of an activation of this width in `layout` on one device.
    pub fn columns(&self, width: u64, layout: Layout) -> u64 {
        match layout {
            Layout::Sharded(Dim::Feature) => width / self.tensor_size(),
            _ => width,
        }
    }

    /// Whether a shard of tokens is one contiguous piece of memory.
    pub(crate) fn tokens_contiguous(&self, dim: Dim) -> bool {
        dim == Dim::Sequence || self.workload.micro_batch == 1
    }

    /// Devices along `axis`.
    pub fn axis_size(&self, axis: Axis) -> u64 {
        self.mesh.axis_size(axis)
    }
}
