//! Collectives between the processes of a group, and transfers between two.
//!
//! Every member sends each other member what that one needs, and makes its own part of a sum from
//! all parts in the order of the members, as the devices of one process do in memory: the bits are
//! the same. No byte is sent twice, so volumes are the least there can be.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use narrows_plan::kernel::CollectiveKind;
use narrows_plan::program::Reduction;
use narrows_runtime::process_group::{
    ClusterError, ClusterFault, CollectiveVolume, Communicator, PeerLink,
};

use super::journal::PendingOp;
use super::peer::Peer;
use super::talk::{Channel, WireOp};

/// The processes of a group, and one's place among them.
pub struct TcpCommunicator {
    me: usize,
    /// In the group's order; `None` is this process.
    members: Vec<Option<Arc<Peer>>>,
    talk: Channel,
    /// Where sums are made.
    sum: Mutex<Vec<f32>>,
}

/// The way to or from one process: transfers between two stages.
pub struct TcpPeerLink {
    peer: Arc<Peer>,
    talk: Channel,
}

impl TcpCommunicator {
    pub(super) fn new(
        me: usize,
        members: Vec<Option<Arc<Peer>>>,
        talk: Channel,
    ) -> TcpCommunicator {
        TcpCommunicator { me, members, talk, sum: Mutex::new(vec![]) }
    }

    fn run(
        &self,
        source: Option<&[f32]>,
        target: &mut [f32],
        kind: CollectiveKind,
        reduction: Reduction,
    ) -> Result<CollectiveVolume, ClusterError> {
        let len = source.map_or(0, <[f32]>::len).max(target.len());
        let doing = self.talk.begin(WireOp::of(kind, reduction), len);
        let at = CollectiveCall { group: self, doing, len };
        let volume = match kind {
            CollectiveKind::AllReduce => at.all_reduce(source, target, reduction),
            CollectiveKind::ReduceScatter => at.reduce_scatter(source, target),
            CollectiveKind::AllGather => at.all_gather(source, target),
            CollectiveKind::AllToAll => at.all_to_all(source, target),
        }
        .map_err(|fault| self.talk.error(fault))?;
        self.talk.end();
        Ok(volume)
    }

    fn others(&self) -> impl Iterator<Item = (usize, &Peer)> {
        self.members.iter().enumerate().filter_map(|(at, peer)| Some((at, peer.as_deref()?)))
    }
}

impl Communicator for TcpCommunicator {
    fn size(&self) -> usize {
        self.members.len()
    }

    fn in_place(
        &self,
        operand: &mut [f32],
        kind: CollectiveKind,
        reduction: Reduction,
    ) -> Result<CollectiveVolume, ClusterError> {
        self.run(None, operand, kind, reduction)
    }

    fn out_of_place(
        &self,
        source: &[f32],
        target: &mut [f32],
        kind: CollectiveKind,
        reduction: Reduction,
    ) -> Result<CollectiveVolume, ClusterError> {
        self.run(Some(source), target, kind, reduction)
    }
}

/// Where a sum was made.
type SumBuffer<'g> = MutexGuard<'g, Vec<f32>>;

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
struct CollectiveCall<'g> {
    group: &'g TcpCommunicator,
    doing: PendingOp,
    /// Numbers of the larger operand.
    len: usize,
}

impl CollectiveCall<'_> {
    /// Parts of an all-reduce may differ by one number; those of other kinds are equal.
    fn part(&self, at: usize) -> Range<usize> {
        let members = self.group.members.len();
        self.len * at / members..self.len * (at + 1) / members
    }

    fn mine(&self) -> Range<usize> {
        self.part(self.group.me)
    }

    /// Sends every other member its numbers.
    fn send<'a>(&self, numbers: impl Fn(usize) -> &'a [f32]) -> Result<(), ClusterFault> {
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
    ) -> Result<usize, ClusterFault> {
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
    fn reduce(
        &self,
        own: &[f32],
        reduction: Reduction,
    ) -> Result<(SumBuffer<'_>, usize), ClusterFault> {
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
        if me + 1 == self.group.members.len() {
            join(&mut sum, own, reduction);
        }
        Ok((sum, taken))
    }

    /// Takes every other member's part to its place. Returns how many numbers they were.
    fn gather(&self, target: &mut [f32]) -> Result<usize, ClusterFault> {
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
    ) -> Result<CollectiveVolume, ClusterFault> {
        let from = source.unwrap_or(target);
        self.send(|at| &from[self.part(at)])?;
        let (sum, reduced) = self.reduce(&from[self.mine()], reduction)?;
        target[self.mine()].copy_from_slice(&sum);
        drop(sum);
        self.send(|_| &target[self.mine()])?;
        let gathered = self.gather(target)?;
        Ok(CollectiveVolume { whole: self.mine().len() + gathered, received: reduced + gathered })
    }

    fn reduce_scatter(
        &self,
        source: Option<&[f32]>,
        target: &mut [f32],
    ) -> Result<CollectiveVolume, ClusterFault> {
        let from = source.unwrap_or(target);
        self.send(|at| &from[self.part(at)])?;
        let (sum, taken) = self.reduce(&from[self.mine()], Reduction::Sum)?;
        let first = if source.is_none() { self.mine().start } else { 0 };
        target[first..first + sum.len()].copy_from_slice(&sum);
        Ok(CollectiveVolume { whole: sum.len() + taken, received: taken })
    }

    fn all_gather(
        &self,
        source: Option<&[f32]>,
        target: &mut [f32],
    ) -> Result<CollectiveVolume, ClusterFault> {
        if let Some(source) = source {
            target[self.mine()].copy_from_slice(&source[..self.mine().len()]);
        }
        self.send(|_| &target[self.mine()])?;
        let taken = self.gather(target)?;
        Ok(CollectiveVolume { whole: self.mine().len() + taken, received: taken })
    }

    fn all_to_all(
        &self,
        source: Option<&[f32]>,
        target: &mut [f32],
    ) -> Result<CollectiveVolume, ClusterFault> {
        let from = source.unwrap_or(target);
        self.send(|at| &from[self.part(at)])?;
        if let Some(source) = source {
            target[self.mine()].copy_from_slice(&source[self.mine()]);
        }
        let taken = self.gather(target)?;
        // Every member has read as much: a part of the whole.
        let read = taken + self.mine().len();
        Ok(CollectiveVolume { whole: read * self.group.members.len(), received: taken })
    }
}

impl TcpPeerLink {
    pub(super) fn new(peer: Arc<Peer>, talk: Channel) -> TcpPeerLink {
        TcpPeerLink { peer, talk }
    }

    fn exchange(
        &self,
        operation: WireOp,
        numbers: usize,
        work: impl FnOnce(&PendingOp) -> Result<(), ClusterFault>,
    ) -> Result<(), ClusterError> {
        let doing = self.talk.begin(operation, numbers);
        work(&doing).map_err(|fault| self.talk.error(fault))?;
        self.talk.end();
        Ok(())
    }
}

impl PeerLink for TcpPeerLink {
    fn send(&self, operands: &[&[f32]]) -> Result<(), ClusterError> {
        let numbers = operands.iter().map(|operand| operand.len()).sum();
        self.exchange(WireOp::Send, numbers, |doing| {
            let bytes = operands.iter().map(|operand| bytemuck::cast_slice(operand));
            self.talk.send(&self.peer, doing, bytes)
        })
    }

    fn receive(&self, take: &mut dyn FnMut(&[f32])) -> Result<(), ClusterError> {
        self.exchange(WireOp::Receive, 0, |doing| {
            let frame = self.talk.receive(&self.peer, doing, None)?;
            take(frame.numbers());
            self.peer.recycle(frame);
            Ok(())
        })
    }
}
