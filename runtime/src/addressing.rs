//! Where operands lie in a device's memory.

use std::ops::Range;

use narrows_plan::program::{Access, Phase, Region, StageProgram};
use narrows_plan::strategy::{Context, Zero};

/// The bytes of an operand, counted from the beginning of the arena. The end saturates, so that a
/// range that cannot be is outside every arena.
pub fn operand_range(stage: &StageProgram, access: &Access, slot: u64) -> Range<u64> {
    let buffer = stage.buffer(access.buffer);
    let copy = if buffer.per_microbatch { slot } else { 0 };
    let begin = buffer.offset.saturating_add(copy.saturating_mul(stage.slot_stride));
    begin..begin.saturating_add(access.extent.bytes().0)
}

/// The same on a device whose place along the data axis is `replica`: with ZeRO-1 the step phase sees
/// of parameters and gradients the part that the replica updates.
pub fn replica_operand_range(
    stage: &StageProgram,
    (context, replica): (&Context, u64),
    (access, phase, slot): (&Access, Phase, u64),
) -> Range<u64> {
    let bytes = operand_range(stage, access, slot);
    let buffer = stage.buffer(access.buffer);
    let (seen, held) = (access.extent.bytes().0, buffer.extent.bytes().0);
    let parted = phase == Phase::Step
        && matches!(buffer.region, Region::Weight | Region::Gradient)
        && context.zero == Zero::One
        && seen < held;
    let skipped = if parted { seen.saturating_mul(replica) } else { 0 };
    bytes.start.saturating_add(skipped)..bytes.end.saturating_add(skipped)
}
