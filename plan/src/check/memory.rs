//! Checks of the placement of buffers: inside the arena, aligned, and without overlap of live buffers.
//!
//! Resident buffers and buffers with several copies overlap no other buffer. Within one microbatch, [`ByteOwners`] maps byte
//! ranges to the buffer last written there, so that a write tells which other contents it destroys.

use std::collections::BTreeMap;

use crate::DType;
use crate::context::Context;
use crate::program::{
    ALIGNMENT, Access, Buffer, BufferId, BufferRole, Extent, Instr, StageProgram,
};

use super::error::{CheckErrors, CheckResult, ensure, fault};

/// The buffer last written to each byte range.
#[derive(Default)]
pub(super) struct ByteOwners(BTreeMap<u64, (u64, BufferId)>);

impl ByteOwners {
    /// Records a write to a buffer and returns the other buffers whose contents it destroys.
    pub fn claim(&mut self, buffer: &Buffer, id: BufferId) -> Vec<BufferId> {
        let (begin, end) = (buffer.offset, buffer.offset + buffer.extent.bytes().0);
        let overlapping: Vec<(u64, u64, BufferId)> = self
            .0
            .range(..end)
            .rev()
            .take_while(|(_, (stop, _))| *stop > begin)
            .map(|(start, (stop, owner))| (*start, *stop, *owner))
            .collect();
        let mut overwritten = vec![];
        for (start, _, owner) in overlapping {
            // Partly overwritten contents are lost, so the rest of their range has no owner.
            self.0.remove(&start);
            if owner != id {
                overwritten.push(owner);
            }
        }
        if end > begin {
            self.0.insert(begin, (end, id));
        }
        overwritten
    }
}

/// Checks operands, placement and roles of the buffers of a stage, without a walk.
pub(super) fn check_placement(
    index: usize,
    stage: &StageProgram,
    context: &Context,
    errors: &mut CheckErrors,
) {
    // The other checks add sizes, which cannot overflow once this one has passed.
    if let Err(fault) = check_arena(stage) {
        return errors.push_stage(index, fault);
    }
    for phase in stage.chunk_phases() {
        for (at, instr) in stage.instructions(phase).iter().enumerate() {
            if let Err(fault) = check_operands(stage, instr) {
                errors.push_instruction((index, phase, at), instr, fault);
            }
        }
    }
    let roles = check_roles(stage, context.pass_microbatches());
    for result in [check_copied_roles(stage), check_disjoint(stage), roles] {
        if let Err(fault) = result {
            errors.push_stage(index, fault);
        }
    }
}

fn check_operands(stage: &StageProgram, instr: &Instr) -> CheckResult {
    for access in instr.reads.iter().chain(&instr.writes) {
        check_access(stage, access)?;
    }
    Ok(())
}

fn check_access(stage: &StageProgram, access: &Access) -> CheckResult {
    let Some(buffer) = stage.buffers.get(access.buffer.0 as usize) else {
        return fault(format!(
            "accesses buffer {}, which the stage does not have",
            access.buffer.0
        ));
    };
    let (accessed, stored) = (access.extent, buffer.extent);
    ensure(accessed.dtype == stored.dtype, || {
        let (name, is, as_) = (&buffer.name, stored.dtype.name(), accessed.dtype.name());
        format!("accesses `{name}` as {as_}, but its elements are {is}")
    })?;
    let elements = accessed.rows.checked_mul(accessed.columns);
    let within = elements.is_some_and(|count| count <= stored.rows * stored.columns);
    ensure(within, || {
        format!("accesses `{}` as {accessed}, which is larger than {stored}", buffer.name)
    })
}

/// End of a buffer with all of its copies, in bytes; `None` where it overflows.
fn end(buffer: &Buffer) -> Option<u64> {
    let bytes = buffer.extent.rows.checked_mul(buffer.extent.columns)?;
    let bytes = bytes.checked_mul(buffer.extent.dtype.width())?;
    let stride = bytes.checked_next_multiple_of(ALIGNMENT)?;
    let others = buffer.copies.saturating_sub(1).checked_mul(stride)?;
    buffer.offset.checked_add(others)?.checked_add(bytes)
}

fn check_arena(stage: &StageProgram) -> CheckResult {
    for buffer in &stage.buffers {
        let inside = end(buffer).is_some_and(|end| end <= stage.arena.0);
        ensure(inside, || {
            format!(
                "`{}` at byte {} with {} ends outside the arena of {} bytes",
                buffer.name, buffer.offset, buffer.extent, stage.arena.0
            )
        })?;
        ensure(buffer.offset.is_multiple_of(ALIGNMENT), || {
            format!(
                "`{}` begins at byte {}, which is not a multiple of {ALIGNMENT}",
                buffer.name, buffer.offset
            )
        })?;
    }
    Ok(())
}

fn check_copied_roles(stage: &StageProgram) -> CheckResult {
    for buffer in &stage.buffers {
        let (name, copies) = (&buffer.name, buffer.copies);
        ensure(copies > 0, || format!("`{name}` has no copy"))?;
        ensure(copies == 1 || !buffer.role.is_resident(), || {
            format!("`{name}` has {copies} copies but is not an activation")
        })?;
    }
    Ok(())
}

/// Resident buffers and buffers with several copies overlap no other buffer.
fn check_disjoint(stage: &StageProgram) -> CheckResult {
    let mut order: Vec<&Buffer> = stage.buffers.iter().filter(|b| b.extent.bytes().0 > 0).collect();
    order.sort_by_key(|buffer| buffer.offset);
    // The buffers with the furthest end so far, among all and among exclusive ones.
    let (mut any, mut exclusive): (Option<&Buffer>, Option<&Buffer>) = (None, None);
    let stop = |buffer: &Buffer| end(buffer).unwrap_or(u64::MAX);
    for buffer in order {
        let is_exclusive = buffer.role.is_resident() || buffer.copies > 1;
        let other = if is_exclusive { any } else { exclusive };
        if let Some(other) = other.filter(|other| stop(other) > buffer.offset) {
            let reason = match [other, buffer].iter().find(|buffer| buffer.copies > 1) {
                Some(copied) => format!("`{}` has copies for microbatches in flight", copied.name),
                None => {
                    "weights, optimizer states and inputs are alive during the whole step".into()
                }
            };
            let (first, second) = (&other.name, &buffer.name);
            return fault(format!("`{first}` and `{second}` overlap, but {reason}"));
        }
        let further = |best: Option<&Buffer>| best.is_none_or(|best| stop(best) < stop(buffer));
        if further(any) {
            any = Some(buffer);
        }
        if is_exclusive && further(exclusive) {
            exclusive = Some(buffer);
        }
    }
    Ok(())
}

/// Checks the buffers that executors find by role: one square sum, at most one loss, and token ids and targets for no more
/// microbatches than a pass runs, each in the format of its role.
fn check_roles(stage: &StageProgram, microbatches: u64) -> CheckResult {
    use BufferRole::{Loss, SquareSum, Targets, Tokens};
    for (role, dtype, content) in [
        (Tokens, DType::U32, "input token ids"),
        (Targets, DType::U32, "target token ids"),
        (Loss, DType::F32, "the loss"),
        (SquareSum, DType::F32, "the sum of squared gradients"),
    ] {
        let buffers = || stage.buffers.iter().filter(|buffer| buffer.role == role);
        let most = if role.is_input() { microbatches as usize } else { 1 };
        ensure(role != SquareSum || buffers().count() > 0, || {
            format!("has no buffer for {content}")
        })?;
        if let (Some(one), Some(other)) = (buffers().nth(most - 1), buffers().nth(most)) {
            return fault(format!(
                "has too many buffers for {content}, such as `{}` and `{}`",
                one.name, other.name
            ));
        }
        for buffer in buffers() {
            let Extent { rows, columns, dtype: stored } = buffer.extent;
            let scalar = matches!(role, Loss | SquareSum);
            ensure(stored == dtype && columns == 1 && (rows == 1 || !scalar), || {
                format!("keeps {content} in `{}` as {}", buffer.name, buffer.extent)
            })?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn buffer(offset: u64, bytes: u64) -> Buffer {
        Buffer {
            name: String::new(),
            extent: Extent::flat(bytes / 4, DType::F32),
            role: BufferRole::Activation,
            offset,
            copies: 1,
            shard: None,
            sections: vec![],
        }
    }

    #[test]
    fn a_write_destroys_the_contents_of_every_buffer_it_overlaps() {
        let mut owners = ByteOwners::default();
        assert!(owners.claim(&buffer(0, 256), BufferId(0)).is_empty());
        assert!(owners.claim(&buffer(256, 256), BufferId(1)).is_empty());
        assert!(owners.claim(&buffer(0, 256), BufferId(0)).is_empty(), "its own bytes");
        let mut overwritten = owners.claim(&buffer(128, 256), BufferId(2));
        overwritten.sort();
        assert_eq!(overwritten, [BufferId(0), BufferId(1)]);
        assert_eq!(owners.claim(&buffer(0, 512), BufferId(3)), [BufferId(2)]);
    }
}
