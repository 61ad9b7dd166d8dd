//! The order in which a device executes its instructions in a step: the passes of the stage's
//! schedule, each a whole pass of one microbatch through a chunk, then the step phase once.
//! Reductions of gradient buckets come as early as they may, within the last pass, and the gathers of gather buckets at
//! the end of the step.

use std::ops::Range;

use narrows_plan::program::{GatherBucket, GradientBucket, Instr, MicrobatchPass, StageProgram};

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
    /// Position relative to other parts.
    pub order: PartOrder,
}

/// Position of a part relative to other parts. Parts that may run beside others are correct in order too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartOrder {
    /// In order.
    InOrder,
    /// In order, and after the gathers of this bucket of the step before.
    AfterGathers(usize),
    /// Gradient reductions that may run beside the rest of the last pass.
    BesideLastPass,
    /// Gathers of this bucket, which may run beside the first pass of the next step.
    BesideNextStep(usize),
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
    let last = stage.schedule.len().saturating_sub(1);
    let passes = stage.schedule.iter().enumerate();
    let passes = passes.flat_map(move |(index, pass)| match index {
        0 if !stage.gather_buckets.is_empty() => first_pass(stage, *pass),
        index if index == last => last_pass(stage, *pass),
        _ => vec![whole(stage, *pass)],
    });
    let in_step = |instructions, order| part(stage, MicrobatchPass::STEP, instructions, order);
    let rest = in_step(stage.bucket_reductions()..stage.before_gathers(), PartOrder::InOrder);
    let gathers = stage.gather_buckets.iter().enumerate();
    let gathers = gathers.map(move |(index, bucket)| {
        in_step(bucket.gathers.clone(), PartOrder::BesideNextStep(index))
    });
    passes.chain([rest]).chain(gathers)
}

fn part(
    stage: &StageProgram,
    pass: MicrobatchPass,
    instructions: Range<usize>,
    order: PartOrder,
) -> PassPart {
    PassPart { pass, slot: stage.slot(pass), instructions, order }
}

fn whole(stage: &StageProgram, pass: MicrobatchPass) -> PassPart {
    let length = stage.instructions(pass.chunk_phase()).len();
    part(stage, pass, 0..length, PartOrder::InOrder)
}

/// The parts of the first pass, divided where it waits for weights. A first pass is a forward pass, and so never the last.
fn first_pass(stage: &StageProgram, pass: MicrobatchPass) -> Vec<PassPart> {
    let mut rest = whole(stage, pass);
    let mut parts = vec![];
    for (index, GatherBucket { before, .. }) in stage.gather_buckets.iter().enumerate() {
        parts.push(PassPart { instructions: rest.instructions.start..*before, ..rest.clone() });
        rest.instructions.start = *before;
        rest.order = PartOrder::AfterGathers(index);
    }
    parts.push(rest);
    parts
}

/// The parts of the last pass, with the gradient reductions between them.
fn last_pass(stage: &StageProgram, pass: MicrobatchPass) -> Vec<PassPart> {
    let mut rest = whole(stage, pass);
    let mut parts = vec![];
    for GradientBucket { after, reductions } in &stage.gradient_buckets {
        let begin = rest.instructions.start;
        parts.push(PassPart { instructions: begin..*after, ..rest.clone() });
        let order = PartOrder::BesideLastPass;
        parts.push(part(stage, MicrobatchPass::STEP, reductions.clone(), order));
        rest.instructions.start = *after;
    }
    parts.push(rest);
    parts
}

/// Every instruction that a device of this stage executes in a step, in order.
pub fn scheduled_instructions(
    stage: &StageProgram,
) -> impl Iterator<Item = ScheduledInstruction<'_>> {
    pass_parts(stage).flat_map(move |part| part.scheduled(stage))
}
