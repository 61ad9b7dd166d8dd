//! Mutations of the accumulation of gradients.

use narrows_plan::program::{Action, BufferId, FusedOp, Instr, Program};

use super::{describe, instructions_mut, random_instruction};
use crate::plans::TestRng;

/// Overwrites a sum over microbatches, or lets AdamW keep a gradient to which the next step adds.
pub(super) fn lose_accumulation(rng: &mut TestRng, program: &mut Program) -> Option<String> {
    let accumulates = program.context.accumulates_gradients;
    let location = random_instruction(rng, program, |instr| match &instr.action {
        Action::Gemm(gemm) => accumulates && gemm.accumulate && instr.action.is_weight_gradient(),
        Action::Fused(FusedOp::AdamW) => !zeroed_operands(instr).is_empty(),
        _ => false,
    })?;
    let description = describe(location, program);
    let instr = &mut instructions_mut(&mut program.stages[location.0], location.1)[location.2];
    match &mut instr.action {
        Action::Gemm(gemm) => {
            gemm.accumulate = false;
            instr.reads.pop();
        }
        _ => {
            let zeroed = *rng.pick(&zeroed_operands(instr))?;
            instr.writes.remove(zeroed);
        }
    }
    Some(description)
}

/// Positions of the gradients that AdamW zeroes, among its results.
fn zeroed_operands(instr: &Instr) -> Vec<usize> {
    let gradients: Vec<BufferId> = instr.reads.chunks(4).map(|reads| reads[0].buffer).collect();
    let results = instr.writes.iter().enumerate();
    let zeroed = results.filter(|(_, access)| gradients.contains(&access.buffer));
    zeroed.map(|(at, _)| at).collect()
}

/// Leaves a parameter out of the norm or of an update, or counts or updates it twice.
pub(super) fn change_parameters(rng: &mut TestRng, program: &mut Program) -> Option<String> {
    let location = random_instruction(rng, program, |instr| {
        matches!(instr.action, Action::Fused(FusedOp::SquareSum | FusedOp::AdamW))
    })?;
    let description = describe(location, program);
    let instr = &mut instructions_mut(&mut program.stages[location.0], location.1)[location.2];
    let (count, reads_each) = match instr.action {
        Action::Fused(FusedOp::AdamW) => (instr.reads.len() / 4, 4),
        _ => (instr.reads.len() - 1, 1),
    };
    let at = rng.below(count);
    let reads = at * reads_each..(at + 1) * reads_each;
    let writes = match reads_each {
        1 => 0..0,
        _ => {
            let updates = instr.parameter_updates().take(at + 1);
            let sizes = updates
                .map(|update| {
                    let update = update.expect("an update in place");
                    1 + usize::from(update.zeroed.is_some()) + update.states.len()
                })
                .collect::<Vec<_>>();
            let end: usize = sizes.iter().sum();
            end - sizes[at]..end
        }
    };
    let variant = ["left out", "twice"][rng.below(2)];
    if variant == "twice" {
        for (operands, range) in [(&mut instr.reads, reads), (&mut instr.writes, writes)] {
            let copied = operands[range.clone()].to_vec();
            operands.splice(range.end..range.end, copied);
        }
    } else {
        instr.reads.drain(reads);
        instr.writes.drain(writes);
    }
    Some(format!("{description}, parameter {at} {variant}"))
}
