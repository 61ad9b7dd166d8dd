//! Placement of buffers in the arena.
//!
//! Resident buffers come first, one after the other. Activations are placed by lifetime, largest
//! first, each at the lowest offset where it overlaps no buffer that is alive at the same time. Passes of one microbatch
//! that follow each other at once are one timeline. A buffer that lives from a pass to a later one, with other passes
//! between them, has copies, one for each microbatch that needs it at once. All other buffers are placed by lifetime, in
//! one area that all passes of all chunks and the step phase share. Buffers of gradient buckets have an area of their
//! own, because the buckets overlap with the last pass; they are reduced one after the other.

mod occupancy;

use super::{BufferId, ChunkPhase, Instr, Phase, StageProgram};
use crate::Bytes;
use occupancy::{LiveRange, Occupancy};

/// Assigns the offset and the number of copies of every buffer, and the arena size of the stage.
pub(crate) fn place_buffers(stage: &mut StageProgram) {
    let spans = spans(stage);
    let mut end = 0;
    for buffer in stage.buffers.iter_mut().filter(|b| b.role.is_resident()) {
        buffer.offset = end;
        end += buffer.copy_stride();
    }
    let copies = CopyCounts::new(stage);
    let step = copies.pass_ends.last().copied().unwrap_or(0);
    let buckets = step..step + stage.bucket_reductions();
    let (mut within_pass, mut in_buckets) = (vec![], vec![]);
    for (index, span) in spans.into_iter().enumerate() {
        let Some(span) = span else { continue };
        match copies.of(span) {
            None if buckets.contains(&span.first) => {
                in_buckets.push((BufferId(index as u32), span))
            }
            None => within_pass.push((BufferId(index as u32), span)),
            Some(copies) => {
                let buffer = &mut stage.buffers[index];
                buffer.copies = copies;
                buffer.offset = end;
                end += buffer.copy_stride() * copies;
            }
        }
    }
    let end = place_by_lifetime(stage, &in_buckets, end);
    stage.arena = Bytes(place_by_lifetime(stage, &within_pass, end));
}

/// The numbers of copies of activations, by the passes between which they live.
struct CopyCounts {
    /// The positions of the timeline at which the passes of each chunk end.
    pass_ends: Vec<usize>,
    /// For each chunk, first and last pass: the number of copies, by [`copies_between`].
    copies: Vec<[[Option<u64>; 3]; 3]>,
}

impl CopyCounts {
    fn new(stage: &StageProgram) -> CopyCounts {
        let mut end = 0;
        let pass_ends = stage.pass_phases().map(|at| {
            end += stage.instructions(at).len();
            end
        });
        let of_chunk = |chunk: usize| {
            Phase::PASSES
                .map(|first| Phase::PASSES.map(|last| copies_between(stage, chunk, [first, last])))
        };
        let copies = (0..stage.chunks.len()).map(of_chunk).collect();
        CopyCounts { pass_ends: pass_ends.collect(), copies }
    }

    fn of(&self, span: LiveRange) -> Option<u64> {
        let pass_at = |position| {
            let pass = self.pass_ends.partition_point(|end| *end <= position);
            (pass / Phase::PASSES.len(), pass % Phase::PASSES.len())
        };
        let ((chunk, first), (_, last)) = (pass_at(span.first), pass_at(span.last));
        *self.copies.get(chunk)?.get(first)?.get(last)?
    }
}

/// The number of copies of a buffer that lives from one pass of a chunk to another; `None` where these are one timeline.
fn copies_between(stage: &StageProgram, chunk: usize, [first, last]: [Phase; 2]) -> Option<u64> {
    let mut later = Phase::PASSES.into_iter().filter(|phase| first < *phase && *phase <= last);
    if later.all(|phase| stage.follows_at_once(ChunkPhase { chunk, phase })) {
        return None;
    }
    // A divisor, so that a slot decides which copies a microbatch uses.
    let slots = stage.chunks[chunk].slots;
    let divides = |count: &u64| slots.is_multiple_of(*count);
    let needed = stage.microbatches_between(chunk, first, last);
    Some((needed..slots).find(divides).unwrap_or(slots))
}

/// First and last position of the timeline, which ends with the step phase, that accesses each buffer placed by lifetime.
/// Operands of a collective are accessed until the instructions that it overlaps with have ended.
fn spans(stage: &StageProgram) -> Vec<Option<LiveRange>> {
    let mut spans: Vec<Option<LiveRange>> = vec![None; stage.buffers.len()];
    for (position, instr) in stage.all_instructions().enumerate() {
        for id in accessed_buffers(instr) {
            if !stage.buffers[id.0 as usize].role.is_resident() {
                let last = position + instr.overlapped_instrs;
                let span = spans[id.0 as usize].get_or_insert(LiveRange { first: position, last });
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
fn place_by_lifetime(stage: &mut StageProgram, list: &[(BufferId, LiveRange)], base: u64) -> u64 {
    let mut order: Vec<(BufferId, LiveRange, u64)> = list
        .iter()
        .map(|&(id, span)| (id, span, stage.buffers[id.0 as usize].copy_stride()))
        .collect();
    order.sort_by_key(|&(id, _, bytes)| (std::cmp::Reverse(bytes), id));
    let mut occupancy = Occupancy::new(list.iter().map(|(_, span)| *span));
    let mut end = base;
    for (id, span, bytes) in order {
        let offset = occupancy.place(span, bytes, base);
        stage.buffers[id.0 as usize].offset = offset;
        end = end.max(offset + bytes);
    }
    end
}
