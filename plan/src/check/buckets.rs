//! Checks that gradient buckets may run during the last pass of a stage.
//!
//! The reductions of a bucket, with the casts around them, run from the bucket's point in the last pass on, in any
//! interleaving with the instructions after that point. The walk of the step phase proves them correct after the whole
//! pass; here, no instruction from the point on accesses the bytes of their operands, so every interleaving gives the
//! same contents.

use std::collections::HashMap;
use std::ops::Range;

use crate::mesh::Axis;
use crate::program::{Action, Buffer, BufferId, FusedOp, GradientBucket, Instr, StageProgram};

use super::error::{CheckResult, ensure};
use super::overlap::overlaps;

/// Checks the buckets of one stage. Ids of buffers are valid.
pub(super) fn check_buckets(stage: &StageProgram) -> CheckResult {
    let last_pass = stage.last_pass_instructions();
    let last_access = last_accesses(last_pass);
    let overlapped = last_pass.iter().enumerate().filter(|(_, i)| i.overlapped_instrs > 0);
    let overlapped: Vec<(usize, usize)> =
        overlapped.map(|(at, instr)| (at, at.saturating_add(instr.overlapped_instrs))).collect();
    let mut end = 0;
    for (index, GradientBucket { after, reductions }) in stage.gradient_buckets.iter().enumerate() {
        ensure(reductions.start == end && reductions.end <= stage.step.len(), || {
            format!("gradient bucket {index} is not the next part of the step phase")
        })?;
        end = reductions.end;
        ensure(*after <= last_pass.len(), || {
            format!("gradient bucket {index} begins after the end of the last pass")
        })?;
        let is_divided = |(at, last): &(usize, usize)| at < after && after <= last;
        ensure(!overlapped.iter().any(is_divided), || {
            format!("gradient bucket {index} begins between instructions that run at the same time")
        })?;
        for instr in &stage.step[reductions.clone()] {
            ensure(is_data_reduction(instr), || {
                format!(
                    "gradient bucket {index} has an instruction that reduces nothing over the data axis"
                )
            })?;
            for access in instr.reads.iter().chain(&instr.writes) {
                let last = last_access_of_bytes(stage, &last_access, access.buffer);
                ensure(last.is_none_or(|last| last < *after), || {
                    let name = &stage.buffer(access.buffer).name;
                    format!(
                        "gradient bucket {index} accesses `{name}` before the last pass is done with its bytes"
                    )
                })?;
            }
        }
    }
    let in_order = stage.gradient_buckets.is_sorted_by_key(|bucket| bucket.after);
    ensure(in_order, || "its gradient buckets are not in the order of the last pass".into())
}

/// Whether an instruction reduces over the data axis, or changes the format of a gradient for that.
fn is_data_reduction(instr: &Instr) -> bool {
    match &instr.action {
        Action::Collective(collective) => collective.axis == Axis::Data,
        action => *action == Action::Fused(FusedOp::Cast),
    }
}

/// Index of the last instruction that accesses a byte of a buffer. Resident buffers share no bytes with others.
fn last_access_of_bytes(
    stage: &StageProgram,
    last_access: &HashMap<BufferId, usize>,
    id: BufferId,
) -> Option<usize> {
    let buffer = stage.buffer(id);
    if buffer.role.is_resident() {
        return last_access.get(&id).copied();
    }
    let bytes = all_copies(buffer);
    let shares_bytes = |other: &BufferId| overlaps(&bytes, &all_copies(stage.buffer(*other)));
    last_access.iter().filter(|(other, _)| shares_bytes(other)).map(|(_, last)| *last).max()
}

/// The bytes of all copies of a buffer.
fn all_copies(buffer: &Buffer) -> Range<u64> {
    buffer.offset..buffer.offset + buffer.copies * buffer.copy_stride()
}

/// Index of the last instruction that accesses each buffer.
fn last_accesses(instructions: &[Instr]) -> HashMap<BufferId, usize> {
    let accesses = instructions.iter().enumerate().flat_map(|(index, instr)| {
        instr.reads.iter().chain(&instr.writes).map(move |access| (access.buffer, index))
    });
    accesses.collect()
}
