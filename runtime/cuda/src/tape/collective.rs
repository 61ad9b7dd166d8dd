//! A collective as a device joins in it.

use std::ops::Range;

use narrows_plan::DType;
use narrows_plan::kernel::CollectiveKind;
use narrows_plan::mesh::{Axis, DeviceGroup};
use narrows_plan::program::{Access, CollectiveOp, Reduction};

use super::TouchedRange;
use crate::launch::{LaunchContext, UnsupportedInstr};
use narrows_runtime::ScheduledInstruction;
use narrows_runtime::replica_operand_range;

/// The devices of a group: an axis, and how many along it. Of a pipeline that may be the first and the
/// last stage alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupKey {
    /// The axis.
    pub axis: Axis,
    /// How many devices.
    pub size: u64,
}

/// A collective.
#[derive(Clone, Debug, PartialEq)]
pub struct NcclCollective {
    /// Which.
    pub kind: CollectiveKind,
    /// How contributions are combined, where they are.
    pub reduction: Reduction,
    /// Over whom.
    pub sharing: GroupKey,
    /// The group, as the program has it.
    pub group: DeviceGroup,
    /// What goes in and comes out, an operand each, all in one launch.
    pub shares: Vec<CollectiveBuffer>,
}

/// An operand of a collective.
#[derive(Clone, Debug, PartialEq)]
pub struct CollectiveBuffer {
    /// The format of its numbers.
    pub dtype: DType,
    /// Bytes of the arena that are given.
    pub source: Range<u64>,
    /// Bytes of the arena that are made: the same ones, in place.
    pub target: Range<u64>,
}

impl NcclCollective {
    pub(super) fn new(
        device: &LaunchContext,
        moment: &ScheduledInstruction,
        exchange: &CollectiveOp,
    ) -> Result<NcclCollective, UnsupportedInstr> {
        let instr = moment.instr;
        let refused = |why: &str| UnsupportedInstr {
            pass: instr.action.name(),
            origin: instr.origin.clone(),
            why: why.into(),
        };
        let in_place = instr.reads.first() == instr.writes.first();
        if !in_place && instr.reads.len() < instr.writes.len() {
            return Err(refused("it makes more operands than it is given"));
        }
        if in_place && exchange.kind == CollectiveKind::AllToAll {
            return Err(refused("NCCL exchanges parts from one buffer to another, not in place"));
        }
        if !in_place && exchange.kind == CollectiveKind::AllReduce {
            return Err(refused("it is reduced elsewhere than in place"));
        }
        let bytes = |access: &Access| {
            let seen = (access, moment.phase, moment.slot);
            replica_operand_range(device.stage, (device.context, device.data), seen)
        };
        let shares = instr.writes.iter().enumerate().map(|(port, made)| {
            let given = if in_place { made } else { &instr.reads[port] };
            let (source, target) = (bytes(given), bytes(made));
            CollectiveBuffer { dtype: made.extent.dtype, source, target }
        });
        let shares: Vec<CollectiveBuffer> = shares.collect();
        let members = exchange.group.size;
        for share in &shares {
            let numbers = share.bytes() / share.dtype.width();
            let parts = exchange.kind != CollectiveKind::AllReduce;
            if parts && !numbers.is_multiple_of(members) {
                return Err(refused("its parts are not equal"));
            }
        }
        Ok(NcclCollective {
            kind: exchange.kind,
            reduction: exchange.reduction,
            sharing: GroupKey { axis: exchange.axis, size: members },
            group: exchange.group,
            shares,
        })
    }

    /// Bytes of the whole, unsharded tensors.
    pub fn whole_bytes(&self) -> u64 {
        let shares: u64 = self.shares.iter().map(CollectiveBuffer::bytes).sum();
        match self.kind {
            // Before and after it, everyone has a part.
            CollectiveKind::AllToAll => shares * self.sharing.size,
            _ => shares,
        }
    }

    pub(super) fn touches(&self) -> Vec<TouchedRange> {
        let touched = self.shares.iter().flat_map(|share| {
            let read = TouchedRange { bytes: share.source.clone(), writes: false };
            let made = TouchedRange { bytes: share.target.clone(), writes: true };
            [read, made]
        });
        touched.collect()
    }
}

impl CollectiveBuffer {
    /// Bytes of what is given or of what is made, whichever is more.
    pub fn bytes(&self) -> u64 {
        let length = |range: &Range<u64>| range.end - range.start;
        length(&self.source).max(length(&self.target))
    }

    /// Whether nothing is made elsewhere.
    pub fn in_place(&self) -> bool {
        self.source == self.target
    }
}
