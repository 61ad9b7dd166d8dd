//! Collectives between the processes of a device group, and transfers between two processes.
//!
//! Every member sends each other member the shard that it needs, and reduces its own shard in the
//! order of the members, as the CPU backend does for the devices of one process: the results are
//! equal bit for bit. No byte is sent twice, so volumes are minimal.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use narrows_plan::program::{CollectiveFunction, Reduction};
use narrows_runtime::process_group::{
    ClusterError, ClusterFault, CollectiveOperands, CollectiveVolume, Communicator, PeerLink,
};

use super::channel::Channel;
use super::operation::{PendingOp, WireOp};
use super::peer::Peer;

/// Collectives among the processes of a device group.
pub(crate) struct TcpCommunicator {
    /// Index of this process among the members.
    own_index: usize,
    /// In the order of the group; `None` is this process.
    members: Vec<Option<Arc<Peer>>>,
    channel: Channel,
    /// Accumulator of reductions, kept between calls.
    accumulator: Mutex<Vec<f32>>,
}

/// Transfers with one other process.
pub(crate) struct TcpPeerLink {
    peer: Arc<Peer>,
    channel: Channel,
}

impl TcpCommunicator {
    pub(super) fn new(
        own_index: usize,
        members: Vec<Option<Arc<Peer>>>,
        channel: Channel,
    ) -> TcpCommunicator {
        TcpCommunicator { own_index, members, channel, accumulator: Mutex::new(vec![]) }
    }

    /// Index and connection of every other member.
    fn peers(&self) -> impl Iterator<Item = (usize, &Peer)> {
        self.members.iter().enumerate().filter_map(|(index, peer)| Some((index, peer.as_deref()?)))
    }
}

impl Communicator for TcpCommunicator {
    fn size(&self) -> usize {
        self.members.len()
    }

    fn run(
        &self,
        operands: CollectiveOperands,
        function: CollectiveFunction,
    ) -> Result<CollectiveVolume, ClusterError> {
        let (source, target) = match operands {
            CollectiveOperands::InPlace(target) => (None, target),
            CollectiveOperands::OutOfPlace { source, target } => (Some(source), target),
        };
        let elements = source.map_or(0, <[f32]>::len).max(target.len());
        let pending = self.channel.begin(WireOp::Collective(function), elements);
        let call = CollectiveCall { group: self, pending, elements };
        let volume = match function {
            CollectiveFunction::AllReduce(reduction) => call.all_reduce(source, target, reduction),
            CollectiveFunction::ReduceScatter => call.reduce_scatter(source, target),
            CollectiveFunction::AllGather => call.all_gather(source, target),
            CollectiveFunction::AllToAll => call.all_to_all(source, target),
        }
        .map_err(|fault| self.channel.error(fault))?;
        self.channel.end(&pending);
        Ok(volume)
    }

    fn shift(&self, source: &[f32], target: &mut [f32]) -> Result<(), ClusterError> {
        let pending = self.channel.begin(WireOp::Shift, source.len());
        let call = CollectiveCall { group: self, pending, elements: source.len() };
        call.shift(source, target).map_err(|fault| self.channel.error(fault))?;
        self.channel.end(&pending);
        Ok(())
    }
}

/// Combines elements with the accumulator; the first operand initialises it.
fn accumulate(accumulator: &mut Vec<f32>, elements: &[f32], reduction: Reduction) {
    match (accumulator.is_empty(), reduction) {
        (true, _) => accumulator.extend_from_slice(elements),
        (_, Reduction::Sum) => {
            accumulator.iter_mut().zip(elements).for_each(|(sum, x)| *sum += x);
        }
        (_, Reduction::Maximum) => {
            accumulator.iter_mut().zip(elements).for_each(|(max, x)| *max = max.max(*x));
        }
    }
}

/// One call of a collective.
struct CollectiveCall<'g> {
    group: &'g TcpCommunicator,
    pending: PendingOp,
    /// Elements of the larger operand.
    elements: usize,
}

impl CollectiveCall<'_> {
    /// Elements of a member's shard. Shards of an all-reduce may differ by one element; those of the
    /// other kinds are equal.
    fn shard(&self, member: usize) -> Range<usize> {
        let members = self.group.members.len();
        self.elements * member / members..self.elements * (member + 1) / members
    }

    fn own_shard(&self) -> Range<usize> {
        self.shard(self.group.own_index)
    }

    /// Sends `elements(member)` to every other member.
    fn send<'a>(&self, elements: impl Fn(usize) -> &'a [f32]) -> Result<(), ClusterFault> {
        let channel = &self.group.channel;
        self.group.peers().try_for_each(|(member, peer)| {
            let payload = bytemuck::cast_slice(elements(member));
            channel.send(peer, &self.pending, std::iter::once(payload))
        })
    }

    /// Receives `count(member)` elements from every other member, in the order of the members.
    /// Returns how many were received in all.
    fn receive(
        &self,
        count: impl Fn(usize) -> usize,
        mut on_receive: impl FnMut(usize, &[f32]),
    ) -> Result<usize, ClusterFault> {
        let mut received = 0;
        for (member, peer) in self.group.peers() {
            let frame = self.group.channel.receive(peer, &self.pending, Some(count(member)))?;
            on_receive(member, frame.elements());
            received += frame.elements().len();
            peer.recycle(frame);
        }
        Ok(received)
    }

    /// Reduces this member's shard in the order of the members; `own` is its own operand. Returns the
    /// result, and how many elements were received.
    fn reduce_own_shard(
        &self,
        own: &[f32],
        reduction: Reduction,
    ) -> Result<(MutexGuard<'_, Vec<f32>>, usize), ClusterFault> {
        let accumulator = &self.group.accumulator;
        let mut result = accumulator.lock().unwrap_or_else(PoisonError::into_inner);
        result.clear();
        let own_index = self.group.own_index;
        let received = self.receive(
            |_| own.len(),
            |member, elements| {
                if member == own_index + 1 {
                    accumulate(&mut result, own, reduction);
                }
                accumulate(&mut result, elements, reduction);
            },
        )?;
        if own_index + 1 == self.group.members.len() {
            accumulate(&mut result, own, reduction);
        }
        Ok((result, received))
    }

    /// Receives the shards of all other members into `target`. Returns how many elements were
    /// received.
    fn receive_shards(&self, target: &mut [f32]) -> Result<usize, ClusterFault> {
        self.receive(
            |member| self.shard(member).len(),
            |member, elements| target[self.shard(member)].copy_from_slice(elements),
        )
    }

    fn all_reduce(
        &self,
        source: Option<&[f32]>,
        target: &mut [f32],
        reduction: Reduction,
    ) -> Result<CollectiveVolume, ClusterFault> {
        let from = source.unwrap_or(target);
        self.send(|member| &from[self.shard(member)])?;
        let (result, reduced) = self.reduce_own_shard(&from[self.own_shard()], reduction)?;
        target[self.own_shard()].copy_from_slice(&result);
        drop(result);
        self.send(|_| &target[self.own_shard()])?;
        let gathered = self.receive_shards(target)?;
        let whole = self.own_shard().len() + gathered;
        Ok(CollectiveVolume { whole, received: reduced + gathered })
    }

    fn reduce_scatter(
        &self,
        source: Option<&[f32]>,
        target: &mut [f32],
    ) -> Result<CollectiveVolume, ClusterFault> {
        let from = source.unwrap_or(target);
        self.send(|member| &from[self.shard(member)])?;
        let (result, received) = self.reduce_own_shard(&from[self.own_shard()], Reduction::Sum)?;
        let offset = if source.is_none() { self.own_shard().start } else { 0 };
        target[offset..offset + result.len()].copy_from_slice(&result);
        Ok(CollectiveVolume { whole: result.len() + received, received })
    }

    fn all_gather(
        &self,
        source: Option<&[f32]>,
        target: &mut [f32],
    ) -> Result<CollectiveVolume, ClusterFault> {
        if let Some(source) = source {
            target[self.own_shard()].copy_from_slice(&source[..self.own_shard().len()]);
        }
        self.send(|_| &target[self.own_shard()])?;
        let received = self.receive_shards(target)?;
        Ok(CollectiveVolume { whole: self.own_shard().len() + received, received })
    }

    fn all_to_all(
        &self,
        source: Option<&[f32]>,
        target: &mut [f32],
    ) -> Result<CollectiveVolume, ClusterFault> {
        let from = source.unwrap_or(target);
        self.send(|member| &from[self.shard(member)])?;
        if let Some(source) = source {
            target[self.own_shard()].copy_from_slice(&source[self.own_shard()]);
        }
        let received = self.receive_shards(target)?;
        // Every member ends with a shard of this size.
        let shard = received + self.own_shard().len();
        Ok(CollectiveVolume { whole: shard * self.group.members.len(), received })
    }

    fn shift(&self, source: &[f32], target: &mut [f32]) -> Result<(), ClusterFault> {
        let TcpCommunicator { own_index, members, channel, .. } = self.group;
        let [next, previous] =
            [1, members.len() - 1].map(|offset| &members[(own_index + offset) % members.len()]);
        // A group of one has no peer.
        let (Some(next), Some(previous)) = (next, previous) else {
            target.copy_from_slice(source);
            return Ok(());
        };
        channel.send(next, &self.pending, std::iter::once(bytemuck::cast_slice(source)))?;
        let frame = channel.receive(previous, &self.pending, Some(target.len()))?;
        target.copy_from_slice(frame.elements());
        previous.recycle(frame);
        Ok(())
    }
}

impl TcpPeerLink {
    pub(super) fn new(peer: Arc<Peer>, channel: Channel) -> TcpPeerLink {
        TcpPeerLink { peer, channel }
    }

    fn transfer(
        &self,
        operation: WireOp,
        elements: usize,
        execute: impl FnOnce(&PendingOp) -> Result<(), ClusterFault>,
    ) -> Result<(), ClusterError> {
        let pending = self.channel.begin(operation, elements);
        execute(&pending).map_err(|fault| self.channel.error(fault))?;
        self.channel.end(&pending);
        Ok(())
    }
}

impl PeerLink for TcpPeerLink {
    fn send(&self, operands: &[&[f32]]) -> Result<(), ClusterError> {
        let elements = operands.iter().map(|operand| operand.len()).sum();
        self.transfer(WireOp::Send, elements, |pending| {
            let parts = operands.iter().map(|operand| bytemuck::cast_slice(operand));
            self.channel.send(&self.peer, pending, parts)
        })
    }

    fn receive(&self, on_receive: &mut dyn FnMut(&[f32])) -> Result<(), ClusterError> {
        self.transfer(WireOp::Receive, 0, |pending| {
            let frame = self.channel.receive(&self.peer, pending, None)?;
            on_receive(frame.elements());
            self.peer.recycle(frame);
            Ok(())
        })
    }
}
