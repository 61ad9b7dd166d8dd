//! The device mesh and the workload.
//!
//! Devices are numbered with the tensor axis fastest, then data, then pipeline:
//! `device = tensor + T·(data + D·stage)`. A tensor group is contiguous, and lies within one node if it
//! fits.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// An axis of the device mesh.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Axis {
    /// Splits single tensors.
    Tensor,
    /// Splits the batch; every member holds the same parameters.
    Data,
    /// Splits the layers.
    Pipeline,
}

impl Axis {
    /// All axes.
    pub const ALL: [Axis; 3] = [Axis::Tensor, Axis::Data, Axis::Pipeline];

    /// The name used in programs and messages.
    pub fn name(self) -> &'static str {
        match self {
            Axis::Tensor => "tensor",
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
    /// Replicas along the data axis.
    pub data: u64,
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
        self.tensor * self.pipeline * self.data
    }

    /// Devices along `axis`.
    pub fn axis_size(&self, axis: Axis) -> u64 {
        match axis {
            Axis::Tensor => self.tensor,
            Axis::Data => self.data,
            Axis::Pipeline => self.pipeline,
        }
    }

    /// The groups along `axis`; all of them have the same shape.
    pub fn group(&self, axis: Axis) -> DeviceGroup {
        let stride = match axis {
            Axis::Tensor => 1,
            Axis::Data => self.tensor,
            Axis::Pipeline => self.tensor * self.data,
        };
        DeviceGroup { axis, size: self.axis_size(axis), stride }
    }
}

impl std::fmt::Display for Mesh {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "tensor {} × pipeline {} × data {}", self.tensor, self.pipeline, self.data)
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
    /// Sequences one replica processes at a time.
    pub micro_batch: u64,
}

impl Workload {
    /// Microbatches each replica runs in a step.
    pub fn microbatches(&self, mesh: &Mesh) -> u64 {
        self.global_batch / (mesh.data * self.micro_batch)
    }

    /// Tokens of one microbatch before any sharding.
    pub fn tokens(&self) -> u64 {
        self.micro_batch * self.sequence_length
    }
}
