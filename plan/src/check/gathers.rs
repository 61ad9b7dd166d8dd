//! Checks that gather buckets may run during the first pass of the next step.
//!
//! The gathers of a bucket follow all other instructions of the step phase, in any interleaving with the instructions of
//! the first pass before the bucket's point. The walk of the step phase proves them correct at its end; here, no instruction
//! before the point accesses the weights that they gather, so every interleaving gives the same contents. Weights are
//! resident, and share no bytes with other buffers. Collectives of the pass over the data axis follow too: one communicator
//! serves one stream at a time.

use std::collections::HashMap;

use crate::kernel::CollectiveKind;
use crate::mesh::Axis;
use crate::program::{Action, BufferId, BufferRole, GatherBucket, Instr, Phase, StageProgram};

use super::error::{CheckResult, ensure, fault};

/// Checks the gather buckets of one stage. Ids of buffers are valid.
pub(super) fn check_gather_buckets(stage: &StageProgram) -> CheckResult {
    let buckets = &stage.gather_buckets;
    let Some(last) = buckets.last() else { return Ok(()) };
    let is_forward = stage.schedule.first().is_some_and(|pass| pass.phase == Phase::Forward);
    ensure(is_forward, || "gathers weights during a first pass that is not a forward pass".into())?;
    ensure(stage.bucket_reductions() <= stage.before_gathers(), || {
        "its gather buckets begin among its gradient buckets".into()
    })?;
    ensure(last.gathers.end == stage.step.len(), || {
        "its gather buckets are not the end of the step phase".into()
    })?;
    let first_pass = FirstPass::of(stage.first_pass_instructions());
    let mut begin = stage.before_gathers();
    for (index, bucket) in buckets.iter().enumerate() {
        let gathers = &bucket.gathers;
        ensure(gathers.start == begin && begin < gathers.end, || {
            format!("gather bucket {index} is not the next part of the step phase")
        })?;
        begin = gathers.end;
        check_bucket(stage, index, bucket, &first_pass)?;
    }
    ensure(buckets.is_sorted_by_key(|bucket| bucket.before), || {
        "its gather buckets are not in the order of the first pass".into()
    })
}

/// The instructions of the first pass, as far as gather buckets depend on them.
struct FirstPass<'a> {
    instructions: &'a [Instr],
    /// Index of the first instruction that accesses each buffer.
    first_access: HashMap<BufferId, usize>,
    /// Index of the first collective over the data axis.
    first_over_data: Option<usize>,
    /// At index i, the last of the instructions that run beside one of the first i.
    overlapped_until: Vec<usize>,
}

impl<'a> FirstPass<'a> {
    fn of(instructions: &'a [Instr]) -> FirstPass<'a> {
        let over_data =
            |instr: &Instr| matches!(&instr.action, Action::Collective(c) if c.axis == Axis::Data);
        let mut overlapped_until = vec![0];
        let mut last = 0;
        for (at, instr) in instructions.iter().enumerate() {
            if instr.overlapped_instrs > 0 {
                last = last.max(at.saturating_add(instr.overlapped_instrs));
            }
            overlapped_until.push(last);
        }
        FirstPass {
            instructions,
            first_access: first_accesses(instructions),
            first_over_data: instructions.iter().position(over_data),
            overlapped_until,
        }
    }
}

/// Checks one bucket against the instructions of the first pass that it may run beside.
fn check_bucket(
    stage: &StageProgram,
    index: usize,
    bucket: &GatherBucket,
    first_pass: &FirstPass,
) -> CheckResult {
    let GatherBucket { before, gathers } = bucket;
    let Some(overlapped_until) = first_pass.overlapped_until.get(*before) else {
        return fault(format!("gather bucket {index} ends after the first pass"));
    };
    ensure(*before == 0 || overlapped_until < before, || {
        format!("gather bucket {index} ends between instructions that run at the same time")
    })?;
    if let Some(other) = first_pass.first_over_data.filter(|first| first < before) {
        let origin = &first_pass.instructions[other].origin;
        return fault(format!(
            "gather bucket {index} may overlap with `{origin}`, which is over the data axis too"
        ));
    }
    for instr in stage.step.get(gathers.clone()).unwrap_or_default() {
        ensure(is_weight_gather(stage, instr), || {
            format!(
                "gather bucket {index} has an instruction that gathers no weights over the data axis"
            )
        })?;
        for weight in &instr.writes {
            let first = first_pass.first_access.get(&weight.buffer);
            ensure(first.is_none_or(|first| before <= first), || {
                let name = &stage.buffer(weight.buffer).name;
                format!(
                    "gather bucket {index} may still write `{name}` when the first pass reads it"
                )
            })?;
        }
    }
    Ok(())
}

/// Whether an instruction gathers weights in place over the data axis.
fn is_weight_gather(stage: &StageProgram, instr: &Instr) -> bool {
    let Action::Collective(collective) = &instr.action else { return false };
    let is_weight = |id| stage.buffer(id).role == BufferRole::Weight;
    collective.axis == Axis::Data
        && collective.kind() == CollectiveKind::AllGather
        && instr.reads == instr.writes
        && instr.writes.iter().all(|access| is_weight(access.buffer))
}

/// Index of the first instruction that accesses each buffer.
fn first_accesses(instructions: &[Instr]) -> HashMap<BufferId, usize> {
    // Earlier accesses replace later ones.
    let accesses = instructions.iter().enumerate().rev().flat_map(|(index, instr)| {
        instr.reads.iter().chain(&instr.writes).map(move |access| (access.buffer, index))
    });
    accesses.collect()
}
