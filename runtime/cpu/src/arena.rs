//! The memory of one device, and the operands of an instruction in it.
//!
//! An instruction reads some ranges of the arena and writes others. A written range overlaps no other
//! operand, or equals a read range: then the instruction works in place, and sees the range as a
//! written operand only. The check of programs proves this; it is checked again here, because the
//! soundness of the slices depends on it.
#![allow(unsafe_code)]

use std::ops::Range;

/// The largest number of operands that an instruction reads, and that it writes.
pub(crate) const OPERANDS_MAX: usize = 64;

/// The memory of all buffers of one device.
pub(crate) struct Arena {
    elements: Box<[f32]>,
}

/// The operands of an instruction.
pub(crate) struct ArenaOperands<'a> {
    reads: [&'a [f32]; OPERANDS_MAX],
    writes: [Option<&'a mut [f32]>; OPERANDS_MAX],
}

impl Arena {
    /// Allocates zeroed memory.
    pub fn new(bytes: u64) -> Arena {
        let count = usize::try_from(bytes / 4).unwrap_or(usize::MAX);
        Arena { elements: vec![0.0; count].into_boxed_slice() }
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.elements.len() as u64 * 4
    }

    /// A range of elements.
    pub fn slice(&self, range: Range<usize>) -> &[f32] {
        &self.elements[range]
    }

    /// A range of elements, mutable.
    pub fn slice_mut(&mut self, range: Range<usize>) -> &mut [f32] {
        &mut self.elements[range]
    }

    /// The operands of an instruction, given as ranges of elements. `None` when a written range
    /// partly overlaps another operand, a range is outside the arena, or there are more than
    /// [`OPERANDS_MAX`].
    pub fn operands(
        &mut self,
        reads: &[Range<usize>],
        writes: &[Range<usize>],
    ) -> Option<ArenaOperands<'_>> {
        let end = self.elements.len();
        let inside = |range: &Range<usize>| range.start <= range.end && range.end <= end;
        let overlap = |a: &Range<usize>, b: &Range<usize>| a.start < b.end && b.start < a.end;
        let fits = reads.len() <= OPERANDS_MAX && writes.len() <= OPERANDS_MAX;
        if !fits || !reads.iter().chain(writes).all(inside) {
            return None;
        }
        for (index, write) in writes.iter().enumerate() {
            let conflict = reads.iter().any(|read| read != write && overlap(read, write))
                || writes[..index].iter().any(|other| overlap(other, write));
            if conflict {
                return None;
            }
        }
        let base = self.elements.as_mut_ptr();
        let writes_none = [const { None }; OPERANDS_MAX];
        let mut operands = ArenaOperands { reads: [&[]; OPERANDS_MAX], writes: writes_none };
        for (read, range) in operands.reads.iter_mut().zip(reads) {
            if !writes.contains(range) {
                // SAFETY: the range is inside the allocation, and no written range overlaps it. The
                // arena is borrowed mutably for the lifetime of the slices.
                *read = unsafe {
                    std::slice::from_raw_parts(base.add(range.start), range.end - range.start)
                };
            }
        }
        for (write, range) in operands.writes.iter_mut().zip(writes) {
            // SAFETY: the range is inside the allocation. It overlaps no other written range, and a
            // read range only when both are equal, for which no slice was made above.
            *write = Some(unsafe {
                std::slice::from_raw_parts_mut(base.add(range.start), range.end - range.start)
            });
        }
        Some(operands)
    }
}

impl<'a> ArenaOperands<'a> {
    /// A read operand; empty when the instruction works on it in place.
    pub fn read(&self, index: usize) -> &'a [f32] {
        self.reads[index]
    }

    /// Takes a written operand; empty from the second call on.
    pub fn write(&mut self, index: usize) -> &'a mut [f32] {
        self.writes[index].take().unwrap_or_default()
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "operands are lists of ranges")]
mod tests {
    use super::*;

    #[test]
    fn written_ranges_that_overlap_other_operands_are_refused() {
        let mut arena = Arena::new(64);
        assert!(arena.operands(&[0..4, 2..6], &[6..8]).is_some());
        assert!(arena.operands(&[0..4], &[0..4]).is_some());
        assert!(arena.operands(&[0..4], &[3..6]).is_none());
        assert!(arena.operands(&[], &[0..4, 3..6]).is_none());
        assert!(arena.operands(&[0..17], &[]).is_none());
    }

    #[test]
    fn an_operand_in_place_is_a_written_operand_only() {
        let mut arena = Arena::new(64);
        arena.slice_mut(0..4).fill(2.0);
        let mut operands = arena.operands(&[0..4, 4..8], &[0..4]).unwrap();
        assert!(operands.read(0).is_empty());
        assert_eq!(operands.read(1), [0.0; 4]);
        assert_eq!(operands.write(0), [2.0; 4]);
    }
}
