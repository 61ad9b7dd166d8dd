//! A conversation on one channel: what is sent and received in turn, and that both sides do the same.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use narrows_plan::kernel::CollectiveKind;
use narrows_plan::program::Reduction;
use narrows_runtime::process_group::{ClusterError, ClusterFault};

use super::frame::{FrameChannel, FrameHeader, FrameKind};
use super::journal::{FlightRecorder, PendingOp};
use super::peer::{Frame, Peer};

/// What processes do together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WireOp {
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

impl WireOp {
    const ALL: [WireOp; 9] = [
        WireOp::AllReduce,
        WireOp::AllReduceMaximum,
        WireOp::ReduceScatter,
        WireOp::AllGather,
        WireOp::AllToAll,
        WireOp::Send,
        WireOp::Receive,
        WireOp::Agreement,
        WireOp::Collection,
    ];

    /// That of a collective.
    pub fn of(kind: CollectiveKind, reduction: Reduction) -> WireOp {
        match (kind, reduction) {
            (CollectiveKind::AllReduce, Reduction::Sum) => WireOp::AllReduce,
            (CollectiveKind::AllReduce, Reduction::Maximum) => WireOp::AllReduceMaximum,
            (CollectiveKind::ReduceScatter, _) => WireOp::ReduceScatter,
            (CollectiveKind::AllGather, _) => WireOp::AllGather,
            (CollectiveKind::AllToAll, _) => WireOp::AllToAll,
        }
    }

    /// What is said of it.
    pub fn name(self) -> &'static str {
        match self {
            WireOp::AllReduce => "all-reduce",
            WireOp::AllReduceMaximum => "all-reduce of maxima",
            WireOp::ReduceScatter => "reduce-scatter",
            WireOp::AllGather => "all-gather",
            WireOp::AllToAll => "all-to-all",
            WireOp::Send => "send",
            WireOp::Receive => "receive",
            WireOp::Agreement => "agreement",
            WireOp::Collection => "collection",
        }
    }

    /// Its number in headers: what is sent is what is received.
    fn number(self) -> u16 {
        if self == WireOp::Receive { WireOp::Send as u16 } else { self as u16 }
    }
}

/// One conversation.
pub struct Channel {
    channel: FrameChannel,
    deadline: Duration,
    journal: Arc<FlightRecorder>,
    sequence: AtomicU64,
}

impl Channel {
    /// One in which the other side is waited for as long as the deadline says.
    pub fn new(channel: FrameChannel, deadline: Duration, journal: Arc<FlightRecorder>) -> Channel {
        Channel { channel, deadline, journal, sequence: AtomicU64::new(0) }
    }

    /// The next operation begins, with so many numbers of this process's.
    pub fn begin(&self, operation: WireOp, numbers: usize) -> PendingOp {
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        let doing = PendingOp { operation, over: self.channel.name(), sequence, numbers };
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
        doing: &PendingOp,
        parts: impl Iterator<Item = &'a [u8]> + Clone,
    ) -> Result<(), ClusterFault> {
        let header = FrameHeader {
            subject: FrameKind::Data,
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
        doing: &PendingOp,
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
        let known = WireOp::ALL.into_iter().find(|known| known.number() == found.operation);
        let theirs = format!(
            "{} {} over {} (a part of {} bytes)",
            known.map_or("something unknown", WireOp::name),
            found.sequence,
            self.channel.name(),
            found.bytes
        );
        Err(ClusterFault::OutOfStep { rank: peer.rank, theirs, ours: doing.to_string() })
    }
}
