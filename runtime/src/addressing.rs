//! Byte ranges of operands in a device's arena.

use std::ops::Range;

use narrows_plan::Context;
use narrows_plan::program::{Access, Action, FusedOp, Phase, StageProgram};

use crate::instruction_order::ScheduledInstruction;

/// The byte range of an operand in the arena. Offsets saturate, so that an impossible range lies
/// outside every arena.
pub fn operand_range(stage: &StageProgram, access: &Access, slot: u64) -> Range<u64> {
    let buffer = stage.buffer(access.buffer);
    let copy = slot % buffer.copies.max(1);
    let start = buffer.offset.saturating_add(copy.saturating_mul(buffer.copy_stride()));
    start..start.saturating_add(access.extent.bytes().0)
}

/// The byte range of an instruction's operand on the device at position `replica` of the data axis. With ZeRO, the step
/// phase and the accumulation of gradients access only the part of a weight or gradient that the replica updates.
pub fn replica_operand_range(
    stage: &StageProgram,
    (context, replica): (&Context, u64),
    (scheduled, access): (&ScheduledInstruction, &Access),
) -> Range<u64> {
    let range = operand_range(stage, access, scheduled.slot);
    let buffer = stage.buffer(access.buffer);
    let (accessed, stored) = (access.extent.bytes().0, buffer.extent.bytes().0);
    let accesses_parts = scheduled.pass.phase == Phase::Step
        || matches!(scheduled.instr.action, Action::Fused(FusedOp::AddInto));
    let is_part = accesses_parts
        && (buffer.role.is_weight() || buffer.role.is_gradient())
        && context.shard_size > 1
        && accessed < stored;
    let position = context.shard_position(replica);
    let skipped = if is_part { accessed.saturating_mul(position) } else { 0 };
    range.start.saturating_add(skipped)..range.end.saturating_add(skipped)
}
