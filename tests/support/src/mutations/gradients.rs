//! Mutations of the accumulation of gradients.

use narrows_plan::program::{Action, FusedOp, Program};

use super::{describe, instructions_mut, random_instruction};
use crate::plans::TestRng;

/// Overwrites a sum over microbatches, or lets AdamW keep a gradient to which the next step adds.
pub(super) fn lose_accumulation(rng: &mut TestRng, program: &mut Program) -> Option<String> {
    let accumulates = program.context.accumulates_gradients;
    let location = random_instruction(rng, program, |instr| match &instr.action {
        Action::Gemm(gemm) => accumulates && gemm.accumulate && instr.action.is_weight_gradient(),
        Action::Fused(FusedOp::AdamW) => instr.zeroed_gradient().is_some(),
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
            instr.writes.remove(1);
        }
    }
    Some(description)
}
