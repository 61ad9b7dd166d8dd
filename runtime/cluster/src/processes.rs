//! The processes of a run: what they say to each other, how they agree, and how they part.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use narrows_runtime::error::RunError;
use narrows_runtime::process_group::{
    ClusterError, ClusterFault, Combine, Communicator, GroupScope, PeerLink, ProcessGroup, agree,
};

use super::frame::FrameChannel;
use super::group::{TcpCommunicator, TcpPeerLink};
use super::join::{RunFact, meet};
use super::journal::{FlightRecorder, PendingOp};
use super::launch::LaunchInfo;
use super::peer::Peer;
use super::talk::{Channel, WireOp};

/// How long is waited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClusterTimeouts {
    /// For all processes to come, in the beginning.
    pub join: Duration,
    /// For another process, in a collective or a transfer.
    pub answer: Duration,
}

impl Default for ClusterTimeouts {
    /// Two minutes, and the ten that NCCL's users know from torch.
    fn default() -> ClusterTimeouts {
        ClusterTimeouts { join: Duration::from_secs(120), answer: Duration::from_secs(600) }
    }
}

/// How much longer than its own deadline process 0 is waited for, by those that wait for it because it
/// waits for another: it shall have the time to say so.
const GRACE: Duration = Duration::from_secs(5);

/// The processes of a run, as one of them sees them.
pub struct TcpProcessGroup {
    launch: LaunchInfo,
    deadlines: ClusterTimeouts,
    /// Those that this process is connected with.
    peers: BTreeMap<u64, Arc<Peer>>,
    journal: Arc<FlightRecorder>,
    /// What all agree on, and what comes together in process 0.
    control: Channel,
}

impl TcpProcessGroup {
    /// Waits for all processes and connects with process 0 and with `neighbours`; each of those must
    /// name this one too. `facts` must be the same for all.
    ///
    /// # Errors
    /// When not all come within the deadline, or one means to do something else.
    pub fn join(
        launch: &LaunchInfo,
        facts: Vec<RunFact>,
        neighbours: &[u64],
        deadlines: ClusterTimeouts,
    ) -> Result<TcpProcessGroup, ClusterError> {
        let mut peers = BTreeMap::new();
        for (rank, stream) in meet(launch, facts, neighbours, deadlines.join)? {
            let peer = Peer::new(rank, stream, deadlines.answer).map_err(|error| {
                ClusterFault::Lost { rank, doing: "the beginning".into(), why: error.to_string() }
            })?;
            peers.insert(rank, Arc::new(peer));
        }
        let journal = Arc::new(FlightRecorder::new());
        let grace = if launch.rank == 0 { Duration::ZERO } else { GRACE };
        let control =
            Channel::new(FrameChannel::Control, deadlines.answer + grace, journal.clone());
        Ok(TcpProcessGroup { launch: launch.clone(), deadlines, peers, journal, control })
    }

    /// What this process's environment said.
    pub fn launch(&self) -> &LaunchInfo {
        &self.launch
    }

    /// How long others are waited for.
    pub fn deadlines(&self) -> ClusterTimeouts {
        self.deadlines
    }

    fn talk(&self, channel: FrameChannel) -> Channel {
        Channel::new(channel, self.deadlines.answer, self.journal.clone())
    }

    fn agree_in(
        &self,
        mine: Vec<u8>,
        combine: Combine,
        doing: PendingOp,
    ) -> Result<Vec<u8>, ClusterFault> {
        let send =
            |peer: &Peer, bytes: &[u8]| self.control.send(peer, &doing, std::iter::once(bytes));
        let unreadable = |rank: u64| ClusterFault::unreadable(rank, &doing.to_string());
        if self.rank() != 0 {
            let Some(first) = self.peers.get(&0) else { return Err(unreadable(0)) };
            send(first, &mine)?;
            return Ok(self.control.receive(first, &doing, None)?.bytes().to_vec());
        }
        let mut all = vec![mine];
        for rank in 1..self.world_size() {
            let Some(peer) = self.peers.get(&rank) else { return Err(unreadable(rank)) };
            all.push(self.control.receive(peer, &doing, None)?.bytes().to_vec());
        }
        let answer = combine(all).map_err(unreadable)?;
        self.peers.values().try_for_each(|peer| send(peer, &answer))?;
        Ok(answer)
    }

    /// An error with what this process did last.
    fn error(&self, fault: ClusterFault) -> ClusterError {
        self.control.error(fault)
    }

    /// Ends the run of all processes for a reason that is no error of a step.
    pub fn give_up_because(&self, why: &str) {
        self.pass_on(self.rank(), why);
    }

    fn pass_on(&self, rank: u64, why: &str) {
        self.peers.values().for_each(|peer| peer.give_up(rank, why));
    }

    /// Waits until all are done, and parts from them.
    ///
    /// # Errors
    /// When a process is gone or late.
    pub fn part(&self) -> Result<(), ClusterError> {
        agree(self, (), |_| ())?;
        self.peers.values().for_each(|peer| peer.done());
        Ok(())
    }
}

impl ProcessGroup for TcpProcessGroup {
    fn rank(&self) -> u64 {
        self.launch.rank
    }

    fn world_size(&self) -> u64 {
        self.launch.world
    }

    fn collective_timeout(&self) -> Duration {
        self.deadlines.answer
    }

    fn agree_bytes(&self, mine: Vec<u8>, combine: Combine) -> Result<Vec<u8>, ClusterError> {
        let doing = self.control.begin(WireOp::Agreement, 0);
        let agreed = self.agree_in(mine, combine, doing).map_err(|fault| self.error(fault))?;
        self.control.end();
        Ok(agreed)
    }

    fn gather(
        &self,
        mine: &[&[f32]],
        count: &dyn Fn(u64) -> usize,
        take: &mut dyn FnMut(u64, &[f32]),
    ) -> Result<(), ClusterError> {
        let numbers: usize = mine.iter().map(|part| part.len()).sum();
        let doing = self.control.begin(WireOp::Collection, numbers);
        let mut work = || -> Result<(), ClusterFault> {
            if self.rank() != 0 {
                let bytes = mine.iter().map(|part| bytemuck::cast_slice(part));
                return match self.peers.get(&0) {
                    Some(first) => self.control.send(first, &doing, bytes),
                    None => Ok(()),
                };
            }
            take(0, &mine.concat());
            for (rank, peer) in &self.peers {
                let frame = self.control.receive(peer, &doing, Some(count(*rank)))?;
                take(*rank, frame.numbers());
                peer.recycle(frame);
            }
            Ok(())
        };
        work().map_err(|fault| self.error(fault))?;
        self.control.end();
        Ok(())
    }

    fn failure(&self, operation: &str) -> Option<ClusterError> {
        self.peers.values().find_map(|peer| peer.gone(operation)).map(|fault| self.error(fault))
    }

    fn abort(&self, error: &RunError) {
        let (rank, why) = match error {
            RunError::Cluster(ClusterError {
                fault: ClusterFault::GaveUp { rank, why }, ..
            }) => (*rank, why.clone()),
            RunError::Cluster(ClusterError { fault, .. }) => (self.rank(), fault.to_string()),
            error => (self.rank(), error.to_string()),
        };
        self.pass_on(rank, &why);
    }

    fn communicator(&self, ranks: &[u64], scope: GroupScope) -> Option<Box<dyn Communicator>> {
        let me = ranks.iter().position(|rank| *rank == self.rank())?;
        let peers: Option<Vec<Option<Arc<Peer>>>> = ranks
            .iter()
            .map(|rank| match *rank == self.rank() {
                true => Some(None),
                false => self.peers.get(rank).cloned().map(Some),
            })
            .collect();
        Some(Box::new(TcpCommunicator::new(me, peers?, self.talk(FrameChannel::of(scope)))))
    }

    fn peer_link(&self, rank: u64) -> Option<Box<dyn PeerLink>> {
        let peer = self.peers.get(&rank)?.clone();
        Some(Box::new(TcpPeerLink::new(peer, self.talk(FrameChannel::Transfers))))
    }
}
