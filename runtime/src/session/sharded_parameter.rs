//! The elements of logical parameters that a buffer of weights, gradients or moments holds.

use std::ops::Range;

use narrows_plan::WeightSplit;
use narrows_plan::model::{ParameterId, WeightId, WeightShape};
use narrows_plan::program::{Buffer, ParameterShard};

/// A buffer of one or more parameters on one device of the tensor axis.
pub(crate) struct ShardedParameter<'a> {
    shard: &'a ParameterShard,
    /// Position of the device along the tensor axis.
    tensor: u64,
    /// Devices along the tensor axis.
    devices: u64,
    /// Whether the head is tied to the embedding, and so stored as its transpose.
    tied: bool,
}

/// One parameter's shard in a buffer. Pairs are (rows, columns).
struct MemberShard {
    id: ParameterId,
    /// Shape of the whole parameter.
    whole: (u64, u64),
    /// Shape of the shard on this device.
    shape: (u64, u64),
    /// First row and column of the shard in the whole.
    first: (u64, u64),
    /// First column in the buffer.
    column: u64,
    transposed: bool,
}

impl<'a> ShardedParameter<'a> {
    /// The parameters of a buffer; `None` when it holds none.
    pub fn new(
        buffer: &'a Buffer,
        tensor: u64,
        devices: u64,
        tied: bool,
    ) -> Option<ShardedParameter<'a>> {
        let shard = buffer.shard.as_ref()?;
        Some(ShardedParameter { shard, tensor, devices, tied })
    }

    /// Calls `visit(id, elements, offset)` for every contiguous run: the elements of a logical
    /// parameter, and the offset of the first of them in the buffer.
    pub fn for_each_run(&self, mut visit: impl FnMut(ParameterId, Range<u64>, u64)) {
        let members = self.members();
        let buffer_columns: u64 = members.iter().map(|member| member.shape.1).sum();
        for member in &members {
            let (rows, columns) = member.shape;
            // A transposed member is stored with its columns as rows, like its logical parameter.
            let (runs, length, stride, first, offset, offset_stride) = if member.transposed {
                (columns, rows, member.whole.0, (member.first.1, member.first.0), 0, rows)
            } else {
                (rows, columns, member.whole.1, member.first, member.column, buffer_columns)
            };
            for run in 0..runs {
                let start = (first.0 + run) * stride + first.1;
                visit(member.id, start..start + length, offset + run * offset_stride);
            }
        }
    }

    /// The parameters in the buffer.
    pub fn parameter_ids(&self) -> impl Iterator<Item = ParameterId> {
        self.members().into_iter().map(|member| member.id)
    }

    fn members(&self) -> Vec<MemberShard> {
        let split = self.shard.split;
        let mut column = 0;
        let members = self.shard.members.iter().zip(&self.shard.offset_stride);
        members
            .map(|(&WeightShape { weight, rows, columns }, stride)| {
                let size = |whole: u64, along| {
                    if split == along { whole / self.devices } else { whole }
                };
                let first = |along| if split == along { stride * self.tensor } else { 0 };
                let transposed = self.tied && weight == WeightId::Head;
                let weight = if transposed { WeightId::Embedding } else { weight };
                let member = MemberShard {
                    id: ParameterId { block: self.shard.block, weight },
                    whole: (rows, columns),
                    shape: (size(rows, WeightSplit::Rows), size(columns, WeightSplit::Columns)),
                    first: (first(WeightSplit::Rows), first(WeightSplit::Columns)),
                    column,
                    transposed,
                };
                column += member.shape.1;
                member
            })
            .collect()
    }

    /// Whether the buffer is a head that is tied to the embedding.
    pub fn is_tied_head(&self) -> bool {
        self.members().iter().any(|member| member.transposed)
    }

    /// Whether every device of the tensor axis holds the whole buffer.
    pub fn is_replicated(&self) -> bool {
        self.shard.split == WeightSplit::Whole
    }
}
