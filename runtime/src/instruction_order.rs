//! The order in which a device executes its instructions in a step: the passes of the stage's
//! schedule, each a whole pass of one microbatch, or of a pair, through a chunk, then the step phase once.
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

/// The parts of all passes that a device of this stage executes in a step, in order. Nothing is allocated.
pub fn pass_parts(stage: &StageProgram) -> impl Iterator<Item = PassPart> {
    let last = stage.schedule.len().saturating_sub(1);
    let passes = stage.schedule.iter().enumerate();
    let passes = passes.flat_map(move |(index, pass)| {
        let gathers = if index == 0 { &stage.gather_buckets[..] } else { &[] };
        let reductions = if index == last { &stage.gradient_buckets[..] } else { &[] };
        divided_pass(stage, *pass, gathers, reductions)
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

/// The parts of a pass: divided where the first pass waits for weights, or where gradients of the last pass are reduced. A
/// first pass is a forward pass, and so never the last.
fn divided_pass<'a>(
    stage: &'a StageProgram,
    pass: MicrobatchPass,
    gathers: &'a [GatherBucket],
    reductions: &'a [GradientBucket],
) -> impl Iterator<Item = PassPart> {
    let length = stage.instructions(pass.chunk_phase()).len();
    let cuts = gathers.len() + reductions.len();
    let reduced_at = move |cut: usize| reductions.get(cut.checked_sub(gathers.len())?);
    let cut_at = move |cut: usize| match gathers.get(cut) {
        Some(bucket) => Some(bucket.before),
        None => reduced_at(cut).map(|bucket| bucket.after),
    };
    (0..=cuts).flat_map(move |index| {
        let cut_before = index.checked_sub(1);
        let begin = cut_before.and_then(cut_at).unwrap_or(0);
        let end = cut_at(index).unwrap_or(length);
        let order = match cut_before {
            Some(bucket) if bucket < gathers.len() => PartOrder::AfterGathers(bucket),
            _ => PartOrder::InOrder,
        };
        let reduced = reduced_at(index).map(|bucket| {
            let reductions = bucket.reductions.clone();
            part(stage, MicrobatchPass::STEP, reductions, PartOrder::BesideLastPass)
        });
        [part(stage, pass, begin..end, order)].into_iter().chain(reduced)
    })
}

/// Every instruction that a device of this stage executes in a step, in order.
pub fn scheduled_instructions(
    stage: &StageProgram,
) -> impl Iterator<Item = ScheduledInstruction<'_>> {
    pass_parts(stage).flat_map(move |part| part.scheduled(stage))
}
