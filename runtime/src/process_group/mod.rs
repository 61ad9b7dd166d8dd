//! The processes of a run, as sessions and backends see them.
//!
//! `narrows-cluster` implements these traits over TCP. A session whose devices are all threads of
//! one process has no process group.

mod error;
mod storage_use;

use std::time::Duration;

use narrows_plan::Axis;
use narrows_plan::program::CollectiveFunction;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::PipelineDirection;

pub use error::{ClusterError, ClusterFault, excerpt};
pub use storage_use::StorageUse;

/// Combines the messages of all processes, in rank order, into the answer that all receive.
///
/// # Errors
/// The rank of a process whose message cannot be decoded.
pub type CombineFn<'a> = &'a mut dyn FnMut(Vec<Vec<u8>>) -> Result<Vec<u8>, u64>;

/// All processes of a run, one device each.
pub trait ProcessGroup: Send + Sync {
    /// Rank of this process, counted from 0.
    fn rank(&self) -> u64;

    /// Number of processes.
    fn world_size(&self) -> u64;

    /// Time that a process waits for another in a collective or a transfer.
    fn collective_timeout(&self) -> Duration;

    /// Begins to read or write long files, alone or beside steps, so that others wait for this process beyond their timeout.
    /// See [`StorageUse`].
    fn begin_storage_use(&self);

    /// Ends what [`begin_storage_use`](ProcessGroup::begin_storage_use) began.
    fn end_storage_use(&self);

    /// Sends `message` to rank 0, which combines the messages of all ranks, and returns the combined
    /// answer. Every process must call this method. See [`gather_and_broadcast`] for values instead of bytes.
    ///
    /// # Errors
    /// A process is gone or late, or sent a message that cannot be decoded.
    fn gather_and_broadcast_bytes(
        &self,
        message: Vec<u8>,
        combine: CombineFn,
    ) -> Result<Vec<u8>, ClusterError>;

    /// Gathers f32 elements at rank 0, which calls `on_receive(rank, elements)` once for each rank, in rank
    /// order and for itself first; `count(rank)` is the expected number of elements. Other ranks only
    /// send.
    ///
    /// # Errors
    /// A process is gone or late, or sends another number of elements.
    fn gather(
        &self,
        elements: &[&[f32]],
        count: &dyn Fn(u64) -> usize,
        on_receive: &mut dyn FnMut(u64, &[f32]),
    ) -> Result<(), ClusterError>;

    /// The error of a connected process that is gone, if there is one. `operation` names what this
    /// process waits for, for the message.
    fn failure(&self, operation: &str) -> Option<ClusterError>;

    /// Ends the run of all processes: those that wait for this one receive the reason. `origin` is the
    /// rank that failed first. See [`RunError::abort_run`](crate::RunError::abort_run) for errors of a
    /// step.
    fn abort(&self, origin: u64, reason: &str);

    /// The communicator of these ranks, in this order; `None` when this process is not one of them or
    /// is not connected with all other members.
    fn communicator(&self, ranks: &[u64], scope: GroupScope) -> Option<Box<dyn Communicator>>;

    /// Point-to-point transfers with another rank in one direction of the pipeline; `None` when this process is not
    /// connected with it.
    fn peer_link(&self, rank: u64, direction: PipelineDirection) -> Option<Box<dyn PeerLink>>;
}

/// The devices that a communicator connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupScope {
    /// All devices along a mesh axis.
    Axis(Axis),
    /// The first and the last pipeline stage, which share a tied weight.
    TiedStages,
    /// The replicas that share one copy of the states that ZeRO shards, where these are not all replicas.
    ShardGroup,
    /// The replicas that hold the same shard, where these are not all replicas.
    ShardReplicas,
}

/// Collectives of a device group, as one member calls them. Reductions combine operands in the order
/// of the members, so that results are equal bit for bit in every run.
pub trait Communicator: Send + Sync {
    /// Number of members.
    fn size(&self) -> usize;

    /// Executes a collective on the operands of this member.
    ///
    /// # Errors
    /// A member is gone, late, or in another collective.
    fn run(
        &self,
        operands: CollectiveOperands,
        function: CollectiveFunction,
    ) -> Result<CollectiveVolume, ClusterError>;

    /// Sends `source` to the next member, from the last one to the first, and receives that of the member before to
    /// `target`. All members pass slices of one length.
    ///
    /// # Errors
    /// A member is gone, late, or in another collective.
    fn shift(&self, source: &[f32], target: &mut [f32]) -> Result<(), ClusterError>;
}

/// Operands of one member of a collective.
#[derive(Debug)]
pub enum CollectiveOperands<'a> {
    /// One buffer of the size of the whole tensor. A reduce-scatter leaves the shard of this member at its
    /// offset in the whole.
    InPlace(&'a mut [f32]),
    /// A buffer that is read and another that is written.
    OutOfPlace {
        /// The buffer that is read.
        source: &'a [f32],
        /// The buffer that is written.
        target: &'a mut [f32],
    },
}

/// Transfers between the processes of two neighbouring pipeline stages.
pub trait PeerLink: Send + Sync {
    /// Sends operands, one after the other, as one transfer.
    ///
    /// # Errors
    /// The other process is gone, or does not receive.
    fn send(&self, operands: &[&[f32]]) -> Result<(), ClusterError>;

    /// Waits for the next transfer and passes its elements to `on_receive`.
    ///
    /// # Errors
    /// The other process is gone or late.
    fn receive(&self, on_receive: &mut dyn FnMut(&[f32])) -> Result<(), ClusterError>;
}

/// Elements of a collective on one member, counted by the code that moves them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CollectiveVolume {
    /// Elements of the whole, unsharded tensor.
    pub whole: usize,
    /// Elements that were received from other members.
    pub received: usize,
}

/// Gathers a value of every rank at rank 0, in rank order, and returns what `decide` makes of them
/// there. Every process must call this function, and none returns before all have called it.
///
/// # Errors
/// A process is gone or late, or sent a value that cannot be decoded.
pub fn gather_and_broadcast<T, R>(
    group: &dyn ProcessGroup,
    value: T,
    decide: impl FnOnce(Vec<T>) -> R,
) -> Result<R, ClusterError>
where
    T: Serialize + DeserializeOwned,
    R: Serialize + DeserializeOwned,
{
    let own_rank = group.rank();
    let undecodable =
        |rank| ClusterError::from(ClusterFault::undecodable(rank, "control exchange"));
    let message = serde_json::to_vec(&value).map_err(|_| undecodable(own_rank))?;
    let mut decide = Some(decide);
    let mut combine = |messages: Vec<Vec<u8>>| {
        let decode = |(rank, message): (usize, &Vec<u8>)| {
            serde_json::from_slice(message).map_err(|_| rank as u64)
        };
        let values = messages.iter().enumerate().map(decode).collect::<Result<Vec<T>, u64>>()?;
        let decide = decide.take().ok_or(own_rank)?;
        serde_json::to_vec(&decide(values)).map_err(|_| own_rank)
    };
    let answer = group.gather_and_broadcast_bytes(message, &mut combine)?;
    serde_json::from_slice(&answer).map_err(|_| undecodable(0))
}
