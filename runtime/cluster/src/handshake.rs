//! The first bytes of a connection: both sides prove that they belong to the job, before either sends or reserves more.
//!
//! | sender | bytes | contents |
//! |---|---|---|
//! | initiator | 8, 16 | [`MAGIC`], its nonce |
//! | responder | 8, 16, 32 | [`MAGIC`], its nonce, its proof |
//! | initiator | 32 | its proof |
//!
//! Messages follow. Each is JSON after a header of three numbers (u32, little-endian): the length of the text, its CRC-32, and
//! the CRC-32 of these two. A side that receives damaged bytes closes the connection, and the initiator connects again. The last
//! bytes of an exchange cannot be answered, so they are a single byte of any value, which confirms the message before it.
//!
//! A stranger is disconnected and the responder listens on. Every handshake has one deadline, however slowly its bytes arrive.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::job_token::{JobToken, NONCE_BYTES, Nonce, PROOF_BYTES, Proof, Role, new_nonce};

/// Start of the bytes of either side.
const MAGIC: [u8; 8] = *b"narrows\x03";

/// Bytes before an initiator's message: magic bytes, nonce and proof.
const HEAD_BYTES: usize = MAGIC.len() + NONCE_BYTES;

/// Bytes of a responder.
const RESPONDER_BYTES: usize = HEAD_BYTES + PROOF_BYTES;

/// Bytes of the header of a message.
const HEADER_BYTES: usize = 12;

/// Longest message: the addresses of many processes.
const MESSAGE_BYTES_MAX: u32 = 64 << 20;

/// Time that a whole handshake may take, with the initiator's first message.
pub(crate) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Concurrent handshakes: further initiators are accepted when others have ended.
const HANDSHAKES_MAX: usize = 1024;

/// Pause of loops between attempts.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A stream whose reads all end at one deadline.
struct Until<'s> {
    stream: &'s TcpStream,
    deadline: Instant,
}

impl Read for Until<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let remaining = self.deadline.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(remaining))?;
        (&mut &*self.stream).read(buffer)
    }
}

fn invalid(problem: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem)
}

/// The nonce of the other side, after its magic bytes; `None` without these.
fn nonce_of(head: &[u8]) -> Option<Nonce> {
    let nonce = head.strip_prefix(&MAGIC)?.get(..NONCE_BYTES)?;
    let mut copy = Nonce::default();
    copy.copy_from_slice(nonce);
    Some(copy)
}

/// The initiator's side of a handshake.
///
/// # Errors
/// The responder is another program or belongs to another job, or does not answer until the deadline.
pub(crate) fn introduce(
    stream: &mut TcpStream,
    token: &JobToken,
    deadline: Instant,
) -> io::Result<()> {
    let initiator = new_nonce();
    stream.write_all(&[&MAGIC[..], &initiator].concat())?;
    let mut answer = [0; RESPONDER_BYTES];
    Until { stream, deadline }.read_exact(&mut answer)?;
    let (head, proof) = answer.split_at(HEAD_BYTES);
    let responder = nonce_of(head)
        .ok_or_else(|| invalid("another program, or another version of this one, listens there"))?;
    let mut copy = Proof::default();
    copy.copy_from_slice(proof);
    if !token.verify(&copy, Role::Responder, &initiator, &responder) {
        return Err(invalid("a process of another job listens there: its job token differs"));
    }
    stream.write_all(&token.prove(Role::Initiator, &initiator, &responder))
}

/// Length and checksum of a message.
#[derive(Clone, Copy)]
struct MessageHeader {
    bytes: u32,
    crc: u32,
}

impl MessageHeader {
    fn of(message: &[u8]) -> MessageHeader {
        MessageHeader { bytes: message.len() as u32, crc: crc32fast::hash(message) }
    }

    fn encode(self) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        header[..4].copy_from_slice(&self.bytes.to_le_bytes());
        header[4..8].copy_from_slice(&self.crc.to_le_bytes());
        let crc = crc32fast::hash(&header[..8]);
        header[8..].copy_from_slice(&crc.to_le_bytes());
        header
    }

    /// The header in the first [`HEADER_BYTES`] of `header`. A message has a byte at least, because JSON is never empty.
    fn decode(header: &[u8]) -> io::Result<MessageHeader> {
        let number = |index: usize| {
            let mut four = [0; 4];
            four.copy_from_slice(&header[4 * index..4 * index + 4]);
            u32::from_le_bytes(four)
        };
        let decoded = MessageHeader { bytes: number(0), crc: number(1) };
        match decoded.bytes {
            1..=MESSAGE_BYTES_MAX if decoded.encode()[..] == header[..HEADER_BYTES] => Ok(decoded),
            _ => Err(invalid("the header of a message from it is damaged")),
        }
    }

    fn verify(self, message: &[u8]) -> io::Result<()> {
        match crc32fast::hash(message) == self.crc {
            true => Ok(()),
            false => Err(invalid("a message from it is damaged")),
        }
    }
}

/// Sends a message.
pub(crate) fn send_message(stream: &mut TcpStream, message: &impl Serialize) -> io::Result<()> {
    let message = serde_json::to_vec(message)?;
    stream.write_all(&[&MessageHeader::of(&message).encode()[..], &message].concat())
}

/// Receives a message before a deadline.
pub(crate) fn read_message<T: DeserializeOwned>(
    stream: &TcpStream,
    deadline: Instant,
) -> io::Result<T> {
    let mut from = Until { stream, deadline };
    let mut header = [0; HEADER_BYTES];
    from.read_exact(&mut header)?;
    let header = MessageHeader::decode(&header)?;
    let mut message = vec![];
    // Memory grows with the bytes that arrive.
    if from.take(header.bytes.into()).read_to_end(&mut message)? < header.bytes as usize {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    header.verify(&message)?;
    Ok(serde_json::from_slice(&message)?)
}

/// Confirms that the last message has arrived undamaged. The value of the byte has no meaning, so that a damaged one confirms it
/// too.
pub(crate) fn send_confirmation(stream: &mut TcpStream) -> io::Result<()> {
    stream.write_all(&[1])
}

/// Waits until a deadline for the confirmation of a message.
pub(crate) fn read_confirmation(stream: &TcpStream, deadline: Instant) -> io::Result<()> {
    Until { stream, deadline }.read_exact(&mut [0])
}

/// Whether a stream that does not block has the confirmation of a message.
pub(crate) fn has_confirmation(stream: &mut TcpStream) -> io::Result<bool> {
    match stream.read(&mut [0]) {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(_) => Ok(true),
        Err(error) if is_not_yet(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether a stream that does not block has no bytes at the moment.
fn is_not_yet(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Accepts initiators and reads their first messages without blocking, so that a silent or slow one keeps no other out.
pub(crate) struct Listener {
    listener: TcpListener,
    token: JobToken,
    handshakes: Vec<Handshake>,
    turned_away: Vec<TurnedAway>,
}

/// An initiator that was disconnected.
#[derive(Debug)]
pub(crate) struct TurnedAway {
    /// Address of the initiator.
    pub address: SocketAddr,
    /// The reason, a sentence whose subject is the initiator.
    pub reason: String,
}

/// An initiator whose first message has not been read completely.
struct Handshake {
    stream: TcpStream,
    address: SocketAddr,
    start: Instant,
    responder: Nonce,
    state: HandshakeState,
    received: Vec<u8>,
}

/// Part of a handshake that is read next.
#[derive(Clone, Copy)]
enum HandshakeState {
    Head,
    Proof { initiator: Nonce },
    Header,
    Message { header: MessageHeader },
}

impl Listener {
    /// Takes over a listener that does not block.
    pub fn new(listener: TcpListener, token: JobToken) -> Listener {
        Listener { listener, token, handshakes: vec![], turned_away: vec![] }
    }

    /// The initiators that the last [`poll`](Listener::poll) has disconnected.
    pub fn turned_away(&self) -> &[TurnedAway] {
        &self.turned_away
    }

    /// The next initiator of the job with its message; strangers are disconnected. Sleeps and returns `None` when there is
    /// none at the moment.
    pub fn poll<T: DeserializeOwned>(&mut self) -> Option<(TcpStream, T, IpAddr)> {
        while self.handshakes.len() < HANDSHAKES_MAX {
            let Ok((stream, address)) = self.listener.accept() else { break };
            if stream.set_nonblocking(true).is_ok() {
                self.handshakes.push(Handshake::new(stream, address));
            }
        }
        self.turned_away.clear();
        let mut index = 0;
        while index < self.handshakes.len() {
            let error = match self.handshakes[index].advance(&self.token) {
                Ok(false) if self.handshakes[index].start.elapsed() < HANDSHAKE_TIMEOUT => {
                    index += 1;
                    continue;
                }
                Ok(false) => io::ErrorKind::TimedOut.into(),
                Err(error) => error,
                Ok(true) => {
                    let Handshake { stream, address, received, .. } =
                        self.handshakes.swap_remove(index);
                    match serde_json::from_slice(&received) {
                        Ok(message) if stream.set_nonblocking(false).is_ok() => {
                            return Some((stream, message, address.ip()));
                        }
                        Ok(_) => continue,
                        Err(_) => {
                            let reason = "its message is none of this program".into();
                            self.turned_away.push(TurnedAway { address, reason });
                            continue;
                        }
                    }
                }
            };
            let Handshake { address, state, .. } = self.handshakes.swap_remove(index);
            self.turned_away.push(TurnedAway { address, reason: refusal(&error, state) });
        }
        std::thread::sleep(POLL_INTERVAL);
        None
    }
}

/// Reason why an initiator is disconnected, whose handshake has come to this state.
fn refusal(error: &io::Error, state: HandshakeState) -> String {
    match (error.kind(), state) {
        (
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset,
            HandshakeState::Proof { .. },
        ) => "it closed the connection when it had the proof of this process: its job token may \
              differ"
            .into(),
        (io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset, _) => {
            "it closed the connection before it had proved itself".into()
        }
        (io::ErrorKind::TimedOut, _) => {
            format!("it did not prove itself within {} s", HANDSHAKE_TIMEOUT.as_secs())
        }
        _ => error.to_string(),
    }
}

impl Handshake {
    fn new(stream: TcpStream, address: SocketAddr) -> Handshake {
        let (start, responder) = (Instant::now(), new_nonce());
        Handshake {
            stream,
            address,
            start,
            responder,
            state: HandshakeState::Head,
            received: vec![],
        }
    }

    /// Reads what has arrived and answers it. Returns whether the message is complete.
    fn advance(&mut self, token: &JobToken) -> io::Result<bool> {
        loop {
            let expected = match self.state {
                HandshakeState::Head => HEAD_BYTES,
                HandshakeState::Proof { .. } => PROOF_BYTES,
                HandshakeState::Header => HEADER_BYTES,
                HandshakeState::Message { header } => header.bytes as usize,
            };
            let mut buffer = [0; 4096];
            let room = buffer.len().min(expected - self.received.len());
            match self.stream.read(&mut buffer[..room]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.received.extend_from_slice(&buffer[..count]),
                Err(error) if is_not_yet(&error) => return Ok(false),
                Err(error) => return Err(error),
            }
            if self.received.len() == expected {
                match self.complete(token)? {
                    Some(state) => self.state = state,
                    None => return Ok(true),
                }
                self.received.clear();
            }
        }
    }

    /// The next state; `None` after the message.
    fn complete(&mut self, token: &JobToken) -> io::Result<Option<HandshakeState>> {
        let received = &self.received;
        Ok(Some(match self.state {
            HandshakeState::Head => {
                let initiator = nonce_of(received).ok_or_else(|| {
                    invalid("it is another program, or another version of this one")
                })?;
                let proof = token.prove(Role::Responder, &initiator, &self.responder);
                // Fits the empty buffer of a new connection.
                self.stream.write_all(&[&MAGIC[..], &self.responder, &proof].concat())?;
                HandshakeState::Proof { initiator }
            }
            HandshakeState::Proof { initiator } => {
                let mut proof = Proof::default();
                proof.copy_from_slice(received);
                if !token.verify(&proof, Role::Initiator, &initiator, &self.responder) {
                    return Err(invalid("it belongs to another job: its job token differs"));
                }
                HandshakeState::Header
            }
            HandshakeState::Header => {
                HandshakeState::Message { header: MessageHeader::decode(received)? }
            }
            HandshakeState::Message { header } => {
                header.verify(received)?;
                return Ok(None);
            }
        }))
    }
}
