//! The processes of a run, as sessions and backends use them.
//!
//! `narrows-cluster` implements these traits over TCP. A session whose devices are all threads of
//! one process has no process group.

use std::fmt;
use std::time::Duration;

use narrows_plan::kernel::CollectiveKind;
use narrows_plan::mesh::Axis;
use narrows_plan::program::Reduction;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::RunError;

/// Combines what all processes sent, by rank, into the answer that all receive.
///
/// # Errors
/// The rank of a process whose bytes cannot be read.
pub type Combine<'a> = &'a mut dyn FnMut(Vec<Vec<u8>>) -> Result<Vec<u8>, u64>;

/// All processes of a run, one device each.
pub trait ProcessGroup: Send + Sync {
    /// Rank of this process, counted from 0.
    fn rank(&self) -> u64;

    /// Number of processes.
    fn world_size(&self) -> u64;

    /// How long a process waits for another in a collective or a transfer.
    fn collective_timeout(&self) -> Duration;

    /// Sends `mine` to rank 0, which combines the bytes of all ranks, and returns its answer. Every
    /// process must call it. See [`agree`] for values instead of bytes.
    ///
    /// # Errors
    /// A process is gone or late, or sent bytes that cannot be read.
    fn agree_bytes(&self, mine: Vec<u8>, combine: Combine) -> Result<Vec<u8>, ClusterError>;

    /// Gathers f32 elements at rank 0, which calls `take` once for each rank, in rank order and
    /// itself first, with as many elements as `count` says of that rank. Other ranks only send.
    ///
    /// # Errors
    /// A process is gone or late, or sends another number of elements.
    fn gather(
        &self,
        mine: &[&[f32]],
        count: &dyn Fn(u64) -> usize,
        take: &mut dyn FnMut(u64, &[f32]),
    ) -> Result<(), ClusterError>;

    /// Why the run is over for this process, if a process that it is connected with is gone.
    /// `operation` names what this process waits for, for the message.
    fn failure(&self, operation: &str) -> Option<ClusterError>;

    /// Ends the run of all processes: those that wait for this one learn the reason.
    fn abort(&self, error: &RunError);

    /// The communicator of some ranks, in this order; `None` when this process is not one of them or
    /// not connected with all of the others.
    fn communicator(&self, ranks: &[u64], scope: GroupScope) -> Option<Box<dyn Communicator>>;

    /// Point-to-point transfers with another rank; `None` when this process is not connected with it.
    fn peer_link(&self, rank: u64) -> Option<Box<dyn PeerLink>>;
}

/// Which devices a communicator connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupScope {
    /// All devices along a mesh axis.
    Axis(Axis),
    /// The first and the last pipeline stage, which share a tied weight.
    TiedStages,
}

/// Collectives between the members of one group, as one of them joins in. Sums are made in the
/// order of the members, so that results are the same bits in every run.
pub trait Communicator: Send + Sync {
    /// Number of members.
    fn size(&self) -> usize;

    /// A collective in place on a buffer of the whole tensor. A reduce-scatter leaves its part where
    /// it is in the whole.
    ///
    /// # Errors
    /// A member is gone, late, or in another collective.
    fn in_place(
        &self,
        operand: &mut [f32],
        kind: CollectiveKind,
        reduction: Reduction,
    ) -> Result<CollectiveVolume, ClusterError>;

    /// A collective from one buffer to another.
    ///
    /// # Errors
    /// As [`in_place`](Communicator::in_place).
    fn out_of_place(
        &self,
        source: &[f32],
        target: &mut [f32],
        kind: CollectiveKind,
        reduction: Reduction,
    ) -> Result<CollectiveVolume, ClusterError>;
}

/// Transfers between the processes of two neighbouring pipeline stages.
pub trait PeerLink: Send + Sync {
    /// Sends operands, one after the other, as one transfer.
    ///
    /// # Errors
    /// The other process is gone, or takes nothing.
    fn send(&self, operands: &[&[f32]]) -> Result<(), ClusterError>;

    /// Waits for the next transfer and passes its elements to `take`.
    ///
    /// # Errors
    /// The other process is gone or late.
    fn receive(&self, take: &mut dyn FnMut(&[f32])) -> Result<(), ClusterError>;
}

/// Elements that one member moved in a collective, counted where they were moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CollectiveVolume {
    /// Elements of the whole, unsharded tensor.
    pub whole: usize,
    /// Elements that came from other members.
    pub received: usize,
}

/// What rank 0 makes of the values of all ranks, in rank order. Every process must call it; none
/// returns before all have.
///
/// # Errors
/// A process is gone or late.
pub fn agree<T, R>(
    group: &dyn ProcessGroup,
    mine: T,
    decide: impl FnOnce(Vec<T>) -> R,
) -> Result<R, ClusterError>
where
    T: Serialize + DeserializeOwned,
    R: Serialize + DeserializeOwned,
{
    let rank = group.rank();
    let unreadable = |rank| ClusterError::from(ClusterFault::unreadable(rank, "agreement"));
    let mine = serde_json::to_vec(&mine).map_err(|_| unreadable(rank))?;
    let mut decide = Some(decide);
    let mut combine = |all: Vec<Vec<u8>>| {
        let read = |(rank, bytes): (usize, &Vec<u8>)| {
            serde_json::from_slice(bytes).map_err(|_| rank as u64)
        };
        let values = all.iter().enumerate().map(read).collect::<Result<Vec<T>, u64>>()?;
        let decide = decide.take().ok_or(rank)?;
        serde_json::to_vec(&decide(values)).map_err(|_| rank)
    };
    let answer = group.agree_bytes(mine, &mut combine)?;
    serde_json::from_slice(&answer).map_err(|_| unreadable(0))
}

/// Why a run of many processes ends, as one of them sees it.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub struct ClusterError {
    /// What went wrong.
    pub fault: ClusterFault,
    /// The last collectives and transfers of this process, the newest last.
    pub recent: Vec<String>,
}

/// What went wrong.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ClusterFault {
    /// Process 0 cannot wait for the others where they are to meet.
    #[error(
        "cannot listen at {at}: {why} (try: another port in NARROWS_PORT, or the address of the \
         machine of process 0 in MASTER_ADDR)"
    )]
    Meeting {
        /// Where.
        at: String,
        /// What the system says.
        why: String,
    },
    /// Some did not come.
    #[error(
        "{} of {world} processes did not come to {at} within {waited_s:.0} s: {} (try: their own \
         output, and whether they can reach that address)",
        missing.len(), listed(missing)
    )]
    Missing {
        /// Who.
        missing: Vec<u64>,
        /// Processes of the run.
        world: u64,
        /// Where.
        at: String,
        /// How long they were waited for.
        waited_s: f64,
    },
    /// A process was not found.
    #[error(
        "process {rank} cannot be reached at {at} within {waited_s:.0} s: {why} (try: whether it \
         runs, and whether the address and port can be reached from here)"
    )]
    Unreachable {
        /// Who.
        rank: u64,
        /// Where.
        at: String,
        /// How long it was tried.
        waited_s: f64,
        /// What the system says of the last try.
        why: String,
    },
    /// Two processes mean to do different things.
    #[error(
        "process {rank} means another run than process 0: its {what}: {theirs}, not {ours} (try: the \
         same files and flags for all processes)"
    )]
    Differs {
        /// Who.
        rank: u64,
        /// In what.
        what: String,
        /// What it has.
        theirs: String,
        /// What process 0 has.
        ours: String,
    },
    /// Two processes have the same number, or one has a number that there is not.
    #[error("process {rank} of {world} came twice, or as one of another number of processes")]
    Stranger {
        /// Its number.
        rank: u64,
        /// Processes of the run.
        world: u64,
    },
    /// A process is gone.
    #[error("process {rank} is gone ({why}) while this one was in {doing}")]
    Lost {
        /// Who.
        rank: u64,
        /// What this process was doing.
        doing: String,
        /// What the connection says.
        why: String,
    },
    /// A process says nothing.
    #[error(
        "process {rank} did not come within {waited_s:.1} s to {doing}; it was last heard of \
         {silent_s:.1} s ago"
    )]
    Late {
        /// Who.
        rank: u64,
        /// What this process was doing.
        doing: String,
        /// How long it waited.
        waited_s: f64,
        /// Since when nothing at all came.
        silent_s: f64,
    },
    /// Another process ended the run.
    #[error("process {rank} ended the run: {why}")]
    GaveUp {
        /// Who.
        rank: u64,
        /// Why.
        why: String,
    },
    /// Two processes are in different collectives.
    #[error(
        "process {rank} is in {theirs}, and this one in {ours}: they do not run the same program"
    )]
    OutOfStep {
        /// Who.
        rank: u64,
        /// What it does.
        theirs: String,
        /// What this one does.
        ours: String,
    },
}

impl ClusterFault {
    /// A process sent bytes that cannot be read.
    pub fn unreadable(rank: u64, operation: &str) -> ClusterFault {
        let why = "it says what cannot be read".into();
        ClusterFault::Lost { rank, doing: operation.into(), why }
    }
}

impl From<ClusterFault> for ClusterError {
    fn from(fault: ClusterFault) -> ClusterError {
        ClusterError { fault, recent: vec![] }
    }
}

impl fmt::Display for ClusterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fault.fmt(f)?;
        if let Some((newest, before)) = self.recent.split_last() {
            write!(f, "\nthe last of its collectives and transfers:")?;
            before.iter().try_for_each(|done| write!(f, "\n  {done}"))?;
            write!(f, "\n  {newest}")?;
        }
        Ok(())
    }
}

/// The first few of many numbers.
fn listed(ranks: &[u64]) -> String {
    const SHOWN: usize = 8;
    let shown: Vec<String> = ranks.iter().take(SHOWN).map(u64::to_string).collect();
    let more = ranks.len().saturating_sub(SHOWN);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    shown.join(", ") + &more
}
