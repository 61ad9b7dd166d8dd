//! The order in which a device executes its instructions in a step: the passes of the stage's
//! schedule, each the whole forward or backward pass of one microbatch, then the step phase once.

use narrows_plan::program::{Instr, MicrobatchPass, StageProgram};

/// An instruction of a step, with the microbatch that it is executed for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScheduledInstruction<'a> {
    /// The instruction.
    pub instr: &'a Instr,
    /// Pass of the instruction.
    pub pass: MicrobatchPass,
    /// The slot of its microbatch.
    pub slot: u64,
}

/// Every instruction that a device of this stage executes in a step, in order.
pub fn scheduled_instructions(
    stage: &StageProgram,
) -> impl Iterator<Item = ScheduledInstruction<'_>> {
    let passes = stage.schedule.iter().copied().chain([MicrobatchPass::STEP]);
    passes.flat_map(move |pass| {
        let slot = microbatch_slot(stage, pass.microbatch);
        let instructions = stage.instructions(pass.phase).iter();
        instructions.map(move |instr| ScheduledInstruction { instr, pass, slot })
    })
}

/// The slot of a microbatch: the copy of the per-microbatch buffers that it uses. Microbatches in
/// flight are consecutive, so their remainders differ.
pub fn microbatch_slot(stage: &StageProgram, microbatch: u64) -> u64 {
    microbatch % stage.slots.max(1)
}
