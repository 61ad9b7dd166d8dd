//! The order in which a device executes its instructions in a step: the passes of the stage's
//! schedule, each a whole pass of one microbatch through a chunk, then the step phase once.
//! Reductions of gradient buckets come as early as they may, within the last pass.

use std::ops::Range;

use narrows_plan::program::{GradientBucket, Instr, MicrobatchPass, StageProgram};

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

/// Consecutive instructions of a pass or of the step phase.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassPart {
    /// The pass.
    pub pass: MicrobatchPass,
    /// The slot of its microbatch.
    pub slot: u64,
    /// The instructions, by index in the list of the pass.
    pub instructions: Range<usize>,
    /// Whether they are gradient reductions that may run beside the rest of the last pass.
    pub beside_backward: bool,
}

impl PassPart {
    /// The instructions of the part, in order.
    pub fn scheduled<'a>(
        &self,
        stage: &'a StageProgram,
    ) -> impl Iterator<Item = ScheduledInstruction<'a>> + use<'a> {
        let (pass, slot) = (self.pass, self.slot);
        let instructions = &stage.instructions(pass.chunk_phase())[self.instructions.clone()];
        instructions.iter().map(move |instr| ScheduledInstruction { instr, pass, slot })
    }
}

/// The parts of all passes that a device of this stage executes in a step, in order.
pub fn pass_parts(stage: &StageProgram) -> impl Iterator<Item = PassPart> {
    let part = |pass: MicrobatchPass, instructions| {
        let slot = stage.slot(pass);
        PassPart { pass, slot, instructions, beside_backward: false }
    };
    let length = |pass: MicrobatchPass| stage.instructions(pass.chunk_phase()).len();
    let whole = move |pass: &MicrobatchPass| part(*pass, 0..length(*pass));
    let buckets = &stage.gradient_buckets[..];
    let split = usize::from(!buckets.is_empty()).min(stage.schedule.len());
    let (passes, last) = stage.schedule.split_at(stage.schedule.len() - split);
    let overlapped = last.iter().flat_map(move |pass| {
        let begins = [0].into_iter().chain(buckets.iter().map(|bucket| bucket.after));
        let parts = begins.zip(buckets).flat_map(move |(begin, bucket)| {
            let GradientBucket { after, reductions } = bucket.clone();
            let reductions = part(MicrobatchPass::STEP, reductions);
            [part(*pass, begin..after), PassPart { beside_backward: true, ..reductions }]
        });
        let begin = buckets.last().map_or(0, |bucket| bucket.after);
        parts.chain([part(*pass, begin..length(*pass))])
    });
    let rest = part(MicrobatchPass::STEP, stage.bucket_reductions()..stage.step.len());
    passes.iter().map(whole).chain(overlapped).chain([rest])
}

/// Every instruction that a device of this stage executes in a step, in order.
pub fn scheduled_instructions(
    stage: &StageProgram,
) -> impl Iterator<Item = ScheduledInstruction<'_>> {
    pass_parts(stage).flat_map(move |part| part.scheduled(stage))
}
