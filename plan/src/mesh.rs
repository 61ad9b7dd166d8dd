//! The device mesh and the workload.
//!
//! Devices are numbered with the tensor axis fastest, then context, data and pipeline, as Megatron-LM does:
//! `device = tensor + T·(context + C·(data + D·stage))`. A tensor group is contiguous, and lies within one node if it
//! fits. The devices that differ in `context` and `data` alone are the replicas of the weights,
//! `replica = context + C·data`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::counts::plural;

/// An axis of the device mesh.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Axis {
    /// Splits single tensors.
    Tensor,
    /// Splits the positions of each sequence; every member holds the same parameters.
    Context,
    /// All replicas of the parameters. Splits the batch, and the positions of sequences where there is a context axis,
    /// which is its inner part.
    Data,
    /// Splits the layers.
    Pipeline,
}

impl Axis {
    /// All axes.
    pub const ALL: [Axis; 4] = [Axis::Tensor, Axis::Context, Axis::Data, Axis::Pipeline];

    /// Whether devices along this axis hold parts of the same activations, and run passes in lockstep.
    pub fn shards_activations(self) -> bool {
        matches!(self, Axis::Tensor | Axis::Context)
    }

    /// The name used in programs and messages.
    pub fn name(self) -> &'static str {
        match self {
            Axis::Tensor => "tensor",
            Axis::Context => "context",
            Axis::Data => "data",
            Axis::Pipeline => "pipeline",
        }
    }
}

/// Number of devices along each axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Mesh {
    /// Devices along the tensor axis.
    pub tensor: u64,
    /// Pipeline stages.
    pub pipeline: u64,
    /// Devices along the data axis.
    pub data: u64,
    /// Devices along the context axis.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub context: u64,
}

fn one() -> u64 {
    1
}

fn is_one(size: &u64) -> bool {
    *size == 1
}

/// The shape of a communication group, on which prices depend.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(deny_unknown_fields)]
pub struct DeviceGroup {
    /// The axis along which the members differ.
    pub axis: Axis,
    /// Number of members.
    pub size: u64,
    /// Distance between neighbouring members in device numbers.
    pub stride: u64,
}

impl Mesh {
    /// All devices.
    pub fn devices(&self) -> u64 {
        self.pipeline * self.devices_per_stage()
    }

    /// Devices of a pipeline stage.
    pub fn devices_per_stage(&self) -> u64 {
        self.tensor * self.replicas()
    }

    /// Replicas of the parameters.
    pub fn replicas(&self) -> u64 {
        self.context * self.data
    }

    /// Devices along `axis`.
    pub fn axis_size(&self, axis: Axis) -> u64 {
        match axis {
            Axis::Tensor => self.tensor,
            Axis::Context => self.context,
            Axis::Data => self.replicas(),
            Axis::Pipeline => self.pipeline,
        }
    }

    /// The groups along `axis`; all of them have the same shape.
    pub fn group(&self, axis: Axis) -> DeviceGroup {
        let stride = match axis {
            Axis::Tensor => 1,
            Axis::Context | Axis::Data => self.tensor,
            Axis::Pipeline => self.devices_per_stage(),
        };
        DeviceGroup { axis, size: self.axis_size(axis), stride }
    }
}

impl std::fmt::Display for Mesh {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "tensor {}", self.tensor)?;
        if self.context > 1 {
            write!(f, " × context {}", self.context)?;
        }
        write!(f, " × pipeline {} × data {}", self.pipeline, self.data)
    }
}

/// The work of one optimizer step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// Sequences in one optimizer step, over all devices.
    pub global_batch: u64,
    /// Tokens in one sequence.
    pub sequence_length: u64,
    /// Sequences that the devices of one part of the batch process at a time.
    pub micro_batch: u64,
}

impl Workload {
    /// Microbatches that each device runs in a step.
    pub fn microbatches(&self, mesh: &Mesh) -> u64 {
        self.global_batch / (mesh.data * self.micro_batch)
    }

    /// A sentence on a batch that the replicas of a mesh cannot divide into microbatches; `None` where they can.
    pub fn indivisible_batch(&self, mesh: &Mesh) -> Option<String> {
        let sequences = mesh.data.saturating_mul(self.micro_batch);
        (!self.global_batch.is_multiple_of(sequences)).then(|| {
            format!(
                "{} cannot be divided into microbatches of {} on {}",
                plural(self.global_batch, "sequence"),
                self.micro_batch,
                plural(mesh.data, "replica")
            )
        })
    }

    /// Tokens of the sequences of one microbatch.
    pub fn tokens(&self) -> u64 {
        self.micro_batch * self.sequence_length
    }
}
