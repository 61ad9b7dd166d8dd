//! Mutations of what runs at the same time.

use std::collections::HashMap;

use narrows_plan::kernel::CollectiveKind;
use narrows_plan::program::{
    Action, BufferId, FusedOp, GradientBucket, Instr, Program, StageProgram,
};

use super::{describe, instructions_mut, is_collective, random_instruction};
use crate::instruction_order::depends;
use crate::plans::TestRng;

/// Moves a gradient bucket to a place where its gradients are not complete, adds an instruction to it, or moves a rounded
/// gradient over a buffer that the instructions beside the bucket access.
pub(super) fn change_bucket(rng: &mut TestRng, program: &mut Program) -> Option<String> {
    let index = random_stage(rng, program, |stage| !stage.gradient_buckets.is_empty())?;
    let stage = &mut program.stages[index];
    let at = rng.below(stage.gradient_buckets.len());
    let variant = rng.below(4);
    let last_pass = stage.last_pass_instructions();
    match variant {
        0 => {
            let reductions = &stage.step[stage.gradient_buckets[at].reductions.clone()];
            let reduced: Vec<BufferId> =
                reductions.iter().flat_map(|instr| &instr.writes).map(|w| w.buffer).collect();
            let accesses = |instr: &Instr| {
                let mut accesses = instr.reads.iter().chain(&instr.writes);
                accesses.any(|access| reduced.contains(&access.buffer))
            };
            let last = last_pass.iter().rposition(accesses)?;
            stage.gradient_buckets[at].after = rng.below(last + 1);
        }
        1 => stage.gradient_buckets[at].after = last_pass.len() + 1,
        2 => stage.gradient_buckets[at].reductions.end += 1,
        _ => {
            let GradientBucket { after, reductions } = stage.gradient_buckets[at].clone();
            let placed = |instr: &Instr| -> Vec<BufferId> {
                let ids = instr.reads.iter().chain(&instr.writes).map(|access| access.buffer);
                ids.filter(|id| !stage.buffer(*id).role.is_resident()).collect()
            };
            let rounded: Vec<BufferId> = stage.step[reductions].iter().flat_map(placed).collect();
            let beside: Vec<BufferId> = last_pass.get(after..)?.iter().flat_map(placed).collect();
            let (rounded, over) = (*rng.pick(&rounded)?, *rng.pick(&beside)?);
            stage.buffers[rounded.0 as usize].offset = stage.buffer(over).offset;
        }
    }
    Some(format!("stage {index} bucket {at} variant {variant}"))
}

/// The index of a stage that satisfies a condition.
pub(super) fn random_stage(
    rng: &mut TestRng,
    program: &Program,
    condition: impl Fn(&StageProgram) -> bool,
) -> Option<usize> {
    let satisfies = |index: &usize| condition(&program.stages[*index]);
    let stages: Vec<usize> = (0..program.stages.len()).filter(satisfies).collect();
    rng.pick(&stages).copied()
}

/// Lets a gather bucket end after the first pass reads one of its weights, or changes which instructions it contains.
pub(super) fn change_gather_bucket(rng: &mut TestRng, program: &mut Program) -> Option<String> {
    let index = random_stage(rng, program, |stage| !stage.gather_buckets.is_empty())?;
    let stage = &mut program.stages[index];
    let at = rng.below(stage.gather_buckets.len());
    let variant = rng.below(5);
    let length = stage.first_pass_instructions().len();
    match variant {
        0 => {
            let gathers = &stage.step[stage.gather_buckets[at].gathers.clone()];
            let gathered: Vec<BufferId> =
                gathers.iter().flat_map(|instr| &instr.writes).map(|w| w.buffer).collect();
            let reads = |instr: &Instr| instr.reads.iter().any(|r| gathered.contains(&r.buffer));
            let first = stage.first_pass_instructions().iter().position(reads)?;
            stage.gather_buckets[at].before = first + 1 + rng.below(length - first);
        }
        1 => stage.gather_buckets[at].before = length + 1,
        2 => {
            // The first bucket may begin with a gather that runs before the next step.
            let gathers = stage.gather_buckets[at].gathers.clone();
            let previous = stage.step[..gathers.start].last()?;
            let is_gather = matches!(&previous.action, Action::Collective(collective)
                if collective.kind() == CollectiveKind::AllGather);
            (at > 0 || !is_gather).then_some(())?;
            stage.gather_buckets[at].gathers.start -= 1;
        }
        3 => {
            // An update takes the place of a gather.
            let first = stage.before_gathers();
            let is_update = |instr: &Instr| instr.action == Action::Fused(FusedOp::AdamW);
            let last_update = stage.step[..first].iter().rposition(is_update)?;
            stage.step.swap(last_update, first);
        }
        _ => {
            // Without the first bucket, its gathers would be in the step phase.
            (at > 0).then_some(())?;
            stage.gather_buckets.remove(at);
        }
    }
    Some(format!("stage {index} gather bucket {at} variant {variant}"))
}

/// Lets an instruction of a pass of two microbatches read an operand of the other one.
pub(super) fn mix_microbatches(rng: &mut TestRng, program: &mut Program) -> Option<String> {
    let others: Vec<Vec<Option<BufferId>>> = program.stages.iter().map(other_microbatch).collect();
    let location = random_instruction(rng, program, |_| program.context.overlap_microbatch_pairs)?;
    let description = describe(location, program);
    let (stage, phase, at) = location;
    let instr = &mut instructions_mut(&mut program.stages[stage], phase)[at];
    let other = |id: BufferId| others[stage][id.0 as usize];
    let ports: Vec<usize> =
        (0..instr.reads.len()).filter(|port| other(instr.reads[*port].buffer).is_some()).collect();
    let port = *rng.pick(&ports)?;
    let of_other = other(instr.reads[port].buffer)?;
    // An operation of the other microbatch, computed twice, would be the same with all of its operands.
    (instr.reads.len() > 1).then_some(())?;
    instr.reads[port].buffer = of_other;
    Some(format!("{description}, operand {port}"))
}

/// The buffer of the other microbatch of a pass, for each buffer of which every microbatch has one.
fn other_microbatch(stage: &StageProgram) -> Vec<Option<BufferId>> {
    let names: HashMap<&str, usize> =
        stage.buffers.iter().enumerate().map(|(at, buffer)| (buffer.name.as_str(), at)).collect();
    let mut others = vec![None; stage.buffers.len()];
    for (second, buffer) in stage.buffers.iter().enumerate() {
        let first = buffer.name.strip_suffix(" of the second microbatch");
        if let Some(first) = first.and_then(|first| names.get(first)) {
            others[*first] = Some(BufferId(second as u32));
            others[second] = Some(BufferId(*first as u32));
        }
    }
    others
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
    Some(format!("{} overlapping the next {count}", describe(location, program)))
}
