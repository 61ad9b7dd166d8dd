//! Buffers: tensors in a device's arena.

use crate::context::Context;
use crate::extent::Extent;
use crate::layout::WeightSplit;
use crate::model::{WeightId, WeightShape};

/// Alignment of every buffer, in bytes.
pub(crate) const ALIGNMENT: u64 = 256;

/// Index of a buffer within its stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufferId(pub u32);

/// Role of a buffer, which decides its lifetime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BufferRole {
    /// A weight in the compute format.
    Weight,
    /// The fp32 gradient of a weight, accumulated over microbatches.
    WeightGradient,
    /// A whole weight, gathered from the parts of the replicas (ZeRO-3) for one pass and placed by lifetime.
    GatheredWeight,
    /// The whole gradient of a weight for one microbatch, until the replicas have reduced their parts of it (ZeRO-2 and
    /// ZeRO-3): as computed, or rounded for the reduction. Placed by lifetime.
    MicrobatchGradient,
    /// The accumulated gradient of a weight, or the part of it that a replica has, rounded to bf16 for its reduction in the
    /// step phase. Placed by lifetime.
    RoundedGradient,
    /// AdamW's first moment of a weight, fp32.
    FirstMoment,
    /// AdamW's second moment of a weight, fp32.
    SecondMoment,
    /// The fp32 master copy of a weight, in mixed precision.
    MasterWeight,
    /// Input token ids of a microbatch. Stages with the embedding have such a buffer for each microbatch of a pass.
    Tokens,
    /// Token ids to predict. Stages with the head have such a buffer for each microbatch of a pass.
    Targets,
    /// Loss of the last microbatch, one fp32 scalar. Stages with the head have one such buffer.
    Loss,
    /// Sum of all squared gradients, one fp32 scalar. Every stage has one such buffer.
    SquareSum,
    /// An activation, an activation gradient or a statistic, placed by lifetime.
    Activation,
}

impl BufferRole {
    /// Whether the buffer holds a parameter, its gradient or its optimizer state, and so has a
    /// [`ParameterShard`].
    pub fn is_parameter(self) -> bool {
        self.is_weight() || self.is_gradient() || self.is_optimizer_state()
    }

    /// Whether the buffer holds a weight in the compute format.
    pub fn is_weight(self) -> bool {
        matches!(self, BufferRole::Weight | BufferRole::GatheredWeight)
    }

    /// Whether the buffer holds the gradient of a weight.
    pub fn is_gradient(self) -> bool {
        use BufferRole::{MicrobatchGradient, RoundedGradient, WeightGradient};
        matches!(self, WeightGradient | MicrobatchGradient | RoundedGradient)
    }

    /// Whether the buffer holds a moment or a master copy, of which ZeRO keeps a part per replica.
    pub fn is_optimizer_state(self) -> bool {
        use BufferRole::{FirstMoment, MasterWeight, SecondMoment};
        matches!(self, FirstMoment | SecondMoment | MasterWeight)
    }

    /// Whether the buffer is loaded with token ids before each pass.
    pub fn is_input(self) -> bool {
        matches!(self, BufferRole::Tokens | BufferRole::Targets)
    }

    /// Whether the buffer keeps its bytes for the whole step and shares them with no other.
    pub fn is_resident(self) -> bool {
        use BufferRole::{Activation, GatheredWeight, MicrobatchGradient, RoundedGradient};
        !matches!(self, Activation | GatheredWeight | MicrobatchGradient | RoundedGradient)
    }
}

/// Shard of one or several parameters in a buffer, over the tensor axis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterShard {
    /// The block that the parameter belongs to; `None` for embedding, final norm and head.
    pub block: Option<u64>,
    /// The parameters side by side in the buffer, with their whole shapes.
    pub members: Vec<WeightShape>,
    /// Split dimension.
    pub split: WeightSplit,
    /// For each member: on the device with tensor index i, the shard begins at row or column
    /// i·`offset_stride`.
    pub offset_stride: Vec<u64>,
}

impl ParameterShard {
    /// The shards of parameters side by side over this many devices of the tensor axis.
    pub(crate) fn new(
        block: Option<u64>,
        members: Vec<WeightShape>,
        split: WeightSplit,
        devices: u64,
    ) -> ParameterShard {
        let offset_stride = members
            .iter()
            .map(|member| match split {
                WeightSplit::Whole => 0,
                WeightSplit::Rows => member.rows / devices,
                WeightSplit::Columns => member.columns / devices,
            })
            .collect();
        ParameterShard { block, members, split, offset_stride }
    }

    /// Whether the buffer holds the head, which a tied model stores as the embedding's table.
    pub fn holds_head(&self) -> bool {
        self.members.iter().any(|member| member.weight == WeightId::Head)
    }
}

/// A tensor in a device's arena.
#[derive(Clone, Debug, PartialEq)]
pub struct Buffer {
    /// For display; unique within the stage.
    pub name: String,
    /// Rows and columns on this device, and the format.
    pub extent: Extent,
    /// Role of the contents.
    pub role: BufferRole,
    /// Offset in the arena, in bytes.
    pub offset: u64,
    /// Number of copies, a divisor of the [`slots`](super::ModelChunk::slots) of the chunk that uses it: a microbatch in
    /// slot i uses copy i mod `copies`. Copy k begins at `offset + k·`[`copy_stride`](Buffer::copy_stride).
    pub copies: u64,
    /// The parameters in the buffer; `None` for roles other than parameters.
    pub shard: Option<ParameterShard>,
    /// Whole (unsharded) widths of tensors side by side in the buffer; empty for one tensor. A shard of
    /// the features is a shard of each tensor, side by side again.
    pub sections: Vec<u64>,
}

impl Buffer {
    /// Whether each replica stores only its part of the parameters: optimizer states with ZeRO, gradients of blocks from
    /// ZeRO-2 on, and weights of blocks with ZeRO-3.
    pub fn is_replica_part(&self, context: &Context) -> bool {
        let of_block = self.shard.as_ref().is_some_and(|shard| shard.block.is_some());
        match self.role {
            BufferRole::Weight => of_block && context.shards_weights(),
            BufferRole::WeightGradient | BufferRole::RoundedGradient => {
                of_block && context.shards_gradients()
            }
            role => role.is_optimizer_state() && context.shard_size > 1,
        }
    }

    /// Bytes between the copies of the buffer.
    pub fn copy_stride(&self) -> u64 {
        self.extent.bytes().0.div_ceil(ALIGNMENT) * ALIGNMENT
    }
}
