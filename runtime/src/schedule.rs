//! The order in which a device meets its instructions.
//!
//! The turns of the stage's schedule, each the whole forward or backward pass of one microbatch,
//! and the step phase once after them.

use narrows_plan::program::{Instr, Phase, StageProgram};

/// An instruction at its place in a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScheduledInstruction<'a> {
    /// The instruction.
    pub instr: &'a Instr,
    /// Its pass.
    pub phase: Phase,
    /// Its microbatch; 0 in the step phase.
    pub microbatch: u64,
    /// Which copy of the per-microbatch buffers it sees.
    pub slot: u64,
}

/// Everything a device of this stage executes in a step, in order.
pub fn scheduled_instructions(
    stage: &StageProgram,
) -> impl Iterator<Item = ScheduledInstruction<'_>> {
    let turns = stage.schedule.iter().map(|turn| (turn.phase, turn.microbatch));
    turns.chain([(Phase::Step, 0)]).flat_map(move |(phase, microbatch)| {
        let slot = microbatch_slot(stage, microbatch);
        stage.phase(phase).iter().map(move |instr| ScheduledInstruction {
            instr,
            phase,
            microbatch,
            slot,
        })
    })
}

/// The copy of the per-microbatch buffers that a microbatch uses. Microbatches in flight follow
/// each other, so the remainder tells them apart.
pub fn microbatch_slot(stage: &StageProgram, microbatch: u64) -> u64 {
    microbatch % stage.slots.max(1)
}
