//! A collective as NCCL executes it on one device.

use std::ops::Range;

use narrows_plan::kernel::CollectiveKind;
use narrows_plan::program::{Access, CollectiveFunction, CollectiveOp};
use narrows_plan::{DType, DeviceGroup};
use narrows_runtime::{ScheduledInstruction, replica_operand_range};

use crate::launch::{LaunchContext, UnsupportedInstr};

/// A collective.
#[derive(Clone, Debug, PartialEq)]
pub struct NcclCollective {
    /// Function that the collective computes.
    pub function: CollectiveFunction,
    /// The device group.
    pub group: DeviceGroup,
    /// Operands, all in one NCCL group call.
    pub buffers: Vec<CollectiveBuffer>,
}

/// An operand of a collective.
#[derive(Clone, Debug, PartialEq)]
pub struct CollectiveBuffer {
    /// Format of its elements.
    pub dtype: DType,
    /// Bytes of the arena that are read.
    pub source: Range<u64>,
    /// Bytes of the arena that are written; equal to `source` in place.
    pub target: Range<u64>,
}

impl NcclCollective {
    pub(super) fn new(
        device: &LaunchContext,
        scheduled: &ScheduledInstruction,
        op: &CollectiveOp,
    ) -> Result<NcclCollective, UnsupportedInstr> {
        let instr = scheduled.instr;
        let unsupported = |reason: &str| UnsupportedInstr::new(scheduled, reason);
        let in_place = instr.reads.first() == instr.writes.first();
        if !in_place && instr.reads.len() < instr.writes.len() {
            return Err(unsupported("it writes more operands than it reads"));
        }
        if in_place && op.kind() == CollectiveKind::AllToAll {
            return Err(unsupported("NCCL has no all-to-all in place"));
        }
        if !in_place && op.kind() == CollectiveKind::AllReduce {
            return Err(unsupported("its all-reduce is not in place"));
        }
        let bytes = |access: &Access| {
            let replica = (device.context, device.coordinates.replica);
            replica_operand_range(device.stage, replica, (scheduled, access))
        };
        let buffers = instr.writes.iter().enumerate().map(|(port, target)| {
            let source = if in_place { target } else { &instr.reads[port] };
            CollectiveBuffer {
                dtype: target.extent.dtype,
                source: bytes(source),
                target: bytes(target),
            }
        });
        let buffers: Vec<CollectiveBuffer> = buffers.collect();
        let members = op.group.size;
        for buffer in &buffers {
            let elements = buffer.bytes() / buffer.dtype.width();
            let has_parts = op.kind() != CollectiveKind::AllReduce;
            if has_parts && !elements.is_multiple_of(members) {
                return Err(unsupported("its parts are not equal"));
            }
        }
        Ok(NcclCollective { function: op.function, group: op.group, buffers })
    }

    /// Bytes of the unsharded tensors.
    pub fn payload_bytes(&self) -> u64 {
        let local: u64 = self.buffers.iter().map(CollectiveBuffer::bytes).sum();
        match self.function {
            // Every device has a part before and after an all-to-all.
            CollectiveFunction::AllToAll => local * self.group.size,
            _ => local,
        }
    }
}

impl CollectiveBuffer {
    /// Size of the source or the target in bytes, whichever is larger.
    pub fn bytes(&self) -> u64 {
        let length = |range: &Range<u64>| range.end - range.start;
        length(&self.source).max(length(&self.target))
    }

    /// Whether source and target are the same bytes.
    pub fn in_place(&self) -> bool {
        self.source == self.target
    }
}
