//! Byte ranges of operands in a device's arena.

use std::ops::Range;

use narrows_plan::program::{Access, BufferRole, Phase, StageProgram};
use narrows_plan::{Context, Zero};

/// The byte range of an operand in the arena. Offsets saturate, so that an impossible range lies
/// outside every arena.
pub fn operand_range(stage: &StageProgram, access: &Access, slot: u64) -> Range<u64> {
    let buffer = stage.buffer(access.buffer);
    let copy = slot % buffer.copies.max(1);
    let start = buffer.offset.saturating_add(copy.saturating_mul(buffer.copy_stride()));
    start..start.saturating_add(access.extent.bytes().0)
}

/// The byte range of an operand on the device at position `replica` of the data axis: with ZeRO-1
/// the step phase accesses only the part of parameters and gradients that the replica updates.
pub fn replica_operand_range(
    stage: &StageProgram,
    (context, replica): (&Context, u64),
    (access, phase, slot): (&Access, Phase, u64),
) -> Range<u64> {
    let range = operand_range(stage, access, slot);
    let buffer = stage.buffer(access.buffer);
    let (accessed, stored) = (access.extent.bytes().0, buffer.extent.bytes().0);
    let partitioned = phase == Phase::Step
        && matches!(buffer.role, BufferRole::Weight | BufferRole::WeightGradient)
        && context.zero == Zero::One
        && accessed < stored;
    let skipped = if partitioned { accessed.saturating_mul(replica) } else { 0 };
    range.start.saturating_add(skipped)..range.end.saturating_add(skipped)
}
