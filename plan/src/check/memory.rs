//! Checks of the placement of buffers: inside the arena, aligned, and without overlap of live buffers.
//!
//! Resident buffers overlap no other buffer. Per-microbatch buffers have an area of their own, so that
//! slots never overlap. Within one microbatch, [`ByteOwners`] maps byte ranges to the buffer last written
//! there, so that a write tells which other contents it destroys.

use std::collections::BTreeMap;

use crate::DType;
use crate::program::{
    ALIGNMENT, Access, Buffer, BufferId, BufferRole, Extent, Instr, Phase, StageProgram,
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
pub(super) fn check_placement(index: usize, stage: &StageProgram, errors: &mut CheckErrors) {
    // The other checks add sizes, which cannot overflow once this one has passed.
    if let Err(fault) = check_arena(stage) {
        return errors.push_stage(index, fault);
    }
    for phase in [Phase::Forward, Phase::Backward, Phase::Step] {
        for (at, instr) in stage.instructions(phase).iter().enumerate() {
            if let Err(fault) = check_operands(stage, instr) {
                errors.push_instruction((index, phase, at), instr, fault);
            }
        }
    }
    for check in [check_slots, check_disjoint, check_roles] {
        if let Err(fault) = check(stage) {
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

fn end(stage: &StageProgram, buffer: &Buffer) -> Option<u64> {
    let copies = if buffer.per_microbatch { stage.slots.saturating_sub(1) } else { 0 };
    let bytes = buffer.extent.rows.checked_mul(buffer.extent.columns)?;
    let bytes = bytes.checked_mul(buffer.extent.dtype.width())?;
    buffer.offset.checked_add(copies.checked_mul(stage.slot_stride)?)?.checked_add(bytes)
}

fn check_arena(stage: &StageProgram) -> CheckResult {
    for buffer in &stage.buffers {
        let inside = end(stage, buffer).is_some_and(|end| end <= stage.arena.0);
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
    ensure(stage.slot_stride.is_multiple_of(ALIGNMENT), || {
        format!("the slot stride of {} bytes is not a multiple of {ALIGNMENT}", stage.slot_stride)
    })
}

/// Begin and end of the first slot in bytes; `None` without buffers per microbatch.
fn first_slot(stage: &StageProgram) -> Option<(u64, u64)> {
    let copied = || stage.buffers.iter().filter(|buffer| buffer.per_microbatch);
    let begin = copied().map(|buffer| buffer.offset).min()?;
    let end = copied().map(|buffer| buffer.offset + buffer.extent.bytes().0).max()?;
    Some((begin, end))
}

fn check_slots(stage: &StageProgram) -> CheckResult {
    let Some((begin, end)) = first_slot(stage) else { return Ok(()) };
    if let Some(buffer) = stage.buffers.iter().find(|b| b.per_microbatch && b.role.is_resident()) {
        return fault(format!(
            "`{}` has one copy per microbatch but is not an activation",
            buffer.name
        ));
    }
    ensure(stage.slots <= 1 || end - begin <= stage.slot_stride, || {
        format!("a slot takes {} bytes, but the slot stride is {}", end - begin, stage.slot_stride)
    })?;
    let slots = stage.slot_stride.saturating_mul(stage.slots.max(1));
    let slots_end = begin.saturating_add(slots);
    let overlaps = |buffer: &Buffer| {
        !buffer.per_microbatch
            && buffer.offset < slots_end.max(end)
            && buffer.offset + buffer.extent.bytes().0 > begin
    };
    match stage.buffers.iter().find(|buffer| overlaps(buffer)) {
        Some(buffer) => {
            fault(format!("`{}` overlaps the slots of other microbatches in flight", buffer.name))
        }
        None => Ok(()),
    }
}

/// Resident buffers overlap no other buffer; `check_slots` checks slots.
fn check_disjoint(stage: &StageProgram) -> CheckResult {
    let mut order: Vec<&Buffer> = stage.buffers.iter().filter(|b| b.extent.bytes().0 > 0).collect();
    order.sort_by_key(|buffer| buffer.offset);
    // The buffers with the furthest end so far, among all and among resident ones.
    let (mut any, mut resident): (Option<&Buffer>, Option<&Buffer>) = (None, None);
    let stop = |buffer: &Buffer| buffer.offset + buffer.extent.bytes().0;
    for buffer in order {
        let is_resident = buffer.role.is_resident();
        let other = if is_resident { any } else { resident };
        if let Some(other) = other.filter(|other| stop(other) > buffer.offset) {
            return fault(format!(
                "`{}` and `{}` overlap, but weights, optimizer states and inputs are alive during the whole step",
                other.name, buffer.name
            ));
        }
        let further = |best: Option<&Buffer>| best.is_none_or(|best| stop(best) < stop(buffer));
        if further(any) {
            any = Some(buffer);
        }
        if is_resident && further(resident) {
            resident = Some(buffer);
        }
    }
    Ok(())
}

/// Checks the buffers that executors find by role: one square sum, and at most one of token ids, targets
/// and loss, each in the format of its role.
fn check_roles(stage: &StageProgram) -> CheckResult {
    use BufferRole::{Loss, SquareSum, Targets, Tokens};
    for (role, dtype, content) in [
        (Tokens, DType::U32, "input token ids"),
        (Targets, DType::U32, "target token ids"),
        (Loss, DType::F32, "the loss"),
        (SquareSum, DType::F32, "the sum of squared gradients"),
    ] {
        let mut buffers = stage.buffers.iter().filter(|buffer| buffer.role == role);
        let first = buffers.next();
        ensure(first.is_some() || role != SquareSum, || format!("has no buffer for {content}"))?;
        if let (Some(first), Some(second)) = (first, buffers.next()) {
            return fault(format!(
                "has two buffers for {content}: `{}` and `{}`",
                first.name, second.name
            ));
        }
        if let Some(buffer) = first {
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
            per_microbatch: false,
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
