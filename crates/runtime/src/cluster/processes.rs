//! The processes of a run: what they say to each other, how they agree, and how they part.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::error::{ClusterError, Fault};
use super::frame::Channel;
use super::group::{Group, Wire};
use super::join::{Fact, meet};
use super::journal::{Doing, Journal};
use super::launch::Launch;
use super::peer::Peer;
use super::talk::{Operation, Talk};
use crate::backend::RunError;

/// How long is waited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadlines {
    /// For all processes to come, in the beginning.
    pub join: Duration,
    /// For another process, in a collective or a transfer.
    pub answer: Duration,
}

impl Default for Deadlines {
    /// Two minutes, and the ten that NCCL's users know from torch.
    fn default() -> Deadlines {
        Deadlines { join: Duration::from_secs(120), answer: Duration::from_secs(600) }
    }
}

/// How much longer than its own deadline process 0 is waited for, by those that wait for it because it
/// waits for another: it shall have the time to say so.
const GRACE: Duration = Duration::from_secs(5);

/// The processes of a run, as one of them sees them.
pub struct Cluster {
    launch: Launch,
    deadlines: Deadlines,
    /// Those that this process is connected with.
    peers: BTreeMap<u64, Arc<Peer>>,
    journal: Arc<Journal>,
    /// What all agree on, and what comes together in process 0.
    control: Talk,
}

impl Cluster {
    /// Waits for all processes and connects with process 0 and with `neighbours`; each of those must
    /// name this one too. `facts` must be the same for all.
    ///
    /// # Errors
    /// When not all come within the deadline, or one means to do something else.
    pub fn join(
        launch: &Launch,
        facts: Vec<Fact>,
        neighbours: &[u64],
        deadlines: Deadlines,
    ) -> Result<Cluster, ClusterError> {
        let mut peers = BTreeMap::new();
        for (rank, stream) in meet(launch, facts, neighbours, deadlines.join)? {
            let peer = Peer::new(rank, stream, deadlines.answer).map_err(|error| Fault::Lost {
                rank,
                doing: "the beginning".into(),
                why: error.to_string(),
            })?;
            peers.insert(rank, Arc::new(peer));
        }
        let journal = Arc::new(Journal::new());
        let grace = if launch.rank == 0 { Duration::ZERO } else { GRACE };
        let control = Talk::new(Channel::Control, deadlines.answer + grace, journal.clone());
        Ok(Cluster { launch: launch.clone(), deadlines, peers, journal, control })
    }

    /// This process's number.
    pub fn rank(&self) -> u64 {
        self.launch.rank
    }

    /// How many processes there are.
    pub fn world(&self) -> u64 {
        self.launch.world
    }

    /// What this process's environment said.
    pub fn launch(&self) -> &Launch {
        &self.launch
    }

    /// How long others are waited for.
    pub fn deadlines(&self) -> Deadlines {
        self.deadlines
    }

    fn talk(&self, channel: Channel) -> Talk {
        Talk::new(channel, self.deadlines.answer, self.journal.clone())
    }

    /// A group of processes, in this order; `None` when this process is not one of them, or not
    /// connected with all of the others.
    pub(crate) fn group(&self, members: &[u64], channel: Channel) -> Option<Group> {
        let me = members.iter().position(|rank| *rank == self.rank())?;
        let peers: Option<Vec<Option<Arc<Peer>>>> = members
            .iter()
            .map(|rank| match *rank == self.rank() {
                true => Some(None),
                false => self.peers.get(rank).cloned().map(Some),
            })
            .collect();
        Some(Group::new(me, peers?, self.talk(channel)))
    }

    /// The way to or from another process.
    pub(crate) fn wire(&self, rank: u64) -> Option<Wire> {
        Some(Wire::new(self.peers.get(&rank)?.clone(), self.talk(Channel::Transfers)))
    }

    /// What process 0 makes of what all say, in the order of their numbers. Nobody goes on before all
    /// have come.
    ///
    /// # Errors
    /// When a process is gone or late.
    pub fn agree<T, R>(&self, mine: T, decide: impl FnOnce(Vec<T>) -> R) -> Result<R, ClusterError>
    where
        T: Serialize + DeserializeOwned,
        R: Serialize + DeserializeOwned,
    {
        let doing = self.control.begin(Operation::Agreement, 0);
        let agreed = self.agree_in(mine, decide, doing).map_err(|fault| self.error(fault))?;
        self.control.end();
        Ok(agreed)
    }

    fn agree_in<T, R>(
        &self,
        mine: T,
        decide: impl FnOnce(Vec<T>) -> R,
        doing: Doing,
    ) -> Result<R, Fault>
    where
        T: Serialize + DeserializeOwned,
        R: Serialize + DeserializeOwned,
    {
        let send =
            |peer: &Peer, bytes: &[u8]| self.control.send(peer, &doing, std::iter::once(bytes));
        let unreadable = |rank: u64| Fault::Lost {
            rank,
            doing: doing.to_string(),
            why: "it says what cannot be read".into(),
        };
        if self.rank() != 0 {
            let Some(first) = self.peers.get(&0) else { return Err(unreadable(0)) };
            send(first, &serde_json::to_vec(&mine).map_err(|_| unreadable(0))?)?;
            let frame = self.control.receive(first, &doing, None)?;
            return serde_json::from_slice(frame.bytes()).map_err(|_| unreadable(0));
        }
        let mut all = vec![mine];
        for rank in 1..self.world() {
            let Some(peer) = self.peers.get(&rank) else { return Err(unreadable(rank)) };
            let frame = self.control.receive(peer, &doing, None)?;
            all.push(serde_json::from_slice(frame.bytes()).map_err(|_| unreadable(rank))?);
        }
        let made = decide(all);
        let bytes = serde_json::to_vec(&made).map_err(|_| unreadable(0))?;
        self.peers.values().try_for_each(|peer| send(peer, &bytes))?;
        Ok(made)
    }

    /// Collects numbers of all processes at process 0, one process after the other, itself first:
    /// `take` is called with each one's number and numbers, as many as `count` says of it. Other
    /// processes only send theirs.
    ///
    /// # Errors
    /// When a process is gone or late, or has another number of them.
    pub fn collect(
        &self,
        mine: &[&[f32]],
        count: impl Fn(u64) -> usize,
        mut take: impl FnMut(u64, &[f32]),
    ) -> Result<(), ClusterError> {
        let numbers: usize = mine.iter().map(|part| part.len()).sum();
        let doing = self.control.begin(Operation::Collection, numbers);
        let mut work = || -> Result<(), Fault> {
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

    /// Why the run is over for this process, if any that it is connected with is gone. What waits for
    /// others by other ways than a [`Cluster`]'s asks so; `doing` says for what.
    pub(crate) fn gone(&self, doing: &str) -> Option<ClusterError> {
        self.peers.values().find_map(|peer| peer.gone(doing)).map(|fault| self.error(fault))
    }

    /// An error with what this process did last.
    pub(crate) fn error(&self, fault: Fault) -> ClusterError {
        ClusterError { fault, recent: self.journal.lines() }
    }

    /// Ends the run for all: those that wait learn why.
    pub fn give_up(&self, error: &RunError) {
        let (rank, why) = match error {
            RunError::Cluster(ClusterError { fault: Fault::GaveUp { rank, why }, .. }) => {
                (*rank, why.clone())
            }
            RunError::Cluster(ClusterError { fault, .. }) => (self.rank(), fault.to_string()),
            error => (self.rank(), error.to_string()),
        };
        self.pass_on(rank, &why);
    }

    /// The same for a reason that is no error of the run.
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
        self.agree((), |_| ())?;
        self.peers.values().for_each(|peer| peer.done());
        Ok(())
    }
}
