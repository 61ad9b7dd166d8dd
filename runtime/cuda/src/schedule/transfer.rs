//! Transfers between neighbouring pipeline stages.

use std::ops::Range;

use narrows_runtime::{PipelineDirection, TimeCategory};

/// The two sides of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum P2pKind {
    /// The device receives.
    Recv,
    /// The device sends.
    Send,
}

impl P2pKind {
    /// Both kinds, in the order of their [`index`](P2pKind::index).
    pub const ALL: [P2pKind; 2] = [P2pKind::Recv, P2pKind::Send];

    /// Index of the kind in arrays.
    pub fn index(self) -> usize {
        self as usize
    }

    /// The stage on the other side of a stage's transfer, of this many stages.
    pub fn peer(self, direction: PipelineDirection, stage: u64, stages: u64) -> u64 {
        match self {
            P2pKind::Send => direction.receiver(stage, stages),
            P2pKind::Recv => direction.sender(stage, stages),
        }
    }
}

/// A send to or a receive from a neighbouring stage.
#[derive(Clone, Debug, PartialEq)]
pub struct P2pOp {
    /// Direction of the transfer.
    pub direction: PipelineDirection,
    /// Side of this device.
    pub kind: P2pKind,
    /// Ranges of the arena that are sent or received.
    pub operands: Vec<Range<u64>>,
    /// Op that the instruction belongs to, for messages.
    pub origin: String,
    /// Category of its time.
    pub category: TimeCategory,
}

impl P2pOp {
    /// Bytes of all operands.
    pub fn bytes(&self) -> u64 {
        self.operands.iter().map(|range| range.end - range.start).sum()
    }

    /// Name of the instruction.
    pub fn name(&self) -> &'static str {
        match self.kind {
            P2pKind::Send => "send",
            P2pKind::Recv => "receive",
        }
    }

    /// Whether the peer is downstream of this device: its virtual stage is the next one.
    pub fn peer_is_downstream(&self) -> bool {
        (self.direction == PipelineDirection::Downstream) == (self.kind == P2pKind::Send)
    }

    /// The stage of the peer of a device of this stage, of this many stages.
    pub fn peer(&self, stage: u64, stages: u64) -> u64 {
        self.kind.peer(self.direction, stage, stages)
    }
}
