//! A connection with another process. A thread of its own takes in all that comes, so that two
//! processes may send to each other at once however much it is.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::frame::{CHANNELS, FrameHeader, FrameKind};
use narrows_runtime::process_group::ClusterFault;

/// Numbers that are read at once.
const NUMBERS_AT_A_TIME: usize = 4 << 20;

/// What has come, and not been taken.
pub struct Frame {
    pub header: FrameHeader,
    numbers: Vec<f32>,
}

impl Frame {
    /// The numbers that were sent.
    pub fn numbers(&self) -> &[f32] {
        &self.numbers
    }

    /// The bytes that were sent, where they are no numbers.
    pub fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.numbers)[..self.header.bytes as usize]
    }
}

/// Another process.
pub struct Peer {
    pub rank: u64,
    stream: TcpStream,
    writer: Mutex<TcpStream>,
    shared: Arc<PeerShared>,
}

struct PeerShared {
    held: Mutex<Inbox>,
    arrived: Condvar,
}

struct Inbox {
    inboxes: [VecDeque<Frame>; CHANNELS],
    /// Memory of frames that were taken.
    free: Vec<Vec<f32>>,
    heard: Instant,
    gone: Option<Disconnect>,
}

/// Why nothing more will come.
#[derive(Clone, Debug)]
enum Disconnect {
    /// It is done, and said so.
    Done,
    /// It ended the run.
    GaveUp { rank: u64, why: String },
    /// The connection broke.
    Lost(String),
}

impl PeerShared {
    fn held(&self) -> MutexGuard<'_, Inbox> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Peer {
    /// Takes over a connection. A write that does not end within the deadline fails.
    pub fn new(rank: u64, stream: TcpStream, deadline: Duration) -> io::Result<Peer> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(None)?;
        stream.set_write_timeout(Some(deadline))?;
        let held =
            Inbox { inboxes: Default::default(), free: vec![], heard: Instant::now(), gone: None };
        let shared = Arc::new(PeerShared { held: Mutex::new(held), arrived: Condvar::new() });
        let (reader, writer) = (stream.try_clone()?, Mutex::new(stream.try_clone()?));
        let taking = shared.clone();
        std::thread::Builder::new()
            .name(format!("from process {rank}"))
            .spawn(move || take_in(reader, &taking))?;
        Ok(Peer { rank, stream, writer, shared })
    }

    /// Sends these, one after the other, in one frame; `header` says how many bytes they are.
    pub fn send<'a>(
        &self,
        header: FrameHeader,
        parts: impl Iterator<Item = &'a [u8]>,
        doing: impl Fn() -> String,
    ) -> Result<(), ClusterFault> {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let begun = Instant::now();
        let write = || -> io::Result<()> {
            writer.write_all(&header.encode())?;
            for part in parts {
                writer.write_all(part)?;
            }
            Ok(())
        };
        write().map_err(|error| match error.kind() {
            // The other reads nothing any more: it has stopped, and still lives.
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => self.late(doing(), begun),
            _ => self.why_gone(doing(), &error.to_string()),
        })
    }

    /// Waits for the next frame of a channel.
    pub fn receive(
        &self,
        channel: u8,
        deadline: Duration,
        doing: impl Fn() -> String,
    ) -> Result<Frame, ClusterFault> {
        let begun = Instant::now();
        let mut held = self.shared.held();
        loop {
            if let Some(frame) = held.inboxes[usize::from(channel)].pop_front() {
                return Ok(frame);
            }
            if held.gone.is_some() {
                drop(held);
                return Err(self.why_gone(doing(), "it closed the connection"));
            }
            let Some(rest) = deadline.checked_sub(begun.elapsed()) else {
                drop(held);
                return Err(self.late(doing(), begun));
            };
            held = match self.shared.arrived.wait_timeout(held, rest) {
                Ok((held, _)) => held,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }

    /// Gives a frame's memory back.
    pub fn recycle(&self, frame: Frame) {
        self.shared.held().free.push(frame.numbers);
    }

    /// Says that the run ends, and why, unless a write is under way: then closing must do.
    pub fn give_up(&self, rank: u64, why: &str) {
        let said = format!("{rank} {why}");
        let header = FrameHeader {
            subject: FrameKind::GiveUp,
            channel: 0,
            operation: 0,
            sequence: 0,
            bytes: said.len() as u64,
        };
        if let Ok(mut writer) = self.writer.try_lock() {
            let _ = writer.set_write_timeout(Some(Duration::from_secs(1)));
            let _ = writer.write_all(&[&header.encode()[..], said.as_bytes()].concat());
        }
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Says that nothing more will come.
    pub fn done(&self) {
        let header = FrameHeader {
            subject: FrameKind::Done,
            channel: 0,
            operation: 0,
            sequence: 0,
            bytes: 0,
        };
        if let Ok(mut writer) = self.writer.try_lock() {
            let _ = writer.write_all(&header.encode());
        }
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Why nothing more will come from it, if that is so already.
    pub fn gone(&self, doing: &str) -> Option<ClusterFault> {
        let gone = self.shared.held().gone.is_some();
        gone.then(|| self.why_gone(doing.into(), "it closed the connection"))
    }

    fn late(&self, doing: String, begun: Instant) -> ClusterFault {
        let silent_s = self.shared.held().heard.elapsed().as_secs_f64();
        ClusterFault::Late {
            rank: self.rank,
            doing,
            waited_s: begun.elapsed().as_secs_f64(),
            silent_s,
        }
    }

    /// What the other said before it went, or else `why`. It may have said so just now: whoever
    /// writes to it learns of the end before what came is read.
    fn why_gone(&self, doing: String, why: &str) -> ClusterFault {
        let held = self.shared.held();
        let waited =
            self.shared
                .arrived
                .wait_timeout_while(held, Duration::from_millis(500), |held| held.gone.is_none());
        let gone = match waited {
            Ok((held, _)) => held.gone.clone(),
            Err(poisoned) => poisoned.into_inner().0.gone.clone(),
        };
        match gone {
            Some(Disconnect::GaveUp { rank, why }) => ClusterFault::GaveUp { rank, why },
            Some(Disconnect::Lost(why)) => ClusterFault::Lost { rank: self.rank, doing, why },
            Some(Disconnect::Done) => {
                ClusterFault::Lost { rank: self.rank, doing, why: "it ended its run".into() }
            }
            None => ClusterFault::Lost { rank: self.rank, doing, why: why.into() },
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // The thread that takes in sees the end.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

fn take_in(mut from: TcpStream, shared: &PeerShared) {
    let gone = loop {
        match take_frame(&mut from, shared) {
            Ok(None) => {}
            Ok(Some(gone)) => break gone,
            Err(error) => break Disconnect::Lost(error.to_string()),
        }
    };
    let mut held = shared.held();
    held.gone.get_or_insert(gone);
    shared.arrived.notify_all();
}

/// Takes one frame; `Some` is the last there will be.
fn take_frame(from: &mut TcpStream, shared: &PeerShared) -> io::Result<Option<Disconnect>> {
    let Some(header) = FrameHeader::read(from)? else {
        return Ok(Some(Disconnect::Lost("it closed the connection".into())));
    };
    let count = (header.bytes as usize).div_ceil(4);
    let mut numbers = {
        let mut held = shared.held();
        held.heard = Instant::now();
        held.free.pop().unwrap_or_default()
    };
    // Memory is taken as bytes come: a header may say more than there will ever be.
    numbers.clear();
    while numbers.len() < count {
        let begin = numbers.len();
        numbers.resize(count.min(begin + NUMBERS_AT_A_TIME), 0.0);
        let end = (4 * numbers.len()).min(header.bytes as usize);
        from.read_exact(&mut bytemuck::cast_slice_mut::<f32, u8>(&mut numbers)[4 * begin..end])?;
    }
    let bytes = &bytemuck::cast_slice::<f32, u8>(&numbers)[..header.bytes as usize];
    match header.subject {
        FrameKind::Done => return Ok(Some(Disconnect::Done)),
        FrameKind::GiveUp => {
            let said = String::from_utf8_lossy(bytes);
            let (rank, why) = said.split_once(' ').unwrap_or(("", &said));
            let (rank, why) = (rank.parse().unwrap_or(0), why.to_string());
            return Ok(Some(Disconnect::GaveUp { rank, why }));
        }
        FrameKind::Data => {}
    }
    let mut held = shared.held();
    held.heard = Instant::now();
    held.inboxes[usize::from(header.channel)].push_back(Frame { header, numbers });
    drop(held);
    shared.arrived.notify_all();
    Ok(None)
}
