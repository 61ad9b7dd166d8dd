//! Collectives between the processes of a group, and transfers between two.
//!
//! Every member sends each other member what that one needs, and makes its own part of a sum from
//! all parts in the order of the members, as the devices of one process do in memory: the bits are
//! the same. No byte is sent twice, so volumes are the least there can be.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use narrows_plan::program::Reduction;

use super::error::Fault;
use super::journal::Doing;
use super::peer::Peer;
use super::talk::{Operation, Talk};
use crate::cpu::{Kind, Moved};

/// The processes of a group, and one's place among them.
pub struct Group {
    me: usize,
    /// In the group's order; `None` is this process.
    members: Vec<Option<Arc<Peer>>>,
    talk: Talk,
    /// Where sums are made.
    sum: Mutex<Vec<f32>>,
}

/// The way to or from one process: transfers between two stages.
pub struct Wire {
    peer: Arc<Peer>,
    talk: Talk,
}

impl Group {
    pub(super) fn new(me: usize, members: Vec<Option<Arc<Peer>>>, talk: Talk) -> Group {
        Group { me, members, talk, sum: Mutex::new(vec![]) }
    }

    /// How many members.
    pub fn members(&self) -> usize {
        self.members.len()
    }

    /// A collective of a whole buffer in place.
    ///
    /// # Errors
    /// When a member is gone, late, or in another collective.
    pub fn in_place(&self, operand: &mut [f32], kind: Kind) -> Result<Moved, Fault> {
        self.meet(None, operand, kind)
    }

    /// A collective from one buffer to another.
    ///
    /// # Errors
    /// As [`in_place`](Group::in_place).
    pub fn between(&self, source: &[f32], target: &mut [f32], kind: Kind) -> Result<Moved, Fault> {
        self.meet(Some(source), target, kind)
    }

    fn meet(&self, source: Option<&[f32]>, target: &mut [f32], kind: Kind) -> Result<Moved, Fault> {
        let len = source.map_or(0, <[f32]>::len).max(target.len());
        let doing = self.talk.begin(Operation::of(kind), len);
        let at = Meeting { group: self, doing, len };
        let moved = match kind {
            Kind::AllReduce(reduction) => at.all_reduce(source, target, reduction),
            Kind::ReduceScatter => at.reduce_scatter(source, target),
            Kind::AllGather => at.all_gather(source, target),
            Kind::AllToAll => at.all_to_all(source, target),
        }?;
        self.talk.end();
        Ok(moved)
    }

    fn others(&self) -> impl Iterator<Item = (usize, &Peer)> {
        self.members.iter().enumerate().filter_map(|(at, peer)| Some((at, peer.as_deref()?)))
    }
}

/// Where a sum was made.
type Sum<'g> = MutexGuard<'g, Vec<f32>>;

/// Combines numbers with what came of those before.
fn join(sum: &mut Vec<f32>, numbers: &[f32], reduction: Reduction) {
    match (sum.is_empty(), reduction) {
        (true, _) => sum.extend_from_slice(numbers),
        (_, Reduction::Sum) => sum.iter_mut().zip(numbers).for_each(|(sum, x)| *sum += x),
        (_, Reduction::Maximum) => {
            sum.iter_mut().zip(numbers).for_each(|(top, x)| *top = top.max(*x));
        }
    }
}

/// One collective.
struct Meeting<'g> {
    group: &'g Group,
    doing: Doing,
    /// Numbers of the larger operand.
    len: usize,
}

impl Meeting<'_> {
    /// Parts of an all-reduce may differ by one number; those of other kinds are equal.
    fn part(&self, at: usize) -> Range<usize> {
        let members = self.group.members();
        self.len * at / members..self.len * (at + 1) / members
    }

    fn mine(&self) -> Range<usize> {
        self.part(self.group.me)
    }

    /// Sends every other member its numbers.
    fn send<'a>(&self, numbers: impl Fn(usize) -> &'a [f32]) -> Result<(), Fault> {
        let talk = &self.group.talk;
        self.group.others().try_for_each(|(at, peer)| {
            talk.send(peer, &self.doing, std::iter::once(bytemuck::cast_slice(numbers(at))))
        })
    }

    /// Takes what every other member sent, in the order of the members.
    fn take(
        &self,
        count: impl Fn(usize) -> usize,
        mut put: impl FnMut(usize, &[f32]),
    ) -> Result<usize, Fault> {
        let mut taken = 0;
        for (at, peer) in self.group.others() {
            let frame = self.group.talk.receive(peer, &self.doing, Some(count(at)))?;
            put(at, frame.numbers());
            taken += frame.numbers().len();
            peer.recycle(frame);
        }
        Ok(taken)
    }

    /// All members' numbers of one's own part, combined in the order of the members: `own` are one's
    /// own. With how many came from others.
    fn reduce(&self, own: &[f32], reduction: Reduction) -> Result<(Sum<'_>, usize), Fault> {
        let mut sum = self.group.sum.lock().unwrap_or_else(PoisonError::into_inner);
        sum.clear();
        let me = self.group.me;
        let taken = self.take(
            |_| own.len(),
            |at, numbers| {
                if at == me + 1 {
                    join(&mut sum, own, reduction);
                }
                join(&mut sum, numbers, reduction);
            },
        )?;
        if me + 1 == self.group.members() {
            join(&mut sum, own, reduction);
        }
        Ok((sum, taken))
    }

    /// Takes every other member's part to its place. Returns how many numbers they were.
    fn gather(&self, target: &mut [f32]) -> Result<usize, Fault> {
        self.take(
            |at| self.part(at).len(),
            |at, numbers| target[self.part(at)].copy_from_slice(numbers),
        )
    }

    fn all_reduce(
        &self,
        source: Option<&[f32]>,
        target: &mut [f32],
        reduction: Reduction,
    ) -> Result<Moved, Fault> {
        let from = source.unwrap_or(target);
        self.send(|at| &from[self.part(at)])?;
        let (sum, reduced) = self.reduce(&from[self.mine()], reduction)?;
        target[self.mine()].copy_from_slice(&sum);
        drop(sum);
        self.send(|_| &target[self.mine()])?;
        let gathered = self.gather(target)?;
        Ok(Moved { whole: self.mine().len() + gathered, taken: reduced + gathered })
    }

    fn reduce_scatter(&self, source: Option<&[f32]>, target: &mut [f32]) -> Result<Moved, Fault> {
        let from = source.unwrap_or(target);
        self.send(|at| &from[self.part(at)])?;
        let (sum, taken) = self.reduce(&from[self.mine()], Reduction::Sum)?;
        let first = if source.is_none() { self.mine().start } else { 0 };
        target[first..first + sum.len()].copy_from_slice(&sum);
        Ok(Moved { whole: sum.len() + taken, taken })
    }

    fn all_gather(&self, source: Option<&[f32]>, target: &mut [f32]) -> Result<Moved, Fault> {
        if let Some(source) = source {
            target[self.mine()].copy_from_slice(&source[..self.mine().len()]);
        }
        self.send(|_| &target[self.mine()])?;
        let taken = self.gather(target)?;
        Ok(Moved { whole: self.mine().len() + taken, taken })
    }

    fn all_to_all(&self, source: Option<&[f32]>, target: &mut [f32]) -> Result<Moved, Fault> {
        let from = source.unwrap_or(target);
        self.send(|at| &from[self.part(at)])?;
        if let Some(source) = source {
            target[self.mine()].copy_from_slice(&source[self.mine()]);
        }
        let taken = self.gather(target)?;
        // Every member has read as much: a part of the whole.
        let read = taken + self.mine().len();
        Ok(Moved { whole: read * self.group.members(), taken })
    }
}

impl Wire {
    pub(super) fn new(peer: Arc<Peer>, talk: Talk) -> Wire {
        Wire { peer, talk }
    }

    /// Sends these, one after the other.
    ///
    /// # Errors
    /// When the other stage is gone, or takes nothing.
    pub fn send<'a>(&self, operands: impl Iterator<Item = &'a [f32]> + Clone) -> Result<(), Fault> {
        let numbers = operands.clone().map(<[f32]>::len).sum();
        let doing = self.talk.begin(Operation::Send, numbers);
        self.talk.send(&self.peer, &doing, operands.map(bytemuck::cast_slice))?;
        self.talk.end();
        Ok(())
    }

    /// Waits for the next transfer, and passes it to `take`.
    ///
    /// # Errors
    /// When the other stage is gone, or late.
    pub fn receive(&self, take: impl FnOnce(&[f32])) -> Result<(), Fault> {
        let doing = self.talk.begin(Operation::Receive, 0);
        let frame = self.talk.receive(&self.peer, &doing, None)?;
        take(frame.numbers());
        self.peer.recycle(frame);
        self.talk.end();
        Ok(())
    }
}
