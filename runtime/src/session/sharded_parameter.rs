//! Which element of which logical parameter lies where in a buffer of weights, or of their
//! gradients and states.

use std::ops::Range;

use narrows_plan::emit::WeightSplit;
use narrows_plan::program::{Buffer, Shard};

use crate::parameters::logical_name;

/// A parameter's buffer on one device of the tensor axis.
pub struct ShardedParameter<'a> {
    buffer: &'a Buffer,
    shard: &'a Shard,
    tensor: u64,
    devices: u64,
    /// Whether the head is the embedding, and so stored as its transpose.
    tied: bool,
}

/// A member of a buffer: rows and columns that this device holds, and where they are.
struct ShardMember {
    name: String,
    whole: (u64, u64),
    held: (u64, u64),
    first: (u64, u64),
    /// Its first column in the buffer.
    column: u64,
    transposed: bool,
}

impl<'a> ShardedParameter<'a> {
    /// `None` for buffers that hold no parameter.
    pub fn new(
        buffer: &'a Buffer,
        tensor: u64,
        devices: u64,
        tied: bool,
    ) -> Option<ShardedParameter<'a>> {
        let shard = buffer.shard.as_ref()?;
        Some(ShardedParameter { buffer, shard, tensor, devices, tied })
    }

    /// Calls `visit(name, elements of the logical parameter, number of the buffer)` for all that is
    /// held, in runs: the first number of the buffer is that of the first element.
    pub fn for_each_run(&self, mut visit: impl FnMut(&str, Range<u64>, u64)) {
        let members = self.members();
        let width: u64 = members.iter().map(|member| member.held.1).sum();
        for member in &members {
            // Stored output-major, and the logical parameter is the transpose too.
            let (runs, length, whole, first, (at, apart)) = if member.transposed {
                let (first, place) = ((member.first.1, member.first.0), (0, member.held.0));
                (member.held.1, member.held.0, member.whole.0, first, place)
            } else {
                let place = (member.column, width);
                (member.held.0, member.held.1, member.whole.1, member.first, place)
            };
            for run in 0..runs {
                let begin = (first.0 + run) * whole + first.1;
                visit(&member.name, begin..begin + length, at + run * apart);
            }
        }
    }

    /// The logical parameters in it.
    pub fn parameter_names(&self) -> impl Iterator<Item = String> {
        self.members().into_iter().map(|member| member.name)
    }

    fn members(&self) -> Vec<ShardMember> {
        let mut column = 0;
        let offsets = &self.shard.offset_stride;
        let members = self.shard.members.iter().zip(offsets);
        members
            .map(|((name, rows, columns), stride)| {
                let part = |size: u64, split| {
                    if self.shard.split == split { size / self.devices } else { size }
                };
                let begin = |split| {
                    if self.shard.split == split { stride * self.tensor } else { 0 }
                };
                let transposed = self.tied && name == "head";
                let name = match transposed {
                    true => "embedding".to_string(),
                    false => logical_name(&self.buffer.name, name),
                };
                let held = (part(*rows, WeightSplit::Rows), part(*columns, WeightSplit::Columns));
                let first = (begin(WeightSplit::Rows), begin(WeightSplit::Columns));
                let made =
                    ShardMember { name, whole: (*rows, *columns), held, first, column, transposed };
                column += held.1;
                made
            })
            .collect()
    }

    /// Whether every device of the tensor axis holds all of it.
    pub fn is_replicated(&self) -> bool {
        self.shard.split == WeightSplit::Whole
    }
}
