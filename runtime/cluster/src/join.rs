//! How the processes of a run find each other.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::launch::{Address, LaunchInfo};
use narrows_runtime::process_group::{ClusterError, ClusterFault};

/// Something that must be the same for all processes of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunFact {
    /// What it is: `plan`.
    pub what: String,
    /// How it is told from others: a hash, or the thing itself.
    pub value: String,
}

/// What begins every connection.
const GREETING: [u8; 8] = *b"narrows\x01";

/// The longest first message: a table of the addresses of many processes.
const MESSAGE_MAX: u32 = 64 << 20;

/// What a process says when it comes.
#[derive(Serialize, Deserialize)]
struct JoinRequest {
    rank: u64,
    world: u64,
    /// Where it waits for those it will be connected with.
    port: u16,
    facts: Vec<RunFact>,
}

/// What process 0 says to it.
#[derive(Serialize, Deserialize)]
enum JoinReply {
    /// All are there: the number of the run, and where every process waits.
    Come { run: u64, addresses: Vec<SocketAddr> },
    /// The run does not begin.
    Go { why: String },
}

/// What a process says to another than process 0.
#[derive(Serialize, Deserialize)]
struct PeerHello {
    run: u64,
    rank: u64,
}

/// Waits for all processes, and connects with process 0 and with the neighbours.
pub(super) fn meet(
    launch: &LaunchInfo,
    facts: Vec<RunFact>,
    neighbours: &[u64],
    join: Duration,
) -> Result<BTreeMap<u64, TcpStream>, ClusterError> {
    let until = JoinDeadline { begun: Instant::now(), join };
    match launch.rank {
        0 => receive_all(launch, facts, &until),
        _ => come(launch, facts, neighbours, &until),
    }
}

/// Since when is waited, and how long.
struct JoinDeadline {
    begun: Instant,
    join: Duration,
}

impl JoinDeadline {
    fn waited_s(&self) -> f64 {
        self.begun.elapsed().as_secs_f64()
    }

    fn over(&self) -> bool {
        self.begun.elapsed() >= self.join
    }
}

/// How long one waits before one looks again.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Process 0: waits for all, and tells all when they are there.
fn receive_all(
    launch: &LaunchInfo,
    facts: Vec<RunFact>,
    until: &JoinDeadline,
) -> Result<BTreeMap<u64, TcpStream>, ClusterError> {
    let listener = listen_at(&launch.meeting)?;
    let own = listener.local_addr().unwrap_or(SocketAddr::from(([0, 0, 0, 0], 0)));
    let mut door = Listener::new(listener);
    let mut come: BTreeMap<u64, (TcpStream, SocketAddr)> = BTreeMap::new();
    let judged = loop {
        if come.len() as u64 + 1 == launch.world {
            break Ok(());
        }
        if until.over() {
            let missing = (1..launch.world).filter(|rank| !come.contains_key(rank)).collect();
            let (world, at) = (launch.world, launch.meeting.to_string());
            break Err(ClusterFault::Missing { missing, world, at, waited_s: until.waited_s() });
        }
        let Some((mut stream, hello, ip)) = door.next::<JoinRequest>() else { continue };
        let fault = judge(launch, &facts, &hello, come.contains_key(&hello.rank));
        if let Some(fault) = fault {
            let _ = say(&mut stream, &JoinReply::Go { why: fault.to_string() });
            break Err(fault);
        }
        come.insert(hello.rank, (stream, SocketAddr::new(ip, hello.port)));
    };
    let answer = match &judged {
        Ok(()) => {
            let others = come.values().map(|(_, address)| *address);
            JoinReply::Come {
                run: run_number(),
                addresses: std::iter::once(own).chain(others).collect(),
            }
        }
        Err(fault) => JoinReply::Go { why: fault.to_string() },
    };
    let told: Vec<(u64, io::Result<()>)> =
        come.iter_mut().map(|(rank, (stream, _))| (*rank, say(stream, &answer))).collect();
    if let Err(fault) = judged {
        // Whoever was refused has been told.
        let left = (launch.world - 1).saturating_sub(told.len() as u64 + 1);
        turn_away(&mut door, &answer, left, until);
        return Err(fault.into());
    }
    for (rank, told) in told {
        told.map_err(|error| lost(rank, "the beginning", &error))?;
    }
    Ok(come.into_iter().map(|(rank, (stream, _))| (rank, stream)).collect())
}

/// How long process 0 stays to tell those who come that there is no run.
const FAREWELL: Duration = Duration::from_secs(2);

/// Tells those who are still to come: they would find nobody there, and wait.
fn turn_away(door: &mut Listener, answer: &JoinReply, mut left: u64, until: &JoinDeadline) {
    let begun = Instant::now();
    while left > 0 && begun.elapsed() < FAREWELL && !until.over() {
        if let Some((mut stream, _, _)) = door.next::<JoinRequest>() {
            let _ = say(&mut stream, answer);
            left -= 1;
        }
    }
}

/// What is wrong with a process that came.
fn judge(
    launch: &LaunchInfo,
    facts: &[RunFact],
    hello: &JoinRequest,
    again: bool,
) -> Option<ClusterFault> {
    let (rank, world) = (hello.rank, launch.world);
    if again || rank == 0 || rank >= world || hello.world != world {
        return Some(ClusterFault::Stranger { rank, world });
    }
    let value = |facts: &[RunFact], what: &str| {
        let found = facts.iter().find(|fact| fact.what == what);
        found.map_or_else(|| "none".into(), |fact| fact.value.clone())
    };
    let mut pairs = facts
        .iter()
        .chain(&hello.facts)
        .map(|fact| (value(&hello.facts, &fact.what), value(facts, &fact.what), fact.what.clone()));
    let (theirs, ours, what) = pairs.find(|(theirs, ours, _)| theirs != ours)?;
    Some(ClusterFault::Differs { rank, what, theirs, ours })
}

/// Every other process: comes to process 0, and connects with its neighbours when all are there.
fn come(
    launch: &LaunchInfo,
    facts: Vec<RunFact>,
    neighbours: &[u64],
    until: &JoinDeadline,
) -> Result<BTreeMap<u64, TcpStream>, ClusterError> {
    let at = launch.meeting.to_string();
    let (mut first, address) = reach(0, &at, until, || resolve(&launch.meeting))?;
    // Where process 0 is on this machine, nobody else need reach it.
    let ip = if address.ip().is_loopback() { address.ip() } else { Ipv4Addr::UNSPECIFIED.into() };
    let own = Address { host: ip.to_string(), port: 0 };
    let listener = listen_at(&own)?;
    let port = listener.local_addr().map_or(0, |address| address.port());
    let hello = JoinRequest { rank: launch.rank, world: launch.world, port, facts };
    let gone = |error: io::Error| lost(0, "the beginning", &error);
    say(&mut first, &hello).map_err(gone)?;
    // Process 0 waits for all as long as it may; a little more, so that it can say who is missing.
    let rest = until.join.saturating_sub(until.begun.elapsed()) + Duration::from_secs(5);
    first.set_read_timeout(Some(rest)).map_err(gone)?;
    let (run, addresses) = match hear::<JoinReply>(&mut first).map_err(gone)? {
        JoinReply::Come { run, addresses } => (run, addresses),
        JoinReply::Go { why } => return Err(ClusterFault::GaveUp { rank: 0, why }.into()),
    };
    let mut streams = BTreeMap::from([(0, first)]);
    for rank in neighbours.iter().copied().filter(|rank| (1..launch.rank).contains(rank)) {
        let Some(address) = addresses.get(rank as usize).copied() else { continue };
        let (mut stream, _) = reach(rank, &address.to_string(), until, || Ok(vec![address]))?;
        let name = PeerHello { run, rank: launch.rank };
        say(&mut stream, &name).map_err(|error| lost(rank, "the beginning", &error))?;
        streams.insert(rank, stream);
    }
    let mut door = Listener::new(listener);
    let mut awaited: BTreeSet<u64> =
        neighbours.iter().copied().filter(|rank| *rank > launch.rank).collect();
    while !awaited.is_empty() {
        if until.over() {
            let missing = awaited.into_iter().collect();
            let (world, at) = (launch.world, own.to_string());
            return Err(
                ClusterFault::Missing { missing, world, at, waited_s: until.waited_s() }.into()
            );
        }
        let Some((stream, name, _)) = door.next::<PeerHello>() else { continue };
        // One of another run may have the address of an earlier one.
        if name.run == run && awaited.remove(&name.rank) {
            streams.insert(name.rank, stream);
        }
    }
    Ok(streams)
}

fn resolve(address: &Address) -> io::Result<Vec<SocketAddr>> {
    Ok((address.host.as_str(), address.port).to_socket_addrs()?.collect())
}

fn listen_at(address: &Address) -> Result<TcpListener, ClusterError> {
    let listen = || -> io::Result<TcpListener> {
        let own = resolve(address)?;
        // The name may be that of an address in front of this machine, which it cannot listen at.
        let any = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), address.port);
        let listener = TcpListener::bind(&own[..]).or_else(|error| match error.kind() {
            io::ErrorKind::AddrNotAvailable => TcpListener::bind(any),
            _ => Err(error),
        })?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    let fault = |error: io::Error| ClusterFault::Meeting {
        at: address.to_string(),
        why: error.to_string(),
    };
    Ok(listen().map_err(fault)?)
}

/// Tries to connect until it can.
fn reach(
    rank: u64,
    at: &str,
    until: &JoinDeadline,
    addresses: impl Fn() -> io::Result<Vec<SocketAddr>>,
) -> Result<(TcpStream, SocketAddr), ClusterError> {
    loop {
        let try_all = || -> io::Result<(TcpStream, SocketAddr)> {
            let mut last = io::Error::from(io::ErrorKind::NotFound);
            for address in addresses()? {
                match TcpStream::connect_timeout(&address, Duration::from_secs(5)) {
                    Ok(stream) => return Ok((stream, address)),
                    Err(error) => last = error,
                }
            }
            Err(last)
        };
        match try_all() {
            Ok(reached) => return Ok(reached),
            Err(error) if until.over() => {
                let (at, why) = (at.to_string(), error.to_string());
                return Err(ClusterFault::Unreachable {
                    rank,
                    at,
                    waited_s: until.waited_s(),
                    why,
                }
                .into());
            }
            Err(_) => std::thread::sleep(LOOK_AGAIN),
        }
    }
}

/// Where others come in. Whoever says nothing keeps nobody from coming in after it.
struct Listener {
    listener: TcpListener,
    visitors: Vec<Handshake>,
}

/// One who has come, and not yet said all.
struct Handshake {
    stream: TcpStream,
    ip: IpAddr,
    since: Instant,
    said: Vec<u8>,
}

/// How long one may take to say what it is.
const GREETING_TIME: Duration = Duration::from_secs(10);

/// Visitors at a time: more are not let in before others have gone.
const VISITORS_MAX: usize = 1024;

impl Listener {
    fn new(listener: TcpListener) -> Listener {
        Listener { listener, visitors: vec![] }
    }

    /// The next that has said what it should; whoever says something else is sent away. `None` when
    /// there is none just now.
    fn next<T: DeserializeOwned>(&mut self) -> Option<(TcpStream, T, IpAddr)> {
        while self.visitors.len() < VISITORS_MAX {
            let Ok((stream, address)) = self.listener.accept() else { break };
            if stream.set_nonblocking(true).is_ok() {
                let (since, ip) = (Instant::now(), address.ip());
                self.visitors.push(Handshake { stream, ip, since, said: vec![] });
            }
        }
        self.visitors.retain(|visitor| visitor.since.elapsed() < GREETING_TIME);
        let mut at = 0;
        while at < self.visitors.len() {
            match self.visitors[at].listen() {
                Ok(false) => at += 1,
                Err(_) => drop(self.visitors.swap_remove(at)),
                Ok(true) => {
                    let Handshake { stream, ip, said, .. } = self.visitors.swap_remove(at);
                    let message = serde_json::from_slice(&said[HEAD_BYTES..]);
                    if let (Ok(message), Ok(())) = (message, stream.set_nonblocking(false)) {
                        return Some((stream, message, ip));
                    }
                }
            }
        }
        std::thread::sleep(LOOK_AGAIN);
        None
    }
}

impl Handshake {
    /// Reads what has come; whether that is all.
    fn listen(&mut self) -> io::Result<bool> {
        loop {
            let wanted = match self.said.get(..HEAD_BYTES) {
                None => HEAD_BYTES,
                Some(head) => HEAD_BYTES + message_length(head)?,
            };
            if wanted == self.said.len() && wanted > HEAD_BYTES {
                return Ok(true);
            }
            let mut some = [0; 4096];
            let room = some.len().min(wanted - self.said.len());
            match self.stream.read(&mut some[..room]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.said.extend_from_slice(&some[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
    }
}

/// Bytes before a message: the greeting and the message's length.
const HEAD_BYTES: usize = 12;

/// The length that a head says; at least one byte, as every message has.
fn message_length(head: &[u8]) -> io::Result<usize> {
    let length = u32::from_le_bytes([head[8], head[9], head[10], head[11]]);
    if head[..8] != GREETING || length == 0 || length > MESSAGE_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is another program"));
    }
    Ok(length as usize)
}

fn say(stream: &mut TcpStream, message: &impl Serialize) -> io::Result<()> {
    let message = serde_json::to_vec(message)?;
    let length = (message.len() as u32).to_le_bytes();
    stream.write_all(&[&GREETING[..], &length, &message].concat())
}

fn hear<T: DeserializeOwned>(stream: &mut TcpStream) -> io::Result<T> {
    let mut head = [0; HEAD_BYTES];
    stream.read_exact(&mut head)?;
    let length = message_length(&head)?;
    let mut message = vec![0; length];
    stream.read_exact(&mut message)?;
    Ok(serde_json::from_slice(&message)?)
}

fn lost(rank: u64, doing: &str, error: &io::Error) -> ClusterError {
    let why = match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "it says nothing".into(),
        io::ErrorKind::UnexpectedEof => "it closed the connection".into(),
        _ => error.to_string(),
    };
    ClusterFault::Lost { rank, doing: doing.into(), why }.into()
}

/// A number that another run does not have.
fn run_number() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (now.as_nanos() as u64) ^ (u64::from(std::process::id()) << 40)
}
