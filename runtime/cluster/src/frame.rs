//! What goes over a connection: headers of 32 bytes, each with as many bytes after it as it says.
//! All numbers are little-endian.
//!
//! | bytes | what |
//! |---|---|
//! | 0..4 | `NRWF` |
//! | 4 | [`FrameKind`] |
//! | 5 | channel |
//! | 6..8 | what is done, see [`FrameHeader::operation`] |
//! | 8..16 | how many of this channel's operations went before |
//! | 16..24 | bytes that follow |
//! | 24..32 | zeros |

use std::io::{self, Read};

use narrows_plan::mesh::Axis;
use narrows_runtime::process_group::GroupScope;

const MAGIC: [u8; 4] = *b"NRWF";

/// Bytes of a header.
pub const HEADER_BYTES: usize = 32;

/// More than any buffer of a program: a header that says more is none.
const BYTES_MAX: u64 = 1 << 40;

/// Conversations that two processes have at the same time, each in its own order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameChannel {
    /// What all agree on through process 0.
    Control,
    /// Collectives over an axis.
    Axis(Axis),
    /// Collectives of the first and the last stage.
    Ends,
    /// Transfers between neighbouring stages.
    Transfers,
}

/// How many there are.
pub const CHANNELS: usize = 6;

impl FrameChannel {
    /// That of the collectives of a group.
    pub fn of(scope: GroupScope) -> FrameChannel {
        match scope {
            GroupScope::Axis(axis) => FrameChannel::Axis(axis),
            GroupScope::TiedStages => FrameChannel::Ends,
        }
    }

    /// Its number in headers.
    pub fn number(self) -> u8 {
        match self {
            FrameChannel::Control => 0,
            FrameChannel::Axis(Axis::Tensor) => 1,
            FrameChannel::Axis(Axis::Data) => 2,
            FrameChannel::Axis(Axis::Pipeline) => 3,
            FrameChannel::Ends => 4,
            FrameChannel::Transfers => 5,
        }
    }

    /// What is said of it.
    pub fn name(self) -> &'static str {
        match self {
            FrameChannel::Control => "all processes",
            FrameChannel::Axis(Axis::Tensor) => "the tensor axis",
            FrameChannel::Axis(Axis::Data) => "the data axis",
            FrameChannel::Axis(Axis::Pipeline) => "the pipeline axis",
            FrameChannel::Ends => "the first and the last stage",
            FrameChannel::Transfers => "the pipeline",
        }
    }
}

/// What a frame is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameKind {
    /// An operation's numbers.
    Data,
    /// The sender ends the run; the bytes say who began, and why.
    GiveUp,
    /// The sender is done, and will close the connection.
    Done,
}

/// What comes before the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    pub subject: FrameKind,
    pub channel: u8,
    /// What the sender does: those who meet must do the same.
    pub operation: u16,
    pub sequence: u64,
    pub bytes: u64,
}

impl FrameHeader {
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut made = [0; HEADER_BYTES];
        made[..4].copy_from_slice(&MAGIC);
        made[4] = match self.subject {
            FrameKind::Data => 0,
            FrameKind::GiveUp => 1,
            FrameKind::Done => 2,
        };
        made[5] = self.channel;
        made[6..8].copy_from_slice(&self.operation.to_le_bytes());
        made[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        made[16..24].copy_from_slice(&self.bytes.to_le_bytes());
        made
    }

    /// `None` when these bytes are no header.
    fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<FrameHeader> {
        let number = |from: usize| {
            let mut eight = [0; 8];
            eight.copy_from_slice(&bytes[from..from + 8]);
            u64::from_le_bytes(eight)
        };
        let subject = match bytes[4] {
            0 => FrameKind::Data,
            1 => FrameKind::GiveUp,
            2 => FrameKind::Done,
            _ => return None,
        };
        let header = FrameHeader {
            subject,
            channel: bytes[5],
            operation: u16::from_le_bytes([bytes[6], bytes[7]]),
            sequence: number(8),
            bytes: number(16),
        };
        let known = bytes[..4] == MAGIC
            && usize::from(header.channel) < CHANNELS
            && header.bytes <= BYTES_MAX;
        known.then_some(header)
    }

    /// The next header of a connection; `None` at its end.
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
        let unknown = || io::Error::new(io::ErrorKind::InvalidData, "it sends what is no frame");
        FrameHeader::decode(&bytes).map(Some).ok_or_else(unknown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_come_back_and_noise_is_refused() {
        let header = FrameHeader {
            subject: FrameKind::Data,
            channel: 5,
            operation: 258,
            sequence: 7,
            bytes: 4096,
        };
        let bytes = header.encode();
        assert_eq!(FrameHeader::read(&mut &bytes[..]).unwrap(), Some(header));
        assert_eq!(FrameHeader::read(&mut &[][..]).unwrap(), None);
        assert!(FrameHeader::read(&mut &bytes[..9]).is_err(), "cut off");
        for at in [0, 4, 5, 23] {
            let mut damaged = bytes;
            damaged[at] ^= 0x80;
            assert!(FrameHeader::read(&mut &damaged[..]).is_err(), "byte {at}");
        }
    }
}
