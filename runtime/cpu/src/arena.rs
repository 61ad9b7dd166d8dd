//! The memory of one device, and the operands of an instruction in it.
//!
//! An instruction reads some ranges of the arena and writes others. A written range overlaps no other
//! operand, or equals a read range: then the instruction works in place, and sees the range as a
//! written operand only. The check of programs proves this; it is checked again here, because the
//! soundness of the slices depends on it.
//!
//! # Two threads
//! The thread of a device has the [`Arena`], whose borrows keep its own operands apart. The communication thread of the device
//! has a [`SharedArena`] of the same memory, whose operands no borrow checks. They are sound for these reasons:
//!
//! 1. The communication thread accesses nothing but the operands of collectives that were handed over to it, from then on until a
//!    wait for them returns. Meanwhile the thread of the device executes only instructions that the program allows beside
//!    them: `execute/step.rs` waits before any other, and `CpuEngine` before it reads or changes a buffer between steps.
//! 2. A [`CheckedProgram`](narrows_plan::CheckedProgram) allows an instruction beside a collective only where neither writes bytes
//!    that the other accesses (`plan/src/check/overlap.rs`, `buckets.rs` and `gathers.rs`). Slices of both threads to the same
//!    bytes are thus slices for reading.
//! 3. What the thread of the device accesses without an operand, no such collective does: tokens, which are copied before the
//!    first instruction of a pass, and the sum of squared gradients, which is read at the end of a step. Beside both there are
//!    collectives of gradients and weights alone.
//! 4. No thread has a slice of more than an operand, and the memory lives until both threads have dropped it. Other
//!    devices of the process access operands of this one only within collectives, and the engine frees no arena before
//!    it has ended all communication threads.
#![allow(unsafe_code)]

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

/// The largest number of operands that an instruction reads, and that it writes.
pub(crate) const OPERANDS_MAX: usize = 64;

/// The memory of all buffers of one device, as the thread of the device accesses it.
pub(crate) struct Arena {
    memory: Arc<ArenaMemory>,
}

/// The memory of a device, as its communication thread accesses it.
pub(crate) struct SharedArena {
    memory: Arc<ArenaMemory>,
}

/// Owned memory without references to all of it.
struct ArenaMemory {
    base: NonNull<f32>,
    len: usize,
}

// SAFETY: the memory is owned, and accessed through `Arena` and `SharedArena` alone.
unsafe impl Send for ArenaMemory {}

// SAFETY: as above; two threads access different elements, or read them: see "Two threads".
unsafe impl Sync for ArenaMemory {}

/// The operands of an instruction.
pub(crate) struct ArenaOperands<'a> {
    reads: [&'a [f32]; OPERANDS_MAX],
    writes: [Option<&'a mut [f32]>; OPERANDS_MAX],
}

impl Arena {
    /// Allocates zeroed memory.
    pub fn new(bytes: u64) -> Arena {
        let count = usize::try_from(bytes / 4).unwrap_or(usize::MAX);
        let elements = Box::leak(vec![0.0; count].into_boxed_slice());
        let (base, len) = (NonNull::from(&mut *elements).cast(), elements.len());
        Arena { memory: Arc::new(ArenaMemory { base, len }) }
    }

    /// The same memory for the communication thread.
    pub fn share(&self) -> SharedArena {
        SharedArena { memory: self.memory.clone() }
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.memory.len as u64 * 4
    }

    /// A range of elements.
    pub fn slice(&self, range: Range<usize>) -> &[f32] {
        let (base, len) = self.memory.checked(&range);
        // SAFETY: the range is inside the memory, which this borrow of the arena keeps from being written.
        unsafe { std::slice::from_raw_parts(base, len) }
    }

    /// A range of elements, mutable.
    pub fn slice_mut(&mut self, range: Range<usize>) -> &mut [f32] {
        let (base, len) = self.memory.checked(&range);
        // SAFETY: the range is inside the memory, which this borrow of the arena keeps from being accessed otherwise.
        unsafe { std::slice::from_raw_parts_mut(base, len) }
    }

    /// The operands of an instruction, given as ranges of elements. `None` when a written range
    /// partly overlaps another operand, a range is outside the arena, or there are more than
    /// [`OPERANDS_MAX`].
    pub fn operands(
        &mut self,
        reads: &[Range<usize>],
        writes: &[Range<usize>],
    ) -> Option<ArenaOperands<'_>> {
        // SAFETY: the arena is borrowed mutably for the lifetime of the slices.
        unsafe { self.memory.operands(reads, writes) }
    }
}

impl SharedArena {
    /// As [`Arena::operands`].
    ///
    /// # Safety
    /// While the operands are in use, no other thread writes their elements, or accesses those that are written.
    pub unsafe fn operands(
        &mut self,
        reads: &[Range<usize>],
        writes: &[Range<usize>],
    ) -> Option<ArenaOperands<'_>> {
        // SAFETY: the caller keeps other threads away, and the borrow this thread.
        unsafe { self.memory.operands(reads, writes) }
    }
}

impl ArenaMemory {
    /// Address and length of a range.
    ///
    /// # Panics
    /// A range that is not inside the memory.
    fn checked(&self, range: &Range<usize>) -> (*mut f32, usize) {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        // SAFETY: the range is inside the allocation.
        let base = unsafe { self.base.as_ptr().add(range.start) };
        (base, range.end - range.start)
    }

    /// The operands of an instruction, if they are valid.
    ///
    /// # Safety
    /// During `'a` nothing else writes their elements, or accesses those that are written.
    unsafe fn operands<'a>(
        &self,
        reads: &[Range<usize>],
        writes: &[Range<usize>],
    ) -> Option<ArenaOperands<'a>> {
        let inside = |range: &Range<usize>| range.start <= range.end && range.end <= self.len;
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
        let writes_none = [const { None }; OPERANDS_MAX];
        let mut operands = ArenaOperands { reads: [&[]; OPERANDS_MAX], writes: writes_none };
        for (read, range) in operands.reads.iter_mut().zip(reads) {
            if !writes.contains(range) {
                let (base, len) = self.checked(range);
                // SAFETY: the range is inside the allocation, and no written range overlaps it. Nothing else writes it, as the
                // caller guarantees.
                *read = unsafe { std::slice::from_raw_parts(base, len) };
            }
        }
        for (write, range) in operands.writes.iter_mut().zip(writes) {
            let (base, len) = self.checked(range);
            // SAFETY: the range is inside the allocation. It overlaps no other written range, and a read range only when
            // both are equal, for which no slice was made above. Nothing else accesses it, as the caller guarantees.
            *write = Some(unsafe { std::slice::from_raw_parts_mut(base, len) });
        }
        Some(operands)
    }
}

impl Drop for ArenaMemory {
    fn drop(&mut self) {
        let elements = NonNull::slice_from_raw_parts(self.base, self.len);
        // SAFETY: the memory was a box of this many elements, and no slice of it is left.
        drop(unsafe { Box::from_raw(elements.as_ptr()) });
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
