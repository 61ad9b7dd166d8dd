//! A connection with another process. A thread of its own receives all frames, so that two processes
//! can send to each other at the same time, however large the payloads.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use narrows_runtime::process_group::{ClusterFault, excerpt};

use super::activity::{Activity, CurrentActivity};
use super::frame::{CHANNEL_COUNT, FrameHeader, FrameKind, abort_frame};
use super::wait::{Wait, WaitStep};

/// Elements that are read from the connection at once.
const READ_ELEMENTS: usize = 4 << 20;

/// Time that the last frame of a process that aborts waits for the write of another thread to end.
const LAST_WRITE_TIMEOUT: Duration = Duration::from_millis(500);

/// Time that a failed write waits for the peer's reason to arrive.
const REASON_TIMEOUT: Duration = Duration::from_millis(500);

/// A received frame.
pub(crate) struct Frame {
    pub header: FrameHeader,
    /// The payload, padded to whole elements.
    elements: Vec<f32>,
}

impl Frame {
    /// The payload as elements.
    pub fn elements(&self) -> &[f32] {
        &self.elements
    }

    /// The payload as bytes.
    pub fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.elements)[..self.header.payload_bytes as usize]
    }
}

/// Another process.
pub(crate) struct Peer {
    pub rank: u64,
    stream: TcpStream,
    shared: Arc<PeerShared>,
}

/// State shared with the receiving thread.
struct PeerShared {
    writer: Mutex<TcpStream>,
    inbox: Mutex<Inbox>,
    changed: Condvar,
    /// The present activity of this process.
    activity: Arc<CurrentActivity>,
}

struct Inbox {
    /// Received frames, by channel.
    frames: [VecDeque<Frame>; CHANNEL_COUNT],
    /// Memory of recycled frames.
    free: Vec<Vec<f32>>,
    /// The last arrival of any bytes of a frame.
    last_receive: Instant,
    /// The last reply to a status request, and the number of replies: two threads may wait for one.
    answer: Activity,
    answers: u64,
    disconnect: Option<Disconnect>,
}

/// Reason why no more frames will arrive.
#[derive(Clone, Debug)]
enum Disconnect {
    /// The peer has finished.
    Shutdown,
    /// The peer aborted the run.
    Aborted { rank: u64, reason: String },
    /// The connection broke.
    Broken(String),
}

impl PeerShared {
    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes a frame that belongs to no operation, unless another is being written: its peer then sees bytes arrive, and
    /// waiting here could keep both sides from reading.
    fn try_send(&self, header: FrameHeader, payload: &[u8]) {
        self.try_write(&[&header.encode()[..], payload].concat());
    }

    /// Writes a frame unless another is being written. Returns whether it tried to.
    fn try_write(&self, frame: &[u8]) -> bool {
        let Ok(mut writer) = self.writer.try_lock() else { return false };
        let _ = writer.write_all(frame);
        true
    }
}

impl Peer {
    /// Takes over a connection. A write that does not end within the timeout fails.
    /// `activity` is what this process is doing.
    pub fn new(
        rank: u64,
        stream: TcpStream,
        write_timeout: Duration,
        activity: Arc<CurrentActivity>,
    ) -> io::Result<Peer> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(None)?;
        stream.set_write_timeout(Some(write_timeout))?;
        let inbox = Inbox {
            frames: Default::default(),
            free: vec![],
            last_receive: Instant::now(),
            answer: Activity::Computing,
            answers: 0,
            disconnect: None,
        };
        let (reader, writer) = (stream.try_clone()?, Mutex::new(stream.try_clone()?));
        let (inbox, changed) = (Mutex::new(inbox), Condvar::new());
        let shared = Arc::new(PeerShared { writer, inbox, changed, activity });
        let receiver = shared.clone();
        std::thread::Builder::new()
            .name(format!("from process {rank}"))
            .spawn(move || receive_frames(reader, &receiver))?;
        Ok(Peer { rank, stream, shared })
    }

    /// Sends one frame whose payload is the concatenation of `parts`; the header has their size.
    /// `operation` names what this process does, for errors.
    pub fn send<'a>(
        &self,
        header: FrameHeader,
        parts: impl Iterator<Item = &'a [u8]>,
        operation: impl Fn() -> String,
    ) -> Result<(), ClusterFault> {
        let _waiting = self.shared.activity.wait_for(self.rank);
        let mut writer = self.shared.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let start = Instant::now();
        let write = || -> io::Result<()> {
            writer.write_all(&header.encode())?;
            for part in parts {
                writer.write_all(part)?;
            }
            Ok(())
        };
        write().map_err(|error| match error.kind() {
            // The peer's buffers are full and it has stopped reading, but it is alive.
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                self.timeout_fault(operation(), start)
            }
            _ => self.disconnect_fault(operation(), &error.to_string()),
        })
    }

    /// Waits for the next frame of a channel.
    pub fn receive(
        &self,
        channel: u8,
        timeout: Duration,
        operation: impl Fn() -> String,
    ) -> Result<Frame, ClusterFault> {
        let waiting = self.shared.activity.wait_for(self.rank);
        let mut wait = Wait::new(timeout);
        let mut inbox = self.shared.inbox();
        let mut answers = inbox.answers;
        loop {
            if let Some(frame) = inbox.frames[usize::from(channel)].pop_front() {
                return Ok(frame);
            }
            if inbox.disconnect.is_some() {
                drop(inbox);
                return Err(self.disconnect_fault(operation(), CLOSED));
            }
            let answer = (inbox.answers > answers).then_some(inbox.answer);
            answers = inbox.answers;
            if let Some(answer) = answer {
                waiting.note_answer(answer);
            }
            match wait.next(answer, inbox.last_receive) {
                WaitStep::Sleep(time) => {
                    inbox = match self.shared.changed.wait_timeout(inbox, time) {
                        Ok((inbox, _)) => inbox,
                        Err(poisoned) => poisoned.into_inner().0,
                    };
                }
                WaitStep::Ask => {
                    drop(inbox);
                    self.shared.try_send(FrameHeader::control(FrameKind::StatusRequest, &[]), &[]);
                    inbox = self.shared.inbox();
                }
                WaitStep::TimedOut => {
                    drop(inbox);
                    return Err(self.timeout_fault(operation(), wait.start()));
                }
            }
        }
    }

    /// Returns the memory of a frame for reuse.
    pub fn recycle(&self, frame: Frame) {
        self.shared.inbox().free.push(frame.elements);
    }

    /// Tells the peer that `rank` aborts the run, and why. If another thread's write does not end soon, the connection is
    /// only closed. Waits of other threads for the peer end with the same reason.
    pub fn send_abort(&self, rank: u64, reason: &str) {
        let disconnect = Disconnect::Aborted { rank, reason: excerpt(reason) };
        self.shared.inbox().disconnect.get_or_insert(disconnect);
        self.shared.changed.notify_all();
        let _ = self.stream.set_write_timeout(Some(Duration::from_secs(1)));
        let begin = Instant::now();
        let frame = abort_frame(rank, reason);
        while !self.shared.try_write(&frame) && begin.elapsed() < LAST_WRITE_TIMEOUT {
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Tells the peer that this process has finished.
    pub fn send_shutdown(&self) {
        self.shared.try_send(FrameHeader::control(FrameKind::Shutdown, &[]), &[]);
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// The fault of a connection that has ended already.
    pub fn fault(&self, operation: &str) -> Option<ClusterFault> {
        let disconnected = self.shared.inbox().disconnect.is_some();
        disconnected.then(|| self.disconnect_fault(operation.into(), CLOSED))
    }

    fn timeout_fault(&self, operation: String, start: Instant) -> ClusterFault {
        ClusterFault::Timeout {
            rank: self.rank,
            operation,
            waited_s: start.elapsed().as_secs_f64(),
            silent_s: self.shared.inbox().last_receive.elapsed().as_secs_f64(),
        }
    }

    /// The reason that the peer sent before the connection ended, or `reason` if it sent none. A write
    /// fails before the peer's last frame is read, so this method waits for that frame.
    fn disconnect_fault(&self, operation: String, reason: &str) -> ClusterFault {
        let inbox = self.shared.inbox();
        let connected = |inbox: &mut Inbox| inbox.disconnect.is_none();
        let disconnect =
            match self.shared.changed.wait_timeout_while(inbox, REASON_TIMEOUT, connected) {
                Ok((inbox, _)) => inbox.disconnect.clone(),
                Err(poisoned) => poisoned.into_inner().0.disconnect.clone(),
            };
        let reason = match disconnect {
            Some(Disconnect::Aborted { rank, reason }) => {
                return ClusterFault::Aborted { rank, reason };
            }
            Some(Disconnect::Broken(reason)) => reason,
            Some(Disconnect::Shutdown) => "it has finished its run".into(),
            None => reason.into(),
        };
        ClusterFault::Disconnected { rank: self.rank, operation, reason }
    }
}

const CLOSED: &str = "it closed the connection";

const DAMAGED: &str = "a frame from it was damaged on the way: its checksum does not match; look at the network cards and memory of both machines";

impl Drop for Peer {
    fn drop(&mut self) {
        // Ends the receiving thread.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

fn receive_frames(mut from: TcpStream, shared: &PeerShared) {
    let disconnect = loop {
        match receive_frame(&mut from, shared) {
            Ok(None) => {}
            Ok(Some(disconnect)) => break disconnect,
            Err(error) => break Disconnect::Broken(error.to_string()),
        }
    };
    let mut inbox = shared.inbox();
    inbox.disconnect.get_or_insert(disconnect);
    shared.changed.notify_all();
}

/// Receives one frame; `Some` when no more will follow.
fn receive_frame(from: &mut TcpStream, shared: &PeerShared) -> io::Result<Option<Disconnect>> {
    let Some(header) = FrameHeader::read(from)? else {
        return Ok(Some(Disconnect::Broken(CLOSED.into())));
    };
    let payload_bytes = header.payload_bytes as usize;
    let count = payload_bytes.div_ceil(4);
    let mut elements = shared.inbox().free.pop().unwrap_or_default();
    // Memory grows with the bytes that arrive, because a header may announce more than will follow.
    elements.clear();
    let mut crc = crc32fast::Hasher::new();
    while elements.len() < count {
        let start = elements.len();
        elements.resize(count.min(start + READ_ELEMENTS), 0.0);
        let end = (4 * elements.len()).min(payload_bytes);
        let part = &mut bytemuck::cast_slice_mut::<f32, u8>(&mut elements)[4 * start..end];
        from.read_exact(part)?;
        crc.update(part);
        if header.kind == FrameKind::Data {
            shared.inbox().last_receive = Instant::now();
        }
    }
    if crc.finalize() != header.payload_crc {
        return Ok(Some(Disconnect::Broken(DAMAGED.into())));
    }
    match header.kind {
        FrameKind::Shutdown => return Ok(Some(Disconnect::Shutdown)),
        FrameKind::Abort => {
            let payload = &bytemuck::cast_slice::<f32, u8>(&elements)[..payload_bytes];
            let payload = String::from_utf8_lossy(payload);
            let (rank, reason) = payload.split_once(' ').unwrap_or(("", &payload));
            let (rank, reason) = (rank.parse().unwrap_or(0), excerpt(reason));
            return Ok(Some(Disconnect::Aborted { rank, reason }));
        }
        FrameKind::StatusRequest => {
            let mut answer = FrameHeader::control(FrameKind::StatusReply, &[]);
            answer.sequence = shared.activity.get().code();
            shared.try_send(answer, &[]);
            return Ok(None);
        }
        FrameKind::StatusReply => {
            let mut inbox = shared.inbox();
            inbox.answer = Activity::from_code(header.sequence);
            inbox.answers += 1;
            drop(inbox);
            shared.changed.notify_all();
            return Ok(None);
        }
        FrameKind::Data => {}
    }
    let mut inbox = shared.inbox();
    inbox.last_receive = Instant::now();
    inbox.frames[usize::from(header.channel)].push_back(Frame { header, elements });
    drop(inbox);
    shared.changed.notify_all();
    Ok(None)
}
