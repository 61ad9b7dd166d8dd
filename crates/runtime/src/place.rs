//! Where operands lie in a device's memory.

use std::ops::Range;

use narrows_plan::program::{Access, StageProgram};

/// The bytes of an operand, counted from the beginning of the arena. The end saturates, so that a
/// range that cannot be is outside every arena.
pub fn range(stage: &StageProgram, access: &Access, slot: u64) -> Range<u64> {
    let buffer = stage.buffer(access.buffer);
    let copy = if buffer.per_microbatch { slot } else { 0 };
    let begin = buffer.offset.saturating_add(copy.saturating_mul(stage.slot_stride));
    begin..begin.saturating_add(access.extent.bytes().0)
}
