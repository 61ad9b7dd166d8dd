//! Collectives in shared memory. The devices of a group publish where their operands are, and each
//! computes its own result from all of them. Reductions combine operands in the order of the members,
//! so that results are equal bit for bit in every run, and no device moves an element that another
//! could.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use narrows_plan::program::{CollectiveFunction, Reduction};
use narrows_runtime::process_group::{
    ClusterError, CollectiveOperands, CollectiveVolume, Communicator,
};

use crate::abort::Event;
use crate::barrier::Barrier;

/// Addresses of the operands of a member.
#[derive(Clone, Copy)]
struct PublishedOperands {
    source: *const f32,
    target: *mut f32,
    /// Elements of the longer of both: the collective works on this many.
    len: usize,
}

impl PublishedOperands {
    fn new(operands: CollectiveOperands) -> PublishedOperands {
        let (source, target, len) = match operands {
            CollectiveOperands::InPlace(operand) => {
                let (target, len) = (operand.as_mut_ptr(), operand.len());
                (target.cast_const(), target, len)
            }
            CollectiveOperands::OutOfPlace { source, target } => {
                (source.as_ptr(), target.as_mut_ptr(), source.len().max(target.len()))
            }
        };
        PublishedOperands { source, target, len }
    }
}

// SAFETY: the pointers are dereferenced only between two barriers, while every member is within its
// own call and accesses no element of its operands that another member may access.
unsafe impl Send for PublishedOperands {}

/// The members of one device group of this process.
pub(crate) struct SharedMemoryGroup {
    barrier: Barrier,
    /// Indexed by rank.
    operands: Vec<Mutex<PublishedOperands>>,
}

/// A [`SharedMemoryGroup`] as one of its members uses it.
pub(crate) struct SharedMemoryCommunicator {
    pub group: Arc<SharedMemoryGroup>,
    pub rank: usize,
}

impl Communicator for SharedMemoryCommunicator {
    fn size(&self) -> usize {
        self.group.size()
    }

    fn run(
        &self,
        operands: CollectiveOperands,
        function: CollectiveFunction,
    ) -> Result<CollectiveVolume, ClusterError> {
        let in_place = matches!(operands, CollectiveOperands::InPlace(_));
        let operands = PublishedOperands::new(operands);
        let (group, rank) = (&*self.group, self.rank);
        *group.operands[rank].lock().unwrap_or_else(PoisonError::into_inner) = operands;
        group.barrier.wait()?;
        let size = group.size();
        let len = operands.len;
        assert!((0..size).all(|member| group.operands(member).len == len), "operand sizes differ");
        // Shards of an all-reduce can differ by one element; those of other collectives are equal.
        let shard = |member: usize| len * member / size..len * (member + 1) / size;
        // SAFETY: all members published operands of the same length. Before the next barrier, member
        // i writes shard i of its own buffer and reads shard i only of the others' buffers (in
        // place), or no member reads a buffer that is written.
        let volume = unsafe {
            match function {
                CollectiveFunction::AllReduce(reduction) => {
                    let target = operands.target.add(shard(rank).start);
                    let read = group.reduce(shard(rank), target, reduction);
                    group.barrier.wait()?;
                    let source = |member| {
                        group.operands(member).target.add(shard(member).start).cast_const()
                    };
                    let gathered = group.gather(rank, shard, source);
                    let own = shard(rank).len();
                    CollectiveVolume { whole: own + gathered, received: read - own + gathered }
                }
                CollectiveFunction::ReduceScatter => {
                    let offset = if in_place { shard(rank).start } else { 0 };
                    let target = operands.target.add(offset);
                    let read = group.reduce(shard(rank), target, Reduction::Sum);
                    CollectiveVolume { whole: read, received: read - shard(rank).len() }
                }
                CollectiveFunction::AllGather => {
                    if !in_place {
                        let target = operands.target.add(shard(rank).start);
                        std::ptr::copy(operands.source, target, shard(rank).len());
                    }
                    let offset = |member| if in_place { shard(member).start } else { 0 };
                    let source = |member| group.operands(member).source.add(offset(member));
                    let gathered = group.gather(rank, shard, source);
                    CollectiveVolume { whole: shard(rank).len() + gathered, received: gathered }
                }
                CollectiveFunction::AllToAll => {
                    let mut read = 0;
                    for member in 0..size {
                        let source = group.operands(member).source.add(shard(rank).start);
                        let target = operands.target.add(shard(member).start);
                        std::ptr::copy(source, target, shard(member).len());
                        read += shard(member).len();
                    }
                    // Every member reads this many elements, one of `size` parts of the whole.
                    CollectiveVolume { whole: read * size, received: read - shard(rank).len() }
                }
            }
        };
        group.barrier.wait()?;
        Ok(volume)
    }

    fn shift(&self, source: &[f32], target: &mut [f32]) -> Result<(), ClusterError> {
        assert_eq!(source.len(), target.len(), "operand sizes differ");
        let (group, rank) = (&*self.group, self.rank);
        let operands = PublishedOperands::new(CollectiveOperands::OutOfPlace { source, target });
        *group.operands[rank].lock().unwrap_or_else(PoisonError::into_inner) = operands;
        group.barrier.wait()?;
        let previous = group.operands((rank + group.size() - 1) % group.size());
        assert_eq!(previous.len, operands.len, "operand sizes differ");
        // SAFETY: all members published operands of the same length. Before the next barrier, members read sources and
        // write their own targets only, which no member reads.
        unsafe { std::ptr::copy(previous.source, operands.target, operands.len) };
        group.barrier.wait()?;
        Ok(())
    }
}

impl SharedMemoryGroup {
    /// A group of `size` members, which wait for each other with the event.
    pub fn new(size: usize, passed: Event) -> SharedMemoryGroup {
        let none =
            PublishedOperands { source: std::ptr::null(), target: std::ptr::null_mut(), len: 0 };
        let operands = (0..size).map(|_| Mutex::new(none)).collect();
        SharedMemoryGroup { barrier: Barrier::new(size, passed), operands }
    }

    fn size(&self) -> usize {
        self.operands.len()
    }

    fn operands(&self, member: usize) -> PublishedOperands {
        *self.operands[member].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reduces `range` of all members' sources to `target`, in the order of the members. Returns the
    /// number of elements read.
    ///
    /// # Safety
    /// `range` is inside every source, `target` has room for it, and no other member accesses either
    /// except to read the sources. `target` can be that range of the member's own source.
    unsafe fn reduce(&self, range: Range<usize>, target: *mut f32, reduction: Reduction) -> usize {
        /// Elements that fit on the stack and in the first-level cache.
        const TILE: usize = 1024;
        let mut tile = [0.0_f32; TILE];
        let mut read = 0;
        for first in range.clone().step_by(TILE) {
            let count = TILE.min(range.end - first);
            for member in 0..self.size() {
                // SAFETY: the range is inside every source, as the caller guarantees.
                let source = unsafe {
                    std::slice::from_raw_parts(self.operands(member).source.add(first), count)
                };
                read += source.len();
                let tile = &mut tile[..count];
                match (member, reduction) {
                    (0, _) => tile.copy_from_slice(source),
                    (_, Reduction::Sum) => {
                        tile.iter_mut().zip(source).for_each(|(sum, x)| *sum += x);
                    }
                    (_, Reduction::Maximum) => {
                        tile.iter_mut().zip(source).for_each(|(max, x)| *max = max.max(*x));
                    }
                }
            }
            // SAFETY: the target has room for the range, as the caller guarantees.
            unsafe {
                std::ptr::copy(tile.as_ptr(), target.add(first - range.start), count);
            }
        }
        read
    }

    /// Copies the shards of all other members to the target of `rank`. Returns their number of
    /// elements.
    ///
    /// # Safety
    /// `source(i)` has as many elements as shard i, and no member writes them meanwhile.
    unsafe fn gather(
        &self,
        rank: usize,
        shard: impl Fn(usize) -> Range<usize>,
        source: impl Fn(usize) -> *const f32,
    ) -> usize {
        let target = self.operands(rank).target;
        let mut copied = 0;
        for member in (0..self.size()).filter(|member| *member != rank) {
            let shard = shard(member);
            // SAFETY: the source has the elements of the shard, as the caller guarantees.
            unsafe {
                std::ptr::copy(source(member), target.add(shard.start), shard.len());
            }
            copied += shard.len();
        }
        copied
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abort::AbortFlag;

    const SUM: CollectiveFunction = CollectiveFunction::AllReduce(Reduction::Sum);
    const MAXIMUM: CollectiveFunction = CollectiveFunction::AllReduce(Reduction::Maximum);
    const REDUCE_SCATTER: CollectiveFunction = CollectiveFunction::ReduceScatter;
    const ALL_GATHER: CollectiveFunction = CollectiveFunction::AllGather;
    const ALL_TO_ALL: CollectiveFunction = CollectiveFunction::AllToAll;

    fn group(size: usize) -> Arc<SharedMemoryGroup> {
        Arc::new(SharedMemoryGroup::new(size, Arc::<AbortFlag>::default().event()))
    }

    /// Target and volume of every member; `len` is the length of an out-of-place target.
    fn run_with_volumes(
        inputs: &[Vec<f32>],
        len: usize,
        function: CollectiveFunction,
        in_place: bool,
    ) -> Vec<(Vec<f32>, CollectiveVolume)> {
        let group = group(inputs.len());
        std::thread::scope(|scope| {
            let threads: Vec<_> = inputs
                .iter()
                .enumerate()
                .map(|(rank, input)| {
                    let communicator = SharedMemoryCommunicator { group: group.clone(), rank };
                    scope.spawn(move || {
                        let mut target = if in_place { input.clone() } else { vec![0.0; len] };
                        let mut volume = CollectiveVolume::default();
                        for _ in 0..if in_place { 1 } else { 50 } {
                            let operands = if in_place {
                                CollectiveOperands::InPlace(&mut target)
                            } else {
                                CollectiveOperands::OutOfPlace {
                                    source: input,
                                    target: &mut target,
                                }
                            };
                            volume = communicator.run(operands, function).unwrap();
                        }
                        (target, volume)
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn run(
        inputs: &[Vec<f32>],
        len: usize,
        function: CollectiveFunction,
        in_place: bool,
    ) -> Vec<Vec<f32>> {
        let results = run_with_volumes(inputs, len, function, in_place);
        results.into_iter().map(|(target, _)| target).collect()
    }

    #[test]
    fn all_reduce_gives_every_member_the_sum_or_the_maximum() {
        let inputs = [vec![1.0, 2.0, 3.0, 4.0, 5.0], vec![10.0, 0.0, -1.0, 1.0, 1.0]];
        assert_eq!(run(&inputs, 5, SUM, true), [[11.0, 2.0, 2.0, 5.0, 6.0]; 2]);
        assert_eq!(run(&inputs, 5, MAXIMUM, true), [[10.0, 2.0, 3.0, 4.0, 5.0]; 2]);
    }

    #[test]
    fn shards_are_scattered_gathered_and_exchanged() {
        let inputs = [vec![1.0, 2.0, 3.0, 4.0], vec![10.0, 20.0, 30.0, 40.0]];
        assert_eq!(run(&inputs, 2, REDUCE_SCATTER, false), [[11.0, 22.0], [33.0, 44.0]]);
        let in_place = run(&inputs, 4, REDUCE_SCATTER, true);
        assert_eq!(in_place[0][..2], [11.0, 22.0]);
        assert_eq!(in_place[1][2..], [33.0, 44.0]);
        let shards = [vec![1.0, 2.0], vec![10.0, 20.0]];
        assert_eq!(run(&shards, 4, ALL_GATHER, false), [[1.0, 2.0, 10.0, 20.0]; 2]);
        assert_eq!(run(&inputs, 4, ALL_GATHER, true), [[1.0, 2.0, 30.0, 40.0]; 2]);
        let exchanged = run(&inputs, 4, ALL_TO_ALL, false);
        assert_eq!(exchanged, [[1.0, 2.0, 10.0, 20.0], [3.0, 4.0, 30.0, 40.0]]);
    }

    #[test]
    fn shifts_move_operands_to_the_next_member() {
        for size in [1, 2, 3] {
            let group = group(size);
            std::thread::scope(|scope| {
                for rank in 0..size {
                    let communicator = SharedMemoryCommunicator { group: group.clone(), rank };
                    scope.spawn(move || {
                        let (mut part, mut arriving) = ([rank as f32; 3], [f32::NAN; 3]);
                        for step in 1..=2 * size {
                            communicator.shift(&part, &mut arriving).unwrap();
                            std::mem::swap(&mut part, &mut arriving);
                            assert_eq!(part, [((rank + 2 * size - step) % size) as f32; 3]);
                        }
                    });
                }
            });
        }
    }

    #[test]
    fn volumes_are_those_of_a_ring_algorithm() {
        let inputs = vec![vec![1.0; 12]; 4];
        let volume = |inputs: &[Vec<f32>], len, function, in_place| {
            let results = run_with_volumes(inputs, len, function, in_place);
            let (_, first) = results[0];
            assert!(results.iter().all(|(_, volume)| *volume == first), "{results:?}");
            (first.whole, first.received)
        };
        assert_eq!(volume(&inputs, 12, SUM, true), (12, 2 * 9));
        assert_eq!(volume(&inputs, 3, REDUCE_SCATTER, false), (12, 9));
        assert_eq!(volume(&inputs, 12, REDUCE_SCATTER, true), (12, 9));
        assert_eq!(volume(&inputs, 48, ALL_GATHER, false), (48, 36));
        assert_eq!(volume(&inputs, 12, ALL_GATHER, true), (12, 9));
        assert_eq!(volume(&inputs, 12, ALL_TO_ALL, false), (48, 9));
        // With shards of unequal size the members receive different numbers of elements.
        let uneven = run_with_volumes(&vec![vec![1.0; 5]; 4], 5, SUM, true);
        assert!(uneven.iter().all(|(_, volume)| volume.whole == 5));
        assert_eq!(uneven.iter().map(|(_, volume)| volume.received).sum::<usize>(), 2 * 3 * 5);
    }
}
