//! The processes of a run: what they say to each other, how they agree, and how they part.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::error::{ClusterError, Fault};
use super::frame::{Channel, Header, Subject};
use super::group::{Group, Talk, Wire};
use super::join::{Fact, meet};
use super::journal::{Doing, Journal};
use super::launch::Launch;
use super::peer::{Frame, Peer};
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

/// What control frames are about.
const AGREEMENT: u16 = 7;
const COLLECTION: u16 = 8;

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
    agreed: AtomicU64,
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
        Ok(Cluster { launch: launch.clone(), deadlines, peers, journal, agreed: AtomicU64::new(0) })
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

    fn talk(&self, channel: Channel) -> Talk {
        Talk {
            channel,
            deadline: self.deadlines.answer,
            journal: self.journal.clone(),
            sequence: AtomicU64::new(0),
        }
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
        let doing = self.begin("agreement", 0);
        let agreed = self.agree_in(mine, decide, doing).map_err(|fault| self.error(fault))?;
        self.journal.end();
        Ok(agreed)
    }

    fn begin(&self, what: &'static str, numbers: usize) -> Doing {
        let sequence = self.agreed.fetch_add(1, Ordering::Relaxed);
        let doing = Doing { what, over: Channel::Control.name(), sequence, numbers };
        self.journal.begin(doing);
        doing
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
        let said = || doing.to_string();
        let send = |peer: &Peer, bytes: &[u8]| {
            let header = control(AGREEMENT, &doing, bytes.len());
            peer.send(header, std::iter::once(bytes), said)
        };
        let unreadable = |rank: u64| Fault::Lost {
            rank,
            doing: said(),
            why: "it says what cannot be read".into(),
        };
        if self.rank() != 0 {
            let Some(first) = self.peers.get(&0) else { return Err(unreadable(0)) };
            send(first, &serde_json::to_vec(&mine).map_err(|_| unreadable(0))?)?;
            let deadline = self.deadlines.answer + GRACE;
            let frame = receive_control(first, AGREEMENT, &doing, deadline)?;
            return serde_json::from_slice(frame.bytes()).map_err(|_| unreadable(0));
        }
        let mut all = vec![mine];
        for rank in 1..self.world() {
            let Some(peer) = self.peers.get(&rank) else { return Err(unreadable(rank)) };
            let frame = receive_control(peer, AGREEMENT, &doing, self.deadlines.answer)?;
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
        let doing = self.begin("collection", numbers);
        let said = || doing.to_string();
        let mut work = || -> Result<(), Fault> {
            if self.rank() != 0 {
                let bytes = mine.iter().map(|part| bytemuck::cast_slice(part));
                return match self.peers.get(&0) {
                    Some(first) => {
                        first.send(control(COLLECTION, &doing, 4 * numbers), bytes, said)
                    }
                    None => Ok(()),
                };
            }
            take(0, &mine.concat());
            for (rank, peer) in &self.peers {
                let frame = receive_control(peer, COLLECTION, &doing, self.deadlines.answer)?;
                if frame.numbers().len() != count(*rank) {
                    let why =
                        format!("it sends {} numbers, not {}", frame.numbers().len(), count(*rank));
                    return Err(Fault::Lost { rank: *rank, doing: said(), why });
                }
                take(*rank, frame.numbers());
                peer.recycle(frame);
            }
            Ok(())
        };
        work().map_err(|fault| self.error(fault))?;
        self.journal.end();
        Ok(())
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

fn control(operation: u16, doing: &Doing, bytes: usize) -> Header {
    Header {
        subject: Subject::Data,
        channel: Channel::Control.number(),
        operation,
        sequence: doing.sequence,
        bytes: bytes as u64,
    }
}

/// The next control frame, which must be of the same operation.
fn receive_control(
    peer: &Peer,
    operation: u16,
    doing: &Doing,
    deadline: Duration,
) -> Result<Frame, Fault> {
    let frame = peer.receive(Channel::Control.number(), deadline, || doing.to_string())?;
    let found = frame.header;
    if (found.operation, found.sequence) == (operation, doing.sequence) {
        return Ok(frame);
    }
    let what = if found.operation == AGREEMENT { "agreement" } else { "collection" };
    let theirs = Doing { what, sequence: found.sequence, numbers: 0, ..*doing };
    Err(Fault::OutOfStep { rank: peer.rank, theirs: theirs.to_string(), ours: doing.to_string() })
}
