//! All processes of a run: control exchanges, gathering, abort and shutdown.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use narrows_runtime::PipelineDirection;
use narrows_runtime::process_group::{
    ClusterError, ClusterFault, CombineFn, Communicator, GroupScope, PeerLink, ProcessGroup,
    gather_and_broadcast,
};

use super::activity::CurrentActivity;
use super::channel::Channel;
use super::communicator::{TcpCommunicator, TcpPeerLink};
use super::flight_recorder::FlightRecorder;
use super::frame::FrameChannel;
use super::launch::LaunchInfo;
use super::operation::{PendingOp, WireOp};
use super::peer::Peer;
use super::rendezvous::{RunFact, connect, report_failure};

/// Timeouts of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClusterTimeouts {
    /// Longest wait for all processes to join, at the start.
    pub join: Duration,
    /// Longest wait for another process in a collective or a transfer.
    pub collective: Duration,
}

impl ClusterTimeouts {
    /// Two minutes to join, and ten minutes for a collective, the default of NCCL under torch.
    pub const DEFAULT: ClusterTimeouts =
        ClusterTimeouts { join: Duration::from_secs(120), collective: Duration::from_secs(600) };
}

impl Default for ClusterTimeouts {
    fn default() -> ClusterTimeouts {
        ClusterTimeouts::DEFAULT
    }
}

/// Time beyond the collective timeout that other ranks wait for rank 0, so that it can report the
/// process that it waits for itself.
const RANK_0_GRACE: Duration = Duration::from_secs(5);

/// The processes of a run, connected by TCP.
pub struct TcpProcessGroup {
    launch: LaunchInfo,
    timeouts: ClusterTimeouts,
    /// The connected processes, by rank.
    peers: BTreeMap<u64, Arc<Peer>>,
    recorder: Arc<FlightRecorder>,
    /// Control exchanges and gathering through rank 0.
    control: Channel,
    activity: Arc<CurrentActivity>,
}

impl TcpProcessGroup {
    /// Waits for all processes and connects with rank 0 and with `peers`, each of which must name
    /// this rank too. `facts` must be equal in all processes.
    ///
    /// # Errors
    /// When not all processes join within the timeout, or one was started for another run.
    pub fn join(
        launch: &LaunchInfo,
        facts: Vec<RunFact>,
        peers: &[u64],
        timeouts: ClusterTimeouts,
    ) -> Result<TcpProcessGroup, ClusterError> {
        TcpProcessGroup::join_with_reports(launch, facts, peers, timeouts, &mut |_| ())
    }

    /// As [`join`](TcpProcessGroup::join). Rank 0 calls `report` with a sentence on each stranger that it turns away, once for
    /// each address.
    ///
    /// # Errors
    /// As [`join`](TcpProcessGroup::join).
    pub fn join_with_reports(
        launch: &LaunchInfo,
        facts: Vec<RunFact>,
        peers: &[u64],
        timeouts: ClusterTimeouts,
        report: &mut dyn FnMut(&str),
    ) -> Result<TcpProcessGroup, ClusterError> {
        let mut connected = BTreeMap::new();
        let activity = Arc::new(CurrentActivity::new());
        for (rank, stream) in connect(launch, facts, peers, timeouts.join, report)? {
            let peer = Peer::new(rank, stream, timeouts.collective, activity.clone());
            let peer = peer.map_err(|error| {
                let (operation, reason) = ("the rendezvous".into(), error.to_string());
                ClusterFault::Disconnected { rank, operation, reason }
            })?;
            connected.insert(rank, Arc::new(peer));
        }
        let recorder = Arc::new(FlightRecorder::new());
        let grace = if launch.rank == 0 { Duration::ZERO } else { RANK_0_GRACE };
        let control =
            Channel::new(FrameChannel::Control, timeouts.collective + grace, recorder.clone());
        let launch = launch.clone();
        Ok(TcpProcessGroup { launch, timeouts, peers: connected, recorder, control, activity })
    }

    /// Tells the other processes of a run that this one has failed before it could [join](TcpProcessGroup::join) them.
    /// Ends within `timeout`, and within ten seconds.
    pub fn report_failure(launch: &LaunchInfo, reason: &str, timeout: Duration) {
        report_failure(launch, reason, timeout);
    }

    /// Rank, world size and rendezvous address of this process.
    pub fn launch(&self) -> &LaunchInfo {
        &self.launch
    }

    /// Timeouts of the run.
    pub fn timeouts(&self) -> ClusterTimeouts {
        self.timeouts
    }

    fn open_channel(&self, channel: FrameChannel) -> Channel {
        Channel::new(channel, self.timeouts.collective, self.recorder.clone())
    }

    fn run_control_exchange(
        &self,
        message: Vec<u8>,
        combine: CombineFn,
        pending: PendingOp,
    ) -> Result<Vec<u8>, ClusterFault> {
        let send =
            |peer: &Peer, bytes: &[u8]| self.control.send(peer, &pending, std::iter::once(bytes));
        let undecodable = |rank: u64| ClusterFault::undecodable(rank, &pending.to_string());
        if self.rank() != 0 {
            let Some(first) = self.peers.get(&0) else { return Err(undecodable(0)) };
            send(first, &message)?;
            return Ok(self.control.receive(first, &pending, None)?.bytes().to_vec());
        }
        let mut messages = vec![message];
        for rank in 1..self.world_size() {
            let Some(peer) = self.peers.get(&rank) else { return Err(undecodable(rank)) };
            messages.push(self.control.receive(peer, &pending, None)?.bytes().to_vec());
        }
        let answer = combine(messages).map_err(undecodable)?;
        self.peers.values().try_for_each(|peer| send(peer, &answer))?;
        Ok(answer)
    }

    fn run_gather(
        &self,
        elements: &[&[f32]],
        count: &dyn Fn(u64) -> usize,
        on_receive: &mut dyn FnMut(u64, &[f32]),
        pending: PendingOp,
    ) -> Result<(), ClusterFault> {
        if self.rank() != 0 {
            let parts = elements.iter().map(|part| bytemuck::cast_slice(part));
            return match self.peers.get(&0) {
                Some(first) => self.control.send(first, &pending, parts),
                None => Ok(()),
            };
        }
        on_receive(0, &elements.concat());
        for (rank, peer) in &self.peers {
            let frame = self.control.receive(peer, &pending, Some(count(*rank)))?;
            on_receive(*rank, frame.elements());
            peer.recycle(frame);
        }
        Ok(())
    }

    /// An error with the last operations of this process.
    fn error(&self, fault: ClusterFault) -> ClusterError {
        self.control.error(fault)
    }

    /// Waits until all processes have finished, and closes the connections.
    ///
    /// # Errors
    /// A process is gone or late.
    pub fn shut_down(&self) -> Result<(), ClusterError> {
        gather_and_broadcast(self, (), |_| ())?;
        self.peers.values().for_each(|peer| peer.send_shutdown());
        Ok(())
    }
}

impl ProcessGroup for TcpProcessGroup {
    fn rank(&self) -> u64 {
        self.launch.rank
    }

    fn world_size(&self) -> u64 {
        self.launch.world_size
    }

    fn collective_timeout(&self) -> Duration {
        self.timeouts.collective
    }

    fn begin_storage_use(&self) {
        self.activity.begin_storage_use();
    }

    fn end_storage_use(&self) {
        self.activity.end_storage_use();
    }

    fn gather_and_broadcast_bytes(
        &self,
        message: Vec<u8>,
        combine: CombineFn,
    ) -> Result<Vec<u8>, ClusterError> {
        let pending = self.control.begin(WireOp::ControlExchange, 0);
        let answer = self
            .run_control_exchange(message, combine, pending)
            .map_err(|fault| self.error(fault))?;
        self.control.end(&pending);
        Ok(answer)
    }

    fn gather(
        &self,
        elements: &[&[f32]],
        count: &dyn Fn(u64) -> usize,
        on_receive: &mut dyn FnMut(u64, &[f32]),
    ) -> Result<(), ClusterError> {
        let own_count: usize = elements.iter().map(|part| part.len()).sum();
        let pending = self.control.begin(WireOp::Gather, own_count);
        self.run_gather(elements, count, on_receive, pending).map_err(|fault| self.error(fault))?;
        self.control.end(&pending);
        Ok(())
    }

    fn failure(&self, operation: &str) -> Option<ClusterError> {
        let fault = self.peers.values().find_map(|peer| peer.fault(operation))?;
        Some(self.error(fault))
    }

    fn abort(&self, origin: u64, reason: &str) {
        self.peers.values().for_each(|peer| peer.send_abort(origin, reason));
    }

    fn communicator(&self, ranks: &[u64], scope: GroupScope) -> Option<Box<dyn Communicator>> {
        let own_index = ranks.iter().position(|rank| *rank == self.rank())?;
        let members: Option<Vec<Option<Arc<Peer>>>> = ranks
            .iter()
            .map(|rank| match *rank == self.rank() {
                true => Some(None),
                false => self.peers.get(rank).cloned().map(Some),
            })
            .collect();
        let channel = self.open_channel(FrameChannel::of_scope(scope));
        Some(Box::new(TcpCommunicator::new(own_index, members?, channel)))
    }

    fn peer_link(&self, rank: u64, direction: PipelineDirection) -> Option<Box<dyn PeerLink>> {
        let peer = self.peers.get(&rank)?.clone();
        let channel = self.open_channel(FrameChannel::Transfers(direction));
        Some(Box::new(TcpPeerLink::new(peer, channel)))
    }
}
