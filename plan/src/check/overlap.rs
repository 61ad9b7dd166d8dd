//! Checks that collectives may overlap with the instructions after them.
//!
//! The walk proves the instructions correct in their order. Here, no computation that overlaps with a collective accesses bytes that
//! the collective writes, or writes bytes that it reads, so every interleaving gives the same contents.

use std::ops::Range;

use crate::mesh::Axis;
use crate::program::{Access, Action, Instr, Phase, StageProgram};

use super::error::{CheckErrors, CheckResult, ensure, fault};

/// Checks the overlapped instructions of one stage. Ids of buffers are valid and sizes are within the arena.
pub(super) fn check_overlaps(index: usize, stage: &StageProgram, errors: &mut CheckErrors) {
    for phase in stage.chunk_phases() {
        let instructions = stage.instructions(phase);
        for (at, instr) in instructions.iter().enumerate().filter(|(_, i)| i.overlapped_instrs > 0)
        {
            let check = match phase.phase {
                // AdamW reads the gradient norm, which is no operand.
                Phase::Step => fault("overlaps with other instructions of the step phase"),
                _ => check_overlap(stage, instr, &instructions[at + 1..]),
            };
            if let Err(fault) = check {
                errors.push_instruction((index, phase, at), instr, fault);
            }
        }
    }
}

/// Checks an instruction against the instructions that follow it.
fn check_overlap(stage: &StageProgram, instr: &Instr, following: &[Instr]) -> CheckResult {
    let count = instr.overlapped_instrs;
    ensure(matches!(instr.action, Action::Collective(_)), || {
        format!("overlaps with the next {count} instructions, but is not a collective")
    })?;
    ensure(count <= following.len(), || {
        format!("overlaps with the next {count} instructions, but {} follow", following.len())
    })?;
    let in_sequence = instr.collectives_in_sequence(following);
    for (at, other) in following[..count].iter().enumerate() {
        // Leading collectives run one after the other, each perhaps on the result of the one before, and all overlap with
        // the same instructions.
        let is_next = at < in_sequence;
        if !is_next {
            check_beside(instr, other)?;
            ensure(at + other.overlapped_instrs < count, || {
                format!("overlaps with `{}`, but not with all that overlaps with it", other.origin)
            })?;
        }
        let conflicts = |written: &[Access], accessed: &[Access]| {
            let overlap = |a: &Access, b: &Access| overlaps(&bytes(stage, a), &bytes(stage, b));
            written.iter().any(|a| accessed.iter().any(|b| overlap(a, b)))
        };
        let races = conflicts(&instr.writes, &other.reads)
            || conflicts(&instr.writes, &other.writes)
            || conflicts(&other.writes, &instr.reads);
        ensure(is_next || !races, || {
            format!("overlaps with `{}`, which accesses the same bytes", other.origin)
        })?;
    }
    Ok(())
}

/// Checks the kind of an instruction that runs beside a collective. Overlapped collectives over the data axis have a stream of
/// their own.
fn check_beside(collective: &Instr, other: &Instr) -> CheckResult {
    let is_allowed = match &other.action {
        Action::Collective(op) => collective.overlaps_collectives() && op.axis != Axis::Data,
        Action::Attention(_) if collective.overlaps_collectives() => true,
        action => !action.is_communication(),
    };
    ensure(is_allowed, || {
        format!("overlaps with {}, which is communication too", other.action.name())
    })
}

/// The bytes of the first copy of an operand's whole buffer. Buffers with several copies overlap no other buffer.
fn bytes(stage: &StageProgram, access: &Access) -> Range<u64> {
    let buffer = stage.buffer(access.buffer);
    buffer.offset..buffer.offset + buffer.extent.bytes().0
}

pub(super) fn overlaps(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}
