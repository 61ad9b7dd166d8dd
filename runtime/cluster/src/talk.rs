//! A conversation on one channel: what is sent and received in turn, and that both sides do the same.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use narrows_plan::kernel::CollectiveKind;
use narrows_plan::program::Reduction;
use narrows_runtime::process_group::{ClusterError, ClusterFault};

use super::frame::{Channel, Header, Subject};
use super::journal::{Doing, Journal};
use super::peer::{Frame, Peer};

/// What processes do together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    AllReduce,
    AllReduceMaximum,
    ReduceScatter,
    AllGather,
    AllToAll,
    Send,
    Receive,
    Agreement,
    Collection,
}

impl Operation {
    const ALL: [Operation; 9] = [
        Operation::AllReduce,
        Operation::AllReduceMaximum,
        Operation::ReduceScatter,
        Operation::AllGather,
        Operation::AllToAll,
        Operation::Send,
        Operation::Receive,
        Operation::Agreement,
        Operation::Collection,
    ];

    /// That of a collective.
    pub fn of(kind: CollectiveKind, reduction: Reduction) -> Operation {
        match (kind, reduction) {
            (CollectiveKind::AllReduce, Reduction::Sum) => Operation::AllReduce,
            (CollectiveKind::AllReduce, Reduction::Maximum) => Operation::AllReduceMaximum,
            (CollectiveKind::ReduceScatter, _) => Operation::ReduceScatter,
            (CollectiveKind::AllGather, _) => Operation::AllGather,
            (CollectiveKind::AllToAll, _) => Operation::AllToAll,
        }
    }

    /// What is said of it.
    pub fn name(self) -> &'static str {
        match self {
            Operation::AllReduce => "all-reduce",
            Operation::AllReduceMaximum => "all-reduce of maxima",
            Operation::ReduceScatter => "reduce-scatter",
            Operation::AllGather => "all-gather",
            Operation::AllToAll => "all-to-all",
            Operation::Send => "send",
            Operation::Receive => "receive",
            Operation::Agreement => "agreement",
            Operation::Collection => "collection",
        }
    }

    /// Its number in headers: what is sent is what is received.
    fn number(self) -> u16 {
        if self == Operation::Receive { Operation::Send as u16 } else { self as u16 }
    }
}

/// One conversation.
pub struct Talk {
    channel: Channel,
    deadline: Duration,
    journal: Arc<Journal>,
    sequence: AtomicU64,
}

impl Talk {
    /// One in which the other side is waited for as long as the deadline says.
    pub fn new(channel: Channel, deadline: Duration, journal: Arc<Journal>) -> Talk {
        Talk { channel, deadline, journal, sequence: AtomicU64::new(0) }
    }

    /// The next operation begins, with so many numbers of this process's.
    pub fn begin(&self, operation: Operation, numbers: usize) -> Doing {
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        let doing = Doing { operation, over: self.channel.name(), sequence, numbers };
        self.journal.begin(doing);
        doing
    }

    /// It has ended.
    pub fn end(&self) {
        self.journal.end();
    }

    /// An error with the last operations of this process.
    pub fn error(&self, fault: ClusterFault) -> ClusterError {
        ClusterError { fault, recent: self.journal.lines() }
    }

    /// Sends these bytes, one part after the other.
    pub fn send<'a>(
        &self,
        peer: &Peer,
        doing: &Doing,
        parts: impl Iterator<Item = &'a [u8]> + Clone,
    ) -> Result<(), ClusterFault> {
        let header = Header {
            subject: Subject::Data,
            channel: self.channel.number(),
            operation: doing.operation.number(),
            sequence: doing.sequence,
            bytes: parts.clone().map(|part| part.len() as u64).sum(),
        };
        peer.send(header, parts, || doing.to_string())
    }

    /// What comes next from another, which must be of the same operation, and as many numbers if that
    /// is known.
    pub fn receive(
        &self,
        peer: &Peer,
        doing: &Doing,
        numbers: Option<usize>,
    ) -> Result<Frame, ClusterFault> {
        let frame = peer.receive(self.channel.number(), self.deadline, || doing.to_string())?;
        let found = frame.header;
        let alike = found.operation == doing.operation.number()
            && found.sequence == doing.sequence
            && numbers.is_none_or(|numbers| found.bytes == 4 * numbers as u64);
        if alike {
            return Ok(frame);
        }
        let known = Operation::ALL.into_iter().find(|known| known.number() == found.operation);
        let theirs = format!(
            "{} {} over {} (a part of {} bytes)",
            known.map_or("something unknown", Operation::name),
            found.sequence,
            self.channel.name(),
            found.bytes
        );
        Err(ClusterFault::OutOfStep { rank: peer.rank, theirs, ours: doing.to_string() })
    }
}
