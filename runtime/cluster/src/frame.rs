//! The wire format of a connection: frames of a 32-byte header and a payload. Integers are
//! little-endian.
//!
//! | bytes | contents |
//! |---|---|
//! | 0..4 | `NRWF` |
//! | 4 | [`FrameKind`] |
//! | 5 | code of the [`FrameChannel`] |
//! | 6..8 | code of the operation |
//! | 8..16 | number of earlier operations of the channel |
//! | 16..24 | bytes of the payload |
//! | 24..28 | CRC-32 of the payload |
//! | 28..32 | CRC-32 of bytes 0 to 27 |

use std::io::{self, Read};

use narrows_plan::Axis;
use narrows_runtime::PipelineDirection;
use narrows_runtime::process_group::{GroupScope, excerpt};

const MAGIC: [u8; 4] = *b"NRWF";

/// Bytes of a header.
pub(crate) const HEADER_BYTES: usize = 32;

/// Larger than any buffer of a program: headers of larger payloads are rejected.
const PAYLOAD_BYTES_MAX: u64 = 1 << 40;

/// Longest payload of frames that belong to no operation.
const CONTROL_BYTES_MAX: u64 = 64 << 10;

/// Bytes of a header before its own checksum.
const CHECKED_BYTES: usize = 28;

/// Independent sequences of operations between two processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FrameChannel {
    /// Control exchanges and gathering through rank 0.
    Control,
    /// Collectives along an axis.
    Axis(Axis),
    /// Collectives of the first and the last stage.
    TiedStages,
    /// Collectives of the replicas that share one copy of the states that ZeRO shards.
    ShardGroup,
    /// Collectives of the replicas that hold the same shard.
    ShardReplicas,
    /// Transfers between neighbouring stages in one direction.
    Transfers(PipelineDirection),
}

/// Number of channels.
pub(crate) const CHANNEL_COUNT: usize = 10;

impl FrameChannel {
    /// The channel of a device group's collectives.
    pub fn of_scope(scope: GroupScope) -> FrameChannel {
        match scope {
            GroupScope::Axis(axis) => FrameChannel::Axis(axis),
            GroupScope::TiedStages => FrameChannel::TiedStages,
            GroupScope::ShardGroup => FrameChannel::ShardGroup,
            GroupScope::ShardReplicas => FrameChannel::ShardReplicas,
        }
    }

    /// The code in headers.
    pub fn code(self) -> u8 {
        match self {
            FrameChannel::Control => 0,
            FrameChannel::Axis(Axis::Tensor) => 1,
            FrameChannel::Axis(Axis::Data) => 2,
            FrameChannel::Axis(Axis::Pipeline) => 3,
            FrameChannel::TiedStages => 4,
            FrameChannel::Transfers(PipelineDirection::Downstream) => 5,
            FrameChannel::ShardGroup => 6,
            FrameChannel::ShardReplicas => 7,
            FrameChannel::Transfers(PipelineDirection::Upstream) => 8,
            FrameChannel::Axis(Axis::Context) => 9,
        }
    }

    /// Name in messages: the processes that take part.
    pub fn name(self) -> &'static str {
        match self {
            FrameChannel::Control => "all processes",
            FrameChannel::Axis(Axis::Tensor) => "the tensor axis",
            FrameChannel::Axis(Axis::Context) => "the context axis",
            FrameChannel::Axis(Axis::Data) => "the data axis",
            FrameChannel::Axis(Axis::Pipeline) => "the pipeline axis",
            FrameChannel::TiedStages => "the first and the last stage",
            FrameChannel::Transfers(_) => "the pipeline",
            FrameChannel::ShardGroup => "the shard group",
            FrameChannel::ShardReplicas => "the replicas of a shard",
        }
    }
}

/// Meaning of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FrameKind {
    /// The payload belongs to an operation.
    Data,
    /// The sender aborts the run; the payload is the rank that failed first and its reason, as text.
    Abort,
    /// The sender has finished and will close the connection.
    Shutdown,
    /// The sender has waited for long, and asks what the receiver is doing.
    StatusRequest,
    /// The sender answers a status request; its activity is in the place of the sequence number.
    StatusReply,
}

impl FrameKind {
    /// All kinds, by their code in headers.
    const ALL: [FrameKind; 5] = [
        FrameKind::Data,
        FrameKind::Abort,
        FrameKind::Shutdown,
        FrameKind::StatusRequest,
        FrameKind::StatusReply,
    ];
}

/// Header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FrameHeader {
    pub kind: FrameKind,
    /// Code of the channel.
    pub channel: u8,
    /// Code of the sender's operation, which must be that of the receiver.
    pub operation: u16,
    /// Number of earlier operations of the channel.
    pub sequence: u64,
    /// Bytes of the payload.
    pub payload_bytes: u64,
    /// CRC-32 of the payload.
    pub payload_crc: u32,
}

impl FrameHeader {
    /// Header of a frame that belongs to no operation.
    pub fn control(kind: FrameKind, payload: &[u8]) -> FrameHeader {
        let (payload_bytes, payload_crc) = (payload.len() as u64, crc32fast::hash(payload));
        FrameHeader { kind, channel: 0, operation: 0, sequence: 0, payload_bytes, payload_crc }
    }

    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = self.kind as u8;
        bytes[5] = self.channel;
        bytes[6..8].copy_from_slice(&self.operation.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.payload_bytes.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.payload_crc.to_le_bytes());
        let crc = crc32fast::hash(&bytes[..CHECKED_BYTES]);
        bytes[CHECKED_BYTES..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// `None` when the bytes are not a valid header.
    fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<FrameHeader> {
        let u64_at = |offset: usize| {
            let mut eight = [0; 8];
            eight.copy_from_slice(&bytes[offset..offset + 8]);
            u64::from_le_bytes(eight)
        };
        let u32_at = |offset: usize| {
            let mut four = [0; 4];
            four.copy_from_slice(&bytes[offset..offset + 4]);
            u32::from_le_bytes(four)
        };
        let kind = *FrameKind::ALL.get(usize::from(bytes[4]))?;
        let header = FrameHeader {
            kind,
            channel: bytes[5],
            operation: u16::from_le_bytes([bytes[6], bytes[7]]),
            sequence: u64_at(8),
            payload_bytes: u64_at(16),
            payload_crc: u32_at(24),
        };
        let bytes_max = if kind == FrameKind::Data { PAYLOAD_BYTES_MAX } else { CONTROL_BYTES_MAX };
        let valid = bytes[..4] == MAGIC
            && u32_at(CHECKED_BYTES) == crc32fast::hash(&bytes[..CHECKED_BYTES])
            && usize::from(header.channel) < CHANNEL_COUNT
            && header.payload_bytes <= bytes_max;
        valid.then_some(header)
    }

    /// Reads the next header of a connection; `None` at its end.
    pub fn read(from: &mut impl Read) -> io::Result<Option<FrameHeader>> {
        let mut bytes = [0; HEADER_BYTES];
        let mut filled = 0;
        while filled < HEADER_BYTES {
            match from.read(&mut bytes[filled..]) {
                Ok(0) if filled == 0 => return Ok(None),
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        let invalid =
            || io::Error::new(io::ErrorKind::InvalidData, "a frame header from it is damaged");
        FrameHeader::decode(&bytes).map(Some).ok_or_else(invalid)
    }
}

/// A frame that tells the receiver that `rank` aborts the run, and why.
pub(crate) fn abort_frame(rank: u64, reason: &str) -> Vec<u8> {
    let payload = format!("{rank} {}", excerpt(reason));
    let header = FrameHeader::control(FrameKind::Abort, payload.as_bytes());
    [&header.encode()[..], payload.as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_round_trip_and_invalid_ones_are_rejected() {
        let header = FrameHeader {
            kind: FrameKind::Data,
            channel: 5,
            operation: 258,
            sequence: 7,
            payload_bytes: 4096,
            payload_crc: 99,
        };
        let bytes = header.encode();
        assert_eq!(FrameHeader::read(&mut &bytes[..]).unwrap(), Some(header));
        assert_eq!(FrameHeader::read(&mut &[][..]).unwrap(), None);
        assert!(FrameHeader::read(&mut &bytes[..9]).is_err(), "truncated");
        for bit in 0..8 * HEADER_BYTES {
            let mut damaged = bytes;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(FrameHeader::read(&mut &damaged[..]).is_err(), "bit {bit}");
        }
        let abort = FrameHeader { kind: FrameKind::Abort, payload_bytes: 1 << 20, ..header };
        assert!(FrameHeader::read(&mut &abort.encode()[..]).is_err(), "a reason of 1 MiB");
    }
}
