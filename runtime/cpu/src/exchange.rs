//! Collectives in memory: the devices of a group post where their operands are, and each makes its
//! own result from all of them, in the order of the members. So sums are the same every time, and
//! no device moves what another could.
#![allow(unsafe_code)]

use std::sync::Mutex;

use narrows_plan::kernel::CollectiveKind;
use narrows_plan::program::Reduction;
use narrows_runtime::process_group::CollectiveVolume;

use super::barrier::{Abort, Aborted, Barrier};

/// Where a member's operand is.
#[derive(Clone, Copy)]
struct PostedOperand {
    source: *const f32,
    target: *mut f32,
    len: usize,
}

// SAFETY: the pointers are followed only between two meetings at the barrier, while every member
// waits within its own call and touches nothing of its operands that others may touch.
unsafe impl Send for PostedOperand {}

/// The devices of one group.
pub struct SharedMemoryGroup {
    barrier: Barrier,
    posts: Vec<Mutex<PostedOperand>>,
}

/// Which collective, and how its contributions are combined.
type ReduceKind = (CollectiveKind, Reduction);

impl SharedMemoryGroup {
    /// Of so many members.
    pub fn new(members: usize) -> SharedMemoryGroup {
        let none = PostedOperand { source: std::ptr::null(), target: std::ptr::null_mut(), len: 0 };
        let posts = (0..members).map(|_| Mutex::new(none)).collect();
        SharedMemoryGroup { barrier: Barrier::new(members), posts }
    }

    /// How many members.
    pub fn members(&self) -> usize {
        self.posts.len()
    }

    /// A collective of a whole buffer in place.
    ///
    /// # Errors
    /// When another device failed.
    pub fn in_place(
        &self,
        me: usize,
        operand: &mut [f32],
        kind: ReduceKind,
        abort: &Abort,
    ) -> Result<CollectiveVolume, Aborted> {
        let (target, len) = (operand.as_mut_ptr(), operand.len());
        self.post(me, PostedOperand { source: target, target, len });
        self.meet(me, kind, true, abort)
    }

    /// A collective from one buffer to another.
    ///
    /// # Errors
    /// When another device failed.
    pub fn between(
        &self,
        me: usize,
        source: &[f32],
        target: &mut [f32],
        kind: ReduceKind,
        abort: &Abort,
    ) -> Result<CollectiveVolume, Aborted> {
        let len = source.len().max(target.len());
        self.post(me, PostedOperand { source: source.as_ptr(), target: target.as_mut_ptr(), len });
        self.meet(me, kind, false, abort)
    }

    fn post(&self, me: usize, post: PostedOperand) {
        *self.posts[me].lock().unwrap_or_else(std::sync::PoisonError::into_inner) = post;
    }

    fn posted(&self, member: usize) -> PostedOperand {
        *self.posts[member].lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn meet(
        &self,
        me: usize,
        kind: ReduceKind,
        in_place: bool,
        abort: &Abort,
    ) -> Result<CollectiveVolume, Aborted> {
        self.barrier.wait(abort)?;
        let mine = self.posted(me);
        let members = self.members();
        // Parts of an all-reduce may differ by one number; those of other kinds are equal.
        let part = |at: usize| mine.len * at / members..mine.len * (at + 1) / members;
        assert!((0..members).all(|at| self.posted(at).len == mine.len), "members differ in size");
        // SAFETY: every member posted as many numbers. Before the next meeting, member i writes
        // part i of its own buffer, and reads of others' buffers part i only (in place), or the
        // buffers written are read by nobody.
        let moved = unsafe {
            match kind {
                (CollectiveKind::AllReduce, reduction) => {
                    let read = self.reduce(part(me), mine.target.add(part(me).start), reduction);
                    self.barrier.wait(abort)?;
                    let gathered =
                        self.gather(me, part, |at| self.posted(at).target.add(part(at).start));
                    let own = part(me).len();
                    CollectiveVolume { whole: own + gathered, received: read - own + gathered }
                }
                (CollectiveKind::ReduceScatter, _) => {
                    let offset = if in_place { part(me).start } else { 0 };
                    let read = self.reduce(part(me), mine.target.add(offset), Reduction::Sum);
                    CollectiveVolume { whole: read, received: read - part(me).len() }
                }
                (CollectiveKind::AllGather, _) => {
                    let offset = |at: usize| if in_place { part(at).start } else { 0 };
                    if !in_place {
                        let count = part(me).len();
                        std::ptr::copy(mine.source, mine.target.add(part(me).start), count);
                    }
                    let gathered =
                        self.gather(me, part, |at| self.posted(at).source.add(offset(at)));
                    CollectiveVolume { whole: part(me).len() + gathered, received: gathered }
                }
                (CollectiveKind::AllToAll, _) => {
                    let mut read = 0;
                    for at in 0..members {
                        let from = self.posted(at).source.add(part(me).start);
                        std::ptr::copy(from, mine.target.add(part(at).start), part(at).len());
                        read += part(at).len();
                    }
                    // Every member has read as much: a part of the whole.
                    CollectiveVolume { whole: read * members, received: read - part(me).len() }
                }
            }
        };
        self.barrier.wait(abort)?;
        Ok(moved)
    }

    /// Combines a part of all members' operands into `target`, in the order of the members. Returns
    /// how many numbers were read.
    ///
    /// # Safety
    /// `range` lies in every source, `target` has room for it, and nobody else touches either,
    /// except to read the sources; `target` may be that part of one's own source.
    unsafe fn reduce(
        &self,
        range: std::ops::Range<usize>,
        target: *mut f32,
        reduction: Reduction,
    ) -> usize {
        /// Numbers at a time: few enough for the stack and the nearest cache.
        const TILE: usize = 1024;
        let mut tile = [0.0_f32; TILE];
        let mut read = 0;
        for first in range.clone().step_by(TILE) {
            let count = TILE.min(range.end - first);
            for member in 0..self.members() {
                // SAFETY: as the caller promises.
                let other = unsafe {
                    std::slice::from_raw_parts(self.posted(member).source.add(first), count)
                };
                read += other.len();
                match (member, reduction) {
                    (0, _) => tile[..count].copy_from_slice(other),
                    (_, Reduction::Sum) => {
                        tile[..count].iter_mut().zip(other).for_each(|(sum, x)| *sum += x);
                    }
                    (_, Reduction::Maximum) => {
                        tile[..count].iter_mut().zip(other).for_each(|(top, x)| *top = top.max(*x));
                    }
                }
            }
            // SAFETY: as the caller promises.
            unsafe {
                std::ptr::copy(tile.as_ptr(), target.add(first - range.start), count);
            }
        }
        read
    }

    /// Copies every other member's part into one's own buffer. Returns how many numbers they were.
    ///
    /// # Safety
    /// `from(i)` has as many numbers as part i, which nobody writes meanwhile.
    unsafe fn gather(
        &self,
        me: usize,
        part: impl Fn(usize) -> std::ops::Range<usize>,
        from: impl Fn(usize) -> *const f32,
    ) -> usize {
        let mine = self.posted(me);
        let mut copied = 0;
        for at in (0..self.members()).filter(|at| *at != me) {
            // SAFETY: as the caller promises.
            unsafe {
                std::ptr::copy(from(at), mine.target.add(part(at).start), part(at).len());
            }
            copied += part(at).len();
        }
        copied
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUM: ReduceKind = (CollectiveKind::AllReduce, Reduction::Sum);
    const MAXIMUM: ReduceKind = (CollectiveKind::AllReduce, Reduction::Maximum);
    const SCATTER: ReduceKind = (CollectiveKind::ReduceScatter, Reduction::Sum);
    const GATHER: ReduceKind = (CollectiveKind::AllGather, Reduction::Sum);
    const EXCHANGE: ReduceKind = (CollectiveKind::AllToAll, Reduction::Sum);

    /// Runs a collective on every member's numbers.
    fn run(inputs: &[Vec<f32>], len: usize, kind: ReduceKind, in_place: bool) -> Vec<Vec<f32>> {
        run_counted(inputs, len, kind, in_place).into_iter().map(|(made, _)| made).collect()
    }

    /// The same, with what each member moved.
    fn run_counted(
        inputs: &[Vec<f32>],
        len: usize,
        kind: ReduceKind,
        in_place: bool,
    ) -> Vec<(Vec<f32>, CollectiveVolume)> {
        let (exchange, abort) = (SharedMemoryGroup::new(inputs.len()), Abort::default());
        let (exchange, abort) = (&exchange, &abort);
        std::thread::scope(|scope| {
            let threads: Vec<_> = inputs
                .iter()
                .enumerate()
                .map(|(me, input)| {
                    scope.spawn(move || {
                        let mut made = if in_place { input.clone() } else { vec![0.0; len] };
                        let mut moved = CollectiveVolume::default();
                        for _ in 0..if in_place { 1 } else { 50 } {
                            moved = if in_place {
                                exchange.in_place(me, &mut made, kind, abort).unwrap()
                            } else {
                                exchange.between(me, input, &mut made, kind, abort).unwrap()
                            };
                        }
                        (made, moved)
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn everyone_gets_the_sum_and_the_maximum() {
        let inputs = [vec![1.0, 2.0, 3.0, 4.0, 5.0], vec![10.0, 0.0, -1.0, 1.0, 1.0]];
        let sum = run(&inputs, 5, SUM, true);
        assert_eq!(sum, [[11.0, 2.0, 2.0, 5.0, 6.0]; 2]);
        let most = run(&inputs, 5, MAXIMUM, true);
        assert_eq!(most, [[10.0, 2.0, 3.0, 4.0, 5.0]; 2]);
    }

    #[test]
    fn parts_are_scattered_gathered_and_exchanged() {
        let inputs = [vec![1.0, 2.0, 3.0, 4.0], vec![10.0, 20.0, 30.0, 40.0]];
        let apart = run(&inputs, 2, SCATTER, false);
        assert_eq!(apart, [[11.0, 22.0], [33.0, 44.0]]);
        let in_place = run(&inputs, 4, SCATTER, true);
        assert_eq!(in_place[0][..2], [11.0, 22.0]);
        assert_eq!(in_place[1][2..], [33.0, 44.0]);
        let parts = [vec![1.0, 2.0], vec![10.0, 20.0]];
        assert_eq!(run(&parts, 4, GATHER, false), [[1.0, 2.0, 10.0, 20.0]; 2]);
        assert_eq!(run(&inputs, 4, GATHER, true), [[1.0, 2.0, 30.0, 40.0]; 2]);
        let turned = run(&inputs, 4, EXCHANGE, false);
        assert_eq!(turned, [[1.0, 2.0, 10.0, 20.0], [3.0, 4.0, 30.0, 40.0]]);
    }

    /// As much as in a ring, where nothing is sent twice.
    #[test]
    fn what_is_moved_is_counted() {
        let inputs = vec![vec![1.0; 12]; 4];
        let moved = |inputs: &[Vec<f32>], len, kind, in_place| {
            let all = run_counted(inputs, len, kind, in_place);
            assert!(all.iter().all(|(_, moved)| *moved == all[0].1), "{all:?}");
            (all[0].1.whole, all[0].1.received)
        };
        assert_eq!(moved(&inputs, 12, SUM, true), (12, 2 * 9));
        assert_eq!(moved(&inputs, 3, SCATTER, false), (12, 9));
        assert_eq!(moved(&inputs, 12, SCATTER, true), (12, 9));
        assert_eq!(moved(&inputs, 48, GATHER, false), (48, 36));
        assert_eq!(moved(&inputs, 12, GATHER, true), (12, 9));
        assert_eq!(moved(&inputs, 12, EXCHANGE, false), (48, 9));
        // Unequal parts: together they take what four members do.
        let uneven = run_counted(&vec![vec![1.0; 5]; 4], 5, SUM, true);
        assert!(uneven.iter().all(|(_, moved)| moved.whole == 5));
        assert_eq!(uneven.iter().map(|(_, moved)| moved.received).sum::<usize>(), 2 * 3 * 5);
    }
}
