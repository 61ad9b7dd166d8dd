//! Placement of buffers in the arena.
//!
//! Resident buffers come first, one after the other. Activations are placed by lifetime, largest
//! first, each at the lowest offset where it overlaps no buffer that is alive at the same time. With
//! one microbatch in flight the forward and backward passes are one timeline. With several, buffers
//! that live from the forward to the backward pass have one copy per microbatch, and the others are
//! placed by lifetime within their pass, in one area that all passes share.

use super::{BufferId, BufferRole, Instr, StageProgram};
use crate::Bytes;

/// Alignment of every buffer, in bytes.
pub(crate) const ALIGNMENT: u64 = 256;

/// First and last position of a timeline at which a buffer is alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Lifetime {
    first: usize,
    last: usize,
}

/// Assigns the offset of every buffer, and the slot stride and arena size of the stage.
pub(crate) fn place_buffers(stage: &mut StageProgram) {
    let spans = spans(stage);
    let backward_begin = stage.forward.len();
    let mut end = 0;
    for buffer in stage.buffers.iter_mut().filter(|b| b.role.is_resident()) {
        buffer.offset = end;
        end += aligned(buffer.extent.bytes());
    }
    let activations = || {
        spans.iter().enumerate().filter_map(|(index, span)| {
            let id = BufferId(index as u32);
            span.map(|span| (id, span))
        })
    };
    if stage.slots <= 1 {
        stage.slot_stride = 0;
        let all: Vec<(BufferId, Lifetime)> = activations().collect();
        end = place_by_lifetime(stage, &all, end);
    } else {
        let crosses = |span: &Lifetime| span.first < backward_begin && span.last >= backward_begin;
        let slot_begin = end;
        for (id, _) in activations().filter(|(_, span)| crosses(span)) {
            let buffer = &mut stage.buffers[id.0 as usize];
            buffer.per_microbatch = true;
            buffer.offset = end;
            end += aligned(buffer.extent.bytes());
        }
        stage.slot_stride = end - slot_begin;
        end = slot_begin + stage.slot_stride * stage.slots;
        let rest: Vec<(BufferId, Lifetime)> =
            activations().filter(|(_, span)| !crosses(span)).collect();
        end = place_by_lifetime(stage, &rest, end);
    }
    stage.arena = Bytes(end);
}

fn aligned(bytes: Bytes) -> u64 {
    bytes.0.div_ceil(ALIGNMENT) * ALIGNMENT
}

/// First and last position of the timeline that accesses each activation. Operands of a collective are accessed while
/// the instructions beside it run.
fn spans(stage: &StageProgram) -> Vec<Option<Lifetime>> {
    let mut spans: Vec<Option<Lifetime>> = vec![None; stage.buffers.len()];
    for (position, instr) in stage.forward.iter().chain(&stage.backward).enumerate() {
        for id in accessed_buffers(instr) {
            if stage.buffers[id.0 as usize].role == BufferRole::Activation {
                let last = position + instr.overlapped_instrs;
                let span = spans[id.0 as usize].get_or_insert(Lifetime { first: position, last });
                span.last = span.last.max(last);
            }
        }
    }
    spans
}

fn accessed_buffers(instr: &Instr) -> impl Iterator<Item = BufferId> {
    instr.reads.iter().chain(&instr.writes).map(|access| access.buffer)
}

/// Places buffers greedily by size, largest first. Returns the end of the area.
fn place_by_lifetime(stage: &mut StageProgram, list: &[(BufferId, Lifetime)], base: u64) -> u64 {
    let mut order: Vec<(BufferId, Lifetime, u64)> = list
        .iter()
        .map(|&(id, span)| (id, span, aligned(stage.buffers[id.0 as usize].extent.bytes())))
        .collect();
    order.sort_by_key(|&(id, _, bytes)| (std::cmp::Reverse(bytes), id));
    // (begin, end, span) of the placed buffers, ordered by begin.
    let mut placed: Vec<(u64, u64, Lifetime)> = vec![];
    let mut end = base;
    for (id, span, bytes) in order {
        let mut offset = base;
        for &(begin, stop, other) in &placed {
            let overlaps = span.first <= other.last && other.first <= span.last;
            if !overlaps || stop <= offset {
                continue;
            }
            if begin >= offset + bytes {
                break;
            }
            offset = stop;
        }
        stage.buffers[id.0 as usize].offset = offset;
        end = end.max(offset + bytes);
        let at = placed.partition_point(|&(begin, _, _)| begin <= offset);
        placed.insert(at, (offset, offset + bytes, span));
    }
    end
}
