//! Mutations of what runs at the same time.

use narrows_plan::program::Program;

use super::{describe, instructions_mut, is_collective, random_instruction};
use crate::instruction_order::depends;
use crate::plans::TestRng;

/// Moves a gradient bucket to a place where its gradients are not complete, or adds an instruction to it.
pub(super) fn change_bucket(rng: &mut TestRng, program: &mut Program) -> Option<String> {
    let with_buckets = |index: &usize| !program.stages[*index].gradient_buckets.is_empty();
    let stages: Vec<usize> = (0..program.stages.len()).filter(with_buckets).collect();
    let index = *rng.pick(&stages)?;
    let stage = &mut program.stages[index];
    let at = rng.below(stage.gradient_buckets.len());
    let bucket = &mut stage.gradient_buckets[at];
    let variant = rng.below(3);
    match variant {
        0 => bucket.after = rng.below(bucket.after.min(2)),
        1 => bucket.after = stage.backward.len() + 1,
        _ => bucket.reductions.end += 1,
    }
    Some(format!("stage {index} bucket {at} variant {variant}"))
}

/// Runs an instruction beside others that it may not run beside: those up to the first that depends on it, or any
/// where it is no collective.
pub(super) fn overlap_conflicting(rng: &mut TestRng, program: &mut Program) -> Option<String> {
    let location = random_instruction(rng, program, |_| true)?;
    let (stage, phase, at) = location;
    let stage_program = &program.stages[stage];
    let (instr, following) = stage_program.instructions(phase)[at..].split_first()?;
    let dependent = following.iter().position(|other| depends(stage_program, instr, other));
    let count = match is_collective(instr) {
        true => dependent? + 1,
        false => dependent.map_or(1, |dependent| dependent + 1),
    };
    instructions_mut(&mut program.stages[stage], phase)[at].overlapped_instrs = count;
    Some(format!("{} beside the next {count}", describe(location, program)))
}
