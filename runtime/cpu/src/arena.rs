//! The memory of one device, and an instruction's view of it.
//!
//! An instruction reads some ranges of the arena and writes others. What it writes overlaps nothing
//! else it touches, or is exactly what it reads: then it works in place, and sees the range on the
//! written side alone. The check proves this of every program; it is looked at again here, because
//! the two kinds of slices that are handed out rest on it.
#![allow(unsafe_code)]

use std::ops::Range;

/// The most operands an instruction has on one side.
pub const OPERANDS_MAX: usize = 16;

/// The arena of one device: as many numbers as the program says, and nothing else is allocated for
/// its buffers.
pub struct Arena {
    numbers: Box<[f32]>,
}

/// What an instruction sees of the arena.
pub struct ArenaOperands<'a> {
    reads: [&'a [f32]; OPERANDS_MAX],
    writes: [Option<&'a mut [f32]>; OPERANDS_MAX],
}

impl Arena {
    /// Zeroed memory of so many bytes.
    pub fn new(bytes: u64) -> Arena {
        let numbers = usize::try_from(bytes / 4).unwrap_or(usize::MAX);
        Arena { numbers: vec![0.0; numbers].into_boxed_slice() }
    }

    /// Bytes of it.
    pub fn bytes(&self) -> u64 {
        self.numbers.len() as u64 * 4
    }

    /// Some of it.
    pub fn slice(&self, range: Range<usize>) -> &[f32] {
        &self.numbers[range]
    }

    /// Some of it, to write.
    pub fn slice_mut(&mut self, range: Range<usize>) -> &mut [f32] {
        &mut self.numbers[range]
    }

    /// The operands of an instruction, in numbers from the beginning. `None` when a written range
    /// overlaps another operand in part, lies outside, or there are too many.
    pub fn operands(
        &mut self,
        reads: &[Range<usize>],
        writes: &[Range<usize>],
    ) -> Option<ArenaOperands<'_>> {
        let end = self.numbers.len();
        let inside = |range: &Range<usize>| range.start <= range.end && range.end <= end;
        let overlap = |a: &Range<usize>, b: &Range<usize>| a.start < b.end && b.start < a.end;
        let few = reads.len() <= OPERANDS_MAX && writes.len() <= OPERANDS_MAX;
        if !few || !reads.iter().chain(writes).all(inside) {
            return None;
        }
        for (at, write) in writes.iter().enumerate() {
            let clash = reads.iter().any(|read| read != write && overlap(read, write))
                || writes[..at].iter().any(|other| overlap(other, write));
            if clash {
                return None;
            }
        }
        let base = self.numbers.as_mut_ptr();
        let mut made = ArenaOperands { reads: [&[]; OPERANDS_MAX], writes: Default::default() };
        for (slot, range) in made.reads.iter_mut().zip(reads) {
            if !writes.contains(range) {
                // SAFETY: inside the allocation, and no written range overlaps it. The arena is
                // borrowed mutably for as long as the slices live.
                *slot = unsafe {
                    std::slice::from_raw_parts(base.add(range.start), range.end - range.start)
                };
            }
        }
        for (slot, range) in made.writes.iter_mut().zip(writes) {
            // SAFETY: inside the allocation; it overlaps no other written range, and a read range
            // only when both are equal, which was left out above.
            *slot = Some(unsafe {
                std::slice::from_raw_parts_mut(base.add(range.start), range.end - range.start)
            });
        }
        Some(made)
    }
}

impl<'a> ArenaOperands<'a> {
    /// A read operand; empty when it is worked on in place.
    pub fn read(&self, port: usize) -> &'a [f32] {
        self.reads[port]
    }

    /// A written operand, once.
    pub fn write(&mut self, port: usize) -> &'a mut [f32] {
        self.writes[port].take().unwrap_or_default()
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "operands are lists of ranges")]
mod tests {
    use super::*;

    #[test]
    fn overlapping_operands_are_not_handed_out() {
        let mut arena = Arena::new(64);
        assert!(arena.operands(&[0..4, 2..6], &[6..8]).is_some());
        assert!(arena.operands(&[0..4], &[0..4]).is_some());
        assert!(arena.operands(&[0..4], &[3..6]).is_none());
        assert!(arena.operands(&[], &[0..4, 3..6]).is_none());
        assert!(arena.operands(&[0..17], &[]).is_none());
    }

    #[test]
    fn in_place_is_seen_once() {
        let mut arena = Arena::new(64);
        arena.slice_mut(0..4).fill(2.0);
        let mut operands = arena.operands(&[0..4, 4..8], &[0..4]).unwrap();
        assert!(operands.read(0).is_empty());
        assert_eq!(operands.read(1), [0.0; 4]);
        assert_eq!(operands.write(0), [2.0; 4]);
    }
}
