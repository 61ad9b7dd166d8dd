//! A channel: the sequence of operations that a process executes with some peers. Both sides must
//! execute the same operations in the same order, which every received frame is checked for.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use narrows_runtime::process_group::{ClusterError, ClusterFault};

use super::flight_recorder::FlightRecorder;
use super::frame::{FrameChannel, FrameHeader, FrameKind};
use super::operation::{PendingOp, WireOp};
use super::peer::{Frame, Peer};

/// CRC-32 of the concatenation of some parts.
fn crc_of<'a>(parts: impl Iterator<Item = &'a [u8]>) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    parts.for_each(|part| crc.update(part));
    crc.finalize()
}

/// One sequence of operations.
pub(crate) struct Channel {
    channel: FrameChannel,
    timeout: Duration,
    recorder: Arc<FlightRecorder>,
    sequence: AtomicU64,
}

impl Channel {
    /// A channel whose receives wait for `timeout`.
    pub fn new(channel: FrameChannel, timeout: Duration, recorder: Arc<FlightRecorder>) -> Channel {
        Channel { channel, timeout, recorder, sequence: AtomicU64::new(0) }
    }

    /// Starts the next operation, with an operand of `elements` elements.
    pub fn begin(&self, operation: WireOp, elements: usize) -> PendingOp {
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        let pending = PendingOp { operation, channel: self.channel.name(), sequence, elements };
        self.recorder.begin(pending);
        pending
    }

    /// Records the end of an operation.
    pub fn end(&self, pending: &PendingOp) {
        self.recorder.end(pending);
    }

    /// An error with the last operations of this process.
    pub fn error(&self, fault: ClusterFault) -> ClusterError {
        ClusterError { fault, recent_operations: self.recorder.lines() }
    }

    /// Sends one frame whose payload is the concatenation of `parts`.
    pub fn send<'a>(
        &self,
        peer: &Peer,
        pending: &PendingOp,
        parts: impl Iterator<Item = &'a [u8]> + Clone,
    ) -> Result<(), ClusterFault> {
        let header = FrameHeader {
            kind: FrameKind::Data,
            channel: self.channel.code(),
            operation: pending.operation.code(),
            sequence: pending.sequence,
            payload_bytes: parts.clone().map(|part| part.len() as u64).sum(),
            payload_crc: crc_of(parts.clone()),
        };
        peer.send(header, parts, || pending.to_string())
    }

    /// Receives the next frame from a peer, which must belong to the same operation and have
    /// `elements` elements, if that is known.
    pub fn receive(
        &self,
        peer: &Peer,
        pending: &PendingOp,
        elements: Option<usize>,
    ) -> Result<Frame, ClusterFault> {
        let frame = peer.receive(self.channel.code(), self.timeout, || pending.to_string())?;
        let header = frame.header;
        let matches = header.operation == pending.operation.code()
            && header.sequence == pending.sequence
            && elements.is_none_or(|elements| header.payload_bytes == 4 * elements as u64);
        if matches {
            return Ok(frame);
        }
        let peer_operation = format!(
            "{} {} over {} (a frame of {} bytes)",
            WireOp::from_code(header.operation).map_or("an unknown operation", WireOp::name),
            header.sequence,
            self.channel.name(),
            header.payload_bytes
        );
        let local_operation = pending.to_string();
        Err(ClusterFault::OperationMismatch { rank: peer.rank, peer_operation, local_operation })
    }
}
