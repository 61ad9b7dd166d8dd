//! Placement of buffers in the arena.
//!
//! Resident buffers come first, one after the other. Activations are placed by lifetime, largest
//! first, each at the lowest offset where it overlaps no buffer that is alive at the same time. Passes of one microbatch
//! that follow each other at once are one timeline. A buffer that lives from a pass to a later one, with other passes
//! between them, has copies, one for each microbatch that needs it at once, rounded up to a divisor of the slots of its
//! chunk. All other buffers are placed by lifetime, in one area that all passes of all chunks and the step phase share.
//! Buffers of gradient buckets have an area of their own, because the buckets overlap with the last pass; they are reduced
//! one after the other.

mod occupancy;

use rustc_hash::FxHashMap;

use super::{BufferId, ChunkPhase, Instr, MicrobatchPass, Phase, StageProgram};
use crate::Bytes;
use occupancy::{LiveRange, Occupancy};

/// Assigns the slots of every chunk, the offset and the number of copies of every buffer, and the arena size of the stage.
pub(crate) fn place_buffers(stage: &mut StageProgram) {
    let spans = spans(stage);
    let copies = CopyCounts::new(stage);
    assign_slots(stage, &spans, &copies);
    let mut end = 0;
    for buffer in stage.buffers.iter_mut().filter(|b| b.role.is_resident()) {
        buffer.offset = end;
        end += buffer.copy_stride();
    }
    let step = copies.pass_ends.last().copied().unwrap_or(0);
    let buckets = step..step + stage.bucket_reductions();
    let (mut within_pass, mut in_buckets) = (vec![], vec![]);
    for (index, span) in spans.into_iter().enumerate() {
        let Some(span) = span else { continue };
        match copies.of(stage, span) {
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

/// Assigns to every chunk the number of slots, from the microbatches in flight up to twice as many, with which copies take the fewest
/// bytes: of a buffer that 5 of 8 microbatches in flight need at once, 8 slots have 8 copies, and 10 have 5.
fn assign_slots(stage: &mut StageProgram, spans: &[Option<LiveRange>], copies: &CopyCounts) {
    let bytes = CopiedBytes::new(stage, spans, copies);
    for chunk in 0..stage.chunks.len() {
        let in_flight = stage.microbatches_in_flight(chunk);
        let is_forward =
            |pass: &&MicrobatchPass| (pass.chunk, pass.phase) == (chunk, Phase::Forward);
        let microbatches = stage.schedule.iter().filter(is_forward).count() as u64;
        let most = (2 * in_flight).min(microbatches);
        let fewest = (in_flight..=most).min_by_key(|slots| bytes.of_chunk(chunk, *slots));
        stage.chunks[chunk].slots = fewest.unwrap_or(in_flight);
    }
}

/// Bytes of one copy of all activations of each chunk that have copies, with the microbatches that need them at once.
struct CopiedBytes(Vec<FxHashMap<u64, u64>>);

impl CopiedBytes {
    fn new(stage: &StageProgram, spans: &[Option<LiveRange>], copies: &CopyCounts) -> CopiedBytes {
        let mut of_chunks = vec![FxHashMap::default(); stage.chunks.len()];
        for (buffer, span) in stage.buffers.iter().zip(spans) {
            let Some((chunk, needed)) = span.and_then(|span| copies.needed(span)) else { continue };
            *of_chunks[chunk].entry(needed).or_default() += buffer.copy_stride();
        }
        CopiedBytes(of_chunks)
    }

    /// Bytes of all copies of a chunk with this many slots.
    fn of_chunk(&self, chunk: usize, slots: u64) -> u64 {
        self.0[chunk].iter().map(|(needed, bytes)| bytes * copies_in_slots(*needed, slots)).sum()
    }
}

/// The least number of copies from `needed` on that divides the slots, so that a slot decides which copies a microbatch uses.
fn copies_in_slots(needed: u64, slots: u64) -> u64 {
    (needed..slots).find(|count| slots.is_multiple_of(*count)).unwrap_or(slots)
}

/// The microbatches that need activations at once, by the passes between which these live.
struct CopyCounts {
    /// The positions of the timeline at which the passes of each chunk end.
    pass_ends: Vec<usize>,
    /// For each chunk, first and last pass: the number of microbatches, by [`needed_between`].
    needed: Vec<[[Option<u64>; 3]; 3]>,
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
                .map(|first| Phase::PASSES.map(|last| needed_between(stage, chunk, [first, last])))
        };
        let needed = (0..stage.chunks.len()).map(of_chunk).collect();
        CopyCounts { pass_ends: pass_ends.collect(), needed }
    }

    /// The number of copies of a buffer; `None` without copies.
    fn of(&self, stage: &StageProgram, span: LiveRange) -> Option<u64> {
        let (chunk, needed) = self.needed(span)?;
        Some(copies_in_slots(needed, stage.chunks[chunk].slots))
    }

    /// The chunk of a buffer with copies, and the number of microbatches that need them at once; `None` without copies.
    fn needed(&self, span: LiveRange) -> Option<(usize, u64)> {
        let pass_at = |position| {
            let pass = self.pass_ends.partition_point(|end| *end <= position);
            (pass / Phase::PASSES.len(), pass % Phase::PASSES.len())
        };
        let ((chunk, first), (_, last)) = (pass_at(span.first), pass_at(span.last));
        let needed = *self.needed.get(chunk)?.get(first)?.get(last)?;
        Some((chunk, needed?))
    }
}

/// The number of microbatches that need a buffer at once that lives from one pass of a chunk to another; `None` where these are one
/// timeline.
fn needed_between(stage: &StageProgram, chunk: usize, [first, last]: [Phase; 2]) -> Option<u64> {
    let mut later = Phase::PASSES.into_iter().filter(|phase| first < *phase && *phase <= last);
    if later.all(|phase| stage.follows_at_once(ChunkPhase { chunk, phase })) {
        return None;
    }
    Some(stage.microbatches_between(chunk, first, last))
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

#[cfg(test)]
mod tests {
    use crate::program::{
        Access, Action, Buffer, BufferRole, Extent, FusedOp, ModelChunk, StageSchedule,
    };
    use crate::{DType, PipelineSchedule};

    use super::*;

    /// The third of eight stages, whose microbatches in flight are 6 from forward to backward pass, 8 to the weight gradient, and
    /// 3 from the backward pass on. One buffer for each of these, of so many rows of 256 bytes.
    fn placed(rows: [u64; 3], microbatches: u64) -> StageProgram {
        let schedule = StageSchedule {
            schedule: PipelineSchedule::ZeroBubble,
            stage: 2,
            stages: 8,
            chunks: 1,
            microbatches,
        };
        let buffer = |rows: u64| Buffer {
            name: rows.to_string(),
            extent: Extent { rows, columns: 64, dtype: DType::F32 },
            role: BufferRole::Activation,
            offset: 0,
            copies: 1,
            shard: None,
            sections: vec![],
        };
        let buffers: Vec<Buffer> = rows.map(buffer).into();
        let access = |buffer: u32| Access { buffer: BufferId(buffer), extent: buffers[0].extent };
        let instr = |reads: &[u32], writes: &[u32]| Instr {
            action: Action::Fused(FusedOp::Fill),
            reads: reads.iter().copied().map(access).collect(),
            writes: writes.iter().copied().map(access).collect(),
            origin: "test".into(),
            overlapped_instrs: 0,
        };
        let chunk = ModelChunk {
            forward: vec![instr(&[], &[0, 1])],
            backward: vec![instr(&[0], &[2])],
            weight_gradient: vec![instr(&[1, 2], &[])],
            ..ModelChunk::empty()
        };
        let mut stage = StageProgram {
            chunks: vec![chunk],
            step: vec![],
            gradient_buckets: vec![],
            gather_buckets: vec![],
            exact_step: Default::default(),
            schedule: schedule.passes(true),
            arena: Bytes(0),
            buffers,
        };
        place_buffers(&mut stage);
        stage
    }

    #[test]
    fn slots_are_those_whose_copies_take_the_fewest_bytes() {
        let of = |rows, microbatches| {
            let stage = placed(rows, microbatches);
            let copies = [0, 1, 2].map(|buffer| stage.buffers[buffer].copies);
            assert_eq!(
                stage.arena.0,
                (0..3).map(|at| 256 * rows[at] * copies[at]).sum::<u64>(),
                "{copies:?}"
            );
            (stage.chunks[0].slots, copies)
        };
        // Mostly kept for the backward pass: 12 slots have the 6 copies that are needed, and 8 would have 8.
        assert_eq!(of([50, 1, 1], 24), (12, [6, 12, 3]));
        // Mostly kept for the weight gradient.
        assert_eq!(of([1, 50, 1], 24), (8, [8, 8, 4]));
        // 9 slots have 3 copies of the last, which counts most.
        assert_eq!(of([1, 1, 50], 24), (9, [9, 9, 3]));
        // No more slots than microbatches.
        assert_eq!(of([50, 1, 1], 8), (8, [8, 8, 4]));
    }
}
