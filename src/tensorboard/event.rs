//! Events in the encoding of protocol buffers.
//!
//! Fields of TensorFlow's `event.proto` and `summary.proto`, by number and type:
//!
//! | message | fields |
//! |---|---|
//! | `Event` | 1 `wall_time` double, 2 `step` int64, 3 `file_version` string, 5 `summary`, 7 `session_log` |
//! | `Summary` | 1 `value`, repeated |
//! | `Summary.Value` | 1 `tag` string, 2 `simple_value` float |
//! | `SessionLog` | 1 `status` enum, of which 1 is `START` |

use std::time::Duration;

/// The first event of a file states this version.
const FILE_VERSION: &str = "brain.Event:2";

/// `SessionLog.START`.
const SESSION_START: u64 = 1;

/// Contents of an event.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Event<'a> {
    /// The version of the file.
    Version,
    /// Events of earlier files end before this step.
    Start {
        /// The first step of the file.
        step: u64,
    },
    /// Values of a step.
    Scalars {
        /// The step.
        step: u64,
        /// Tags and values.
        scalars: Vec<(&'a str, f64)>,
    },
}

impl Event<'_> {
    /// The message, with its time since 1970.
    pub fn encode(&self, time: Duration) -> Vec<u8> {
        let mut event = Message::default();
        event.double(1, time.as_secs_f64());
        match self {
            Event::Version => event.bytes(3, FILE_VERSION.as_bytes()),
            Event::Start { step } => {
                let mut log = Message::default();
                log.integer(1, SESSION_START);
                event.integer(2, *step);
                event.bytes(7, &log.0);
            }
            Event::Scalars { step, scalars } => {
                let mut summary = Message::default();
                for (tag, value) in scalars {
                    let mut scalar = Message::default();
                    scalar.bytes(1, tag.as_bytes());
                    scalar.float(2, *value as f32);
                    summary.bytes(1, &scalar.0);
                }
                event.integer(2, *step);
                event.bytes(5, &summary.0);
            }
        }
        event.0
    }
}

/// Fields of events that begin a file: 1 to 3, 7, and 10, `source_metadata`, which other programs add.
const HEADER_FIELDS: [u64; 5] = [1, 2, 3, 7, 10];

/// Whether an encoded event only begins a file: nothing that TensorBoard would draw.
pub(super) fn is_header(event: &[u8]) -> bool {
    fields(event).is_some_and(|fields| fields.iter().all(|field| HEADER_FIELDS.contains(field)))
}

/// Numbers of the fields of an encoded message; `None` for other bytes.
fn fields(mut message: &[u8]) -> Option<Vec<u64>> {
    let mut fields = vec![];
    while !message.is_empty() {
        let key = varint(&mut message)?;
        let length = match key & 7 {
            0 => varint(&mut message).map(|_| 0)?,
            1 => 8,
            2 => varint(&mut message)?,
            5 => 4,
            _ => return None,
        };
        message = message.get(usize::try_from(length).ok()?..)?;
        fields.push(key >> 3);
    }
    Some(fields)
}

/// Reads a number from the start of a message, as [`Message::varint`] writes it.
fn varint(message: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = message.split_first()?;
        *message = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// An encoded message. A field is a key, 8 times its number plus its wire type, and the value.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn key(&mut self, field: u64, wire_type: u64) {
        self.varint(field << 3 | wire_type);
    }

    /// Seven bits a byte, the lowest first; the eighth says that more follow.
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn integer(&mut self, field: u64, value: u64) {
        self.key(field, 0);
        self.varint(value);
    }

    fn double(&mut self, field: u64, value: f64) {
        self.key(field, 1);
        self.0.extend(value.to_le_bytes());
    }

    /// A string or a message.
    fn bytes(&mut self, field: u64, value: &[u8]) {
        self.key(field, 2);
        self.varint(value.len() as u64);
        self.0.extend(value);
    }

    fn float(&mut self, field: u64, value: f32) {
        self.key(field, 5);
        self.0.extend(value.to_le_bytes());
    }
}
