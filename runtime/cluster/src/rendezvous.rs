//! Rendezvous of the processes of a run.
//!
//! Rank 0 listens at the rendezvous address. Every other process connects with it, both prove that they belong to the job
//! ([`handshake`](super::handshake)), and the process sends a [`JoinRequest`]: rank, world size, the port where it listens
//! itself, and the facts of its run. When all have joined, rank 0 answers with the addresses of all ranks; on a conflict
//! or a timeout it rejects every process with the reason. A process that has failed before it joins sends the reason
//! instead. Then each process connects with those of its peers that have a lower rank, and accepts connections from those
//! that have a higher one.
//!
//! Whoever answers listens until its answer is confirmed. A process whose connection breaks, or which receives damaged bytes,
//! connects again until the deadline, with the same [`JoinRequest::process_id`].

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use narrows_runtime::process_group::{ClusterError, ClusterFault, excerpt};
use serde::{Deserialize, Serialize};

use super::frame::abort_frame;
use super::handshake::{
    HANDSHAKE_TIMEOUT, Listener, POLL_INTERVAL, has_confirmation, introduce, read_confirmation,
    read_message, send_confirmation, send_message,
};
use super::job_token::new_nonce;
use super::launch::{Address, LaunchInfo};

/// A property that all processes of a run must share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunFact {
    /// Name, such as `plan`.
    #[serde(rename = "what")]
    pub name: String,
    /// The value, or a hash of it.
    pub value: String,
}

/// Message of a joining process to rank 0.
#[derive(Serialize, Deserialize)]
struct JoinRequest {
    rank: u64,
    #[serde(rename = "world")]
    world_size: u64,
    /// Tells the process from another one with the same rank. All attempts of a process have the same number.
    #[serde(rename = "process")]
    process_id: u64,
    /// Port at which the process listens for its peers.
    port: u16,
    facts: Vec<RunFact>,
    /// Reason why the process has failed, if it has.
    #[serde(default)]
    failure: Option<String>,
}

/// Answer of rank 0.
#[derive(Serialize, Deserialize)]
enum JoinReply {
    /// All processes have joined.
    #[serde(rename = "Come")]
    Accepted {
        /// Id of the run.
        #[serde(rename = "run")]
        run_id: u64,
        /// Address at which each rank listens.
        addresses: Vec<SocketAddr>,
    },
    /// The run does not start.
    #[serde(rename = "Go")]
    Rejected {
        /// The process that failed first.
        #[serde(default)]
        rank: u64,
        #[serde(rename = "why")]
        reason: String,
    },
}

/// Message to a peer other than rank 0.
#[derive(Serialize, Deserialize)]
struct PeerHello {
    #[serde(rename = "run")]
    run_id: u64,
    rank: u64,
}

/// Waits for all processes, and returns connections with rank 0 and with the peers.
pub(super) fn connect(
    launch: &LaunchInfo,
    facts: Vec<RunFact>,
    peers: &[u64],
    timeout: Duration,
) -> Result<BTreeMap<u64, TcpStream>, ClusterError> {
    let deadline = JoinDeadline { start: Instant::now(), timeout };
    match launch.rank {
        0 => accept_all(launch, &facts, &deadline),
        _ => join_rank_0(launch, facts, peers, &deadline),
    }
}

/// Longest time that a process which has failed waits to tell the others.
const FAILURE_REPORT_TIME: Duration = Duration::from_secs(10);

/// Tells the processes of a run that this one has failed before it could join them. Ends when all have been told that can
/// be reached soon. Where rank 0 is already waiting for the others in another thread, that thread is told, and rejects them.
pub(super) fn report_failure(launch: &LaunchInfo, reason: &str, timeout: Duration) {
    let deadline =
        JoinDeadline { start: Instant::now(), timeout: timeout.min(FAILURE_REPORT_TIME) };
    let (rank, world_size, reason) = (launch.rank, launch.world_size, excerpt(reason));
    if rank == 0
        && let Ok(listener) = listen_at(&launch.rendezvous)
    {
        let listener = Listener::new(listener, launch.job.clone());
        let reply = JoinReply::Rejected { rank, reason };
        Answers::new(listener, world_size, reply).send(deadline.timeout, deadline.end(), |_| true);
        return;
    }
    let (process_id, port, facts, failure) = (new_id(), 0, vec![], Some(reason));
    let request = JoinRequest { rank, world_size, process_id, port, facts, failure };
    // The answer shows that the request has arrived.
    let _ = meet(Target::awaited(0, &launch.rendezvous), launch, &deadline, |stream, _| {
        Ok(ask(stream, &request, deadline.end()))
    });
}

/// Sends a request to rank 0, and confirms the answer.
fn ask(stream: &mut TcpStream, request: &JoinRequest, end: Instant) -> io::Result<JoinReply> {
    send_message(stream, request)?;
    let reply = read_message(stream, end)?;
    send_confirmation(stream)?;
    Ok(reply)
}

struct JoinDeadline {
    start: Instant,
    timeout: Duration,
}

impl JoinDeadline {
    fn waited_s(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }

    fn has_passed(&self) -> bool {
        self.start.elapsed() >= self.timeout
    }

    fn end(&self) -> Instant {
        self.start + self.timeout
    }

    fn missing(&self, ranks: Vec<u64>, world_size: u64, address: &Address) -> ClusterFault {
        let (address, waited_s) = (address.to_string(), self.waited_s());
        ClusterFault::MissingProcesses { ranks, world_size, address, waited_s }
    }
}

/// A process that has joined.
struct Joiner {
    process_id: u64,
    stream: TcpStream,
    /// Address at which it listens for its peers.
    address: SocketAddr,
}

/// Rank 0: waits for all other processes, and sends the same answer to all of them.
fn accept_all(
    launch: &LaunchInfo,
    facts: &[RunFact],
    deadline: &JoinDeadline,
) -> Result<BTreeMap<u64, TcpStream>, ClusterError> {
    let listener = listen_at(&launch.rendezvous)?;
    let own_address = listener.local_addr().unwrap_or(SocketAddr::from(([0, 0, 0, 0], 0)));
    let mut listener = Listener::new(listener, launch.job.clone());
    let mut joined: BTreeMap<u64, Joiner> = BTreeMap::new();
    let mut rejected = None;
    let outcome = loop {
        // A process that has ended, or connects again, is to join anew.
        joined.retain(|_, joiner| has_confirmation(&mut joiner.stream).is_ok_and(|early| !early));
        if joined.len() as u64 + 1 == launch.world_size {
            break Ok(());
        }
        if deadline.has_passed() {
            let missing = (1..launch.world_size).filter(|rank| !joined.contains_key(rank));
            let missing = missing.collect();
            break Err(deadline.missing(missing, launch.world_size, &launch.rendezvous));
        }
        let Some((stream, request, ip)) = listener.poll::<JoinRequest>() else { continue };
        let JoinRequest { rank, process_id, .. } = request;
        let is_other = |joiner: &Joiner| joiner.process_id != process_id;
        let duplicate = joined.get(&rank).is_some_and(is_other);
        if let Some(fault) = check_request(launch, facts, &request, duplicate) {
            rejected = Some((rank, process_id, stream));
            break Err(fault);
        }
        // A process that lost its connection has another one now.
        if stream.set_nonblocking(true).is_ok() {
            let address = SocketAddr::new(ip, request.port);
            joined.insert(rank, Joiner { process_id, stream, address });
        }
    };
    let reply = match &outcome {
        Ok(()) => {
            let others = joined.values().map(|joiner| joiner.address);
            let addresses = std::iter::once(own_address).chain(others).collect();
            JoinReply::Accepted { run_id: new_id(), addresses }
        }
        Err(fault) => rejection(fault),
    };
    let ids: BTreeMap<u64, u64> =
        joined.iter().map(|(rank, joiner)| (*rank, joiner.process_id)).collect();
    let mut answers = Answers::new(listener, launch.world_size, reply);
    for (rank, Joiner { process_id, stream, .. }) in joined {
        answers.add(rank, process_id, stream);
    }
    if let Err(fault) = outcome {
        if let Some((rank, process_id, stream)) = rejected {
            answers.add(rank, process_id, stream);
        }
        let remaining = deadline.timeout.saturating_sub(deadline.start.elapsed());
        answers.send(ANSWER_TIME.min(remaining), Instant::now() + ANSWER_TIME, |_| true);
        return Err(fault.into());
    }
    let is_known = |request: &JoinRequest| {
        request.failure.is_none() && ids.get(&request.rank) == Some(&request.process_id)
    };
    let end = deadline.end().max(Instant::now() + HANDSHAKE_TIMEOUT);
    answers.send(ANSWER_TIME, end, is_known);
    answers.into_streams()
}

/// Time that a process has to connect again where it has not received its answer, or has yet to ask.
const ANSWER_TIME: Duration = Duration::from_secs(2);

/// The answer of rank 0 to all processes, sent until each has confirmed it.
struct Answers {
    listener: Listener,
    world_size: u64,
    reply: JoinReply,
    /// The processes, by rank and number, that have been answered, and whether they have confirmed it.
    answered: BTreeMap<(u64, u64), (TcpStream, bool)>,
}

impl Answers {
    fn new(listener: Listener, world_size: u64, reply: JoinReply) -> Answers {
        Answers { listener, world_size, reply, answered: BTreeMap::new() }
    }

    /// Answers a process.
    fn add(&mut self, rank: u64, process_id: u64, mut stream: TcpStream) {
        let sent = stream
            .set_nonblocking(false)
            .and_then(|()| send_message(&mut stream, &self.reply))
            .and_then(|()| stream.set_nonblocking(true));
        if sent.is_ok() {
            self.answered.insert((rank, process_id), (stream, false));
        }
    }

    /// Waits until the end for confirmations, and for `missing_time` in which a process has not asked or has lost its
    /// connection. Requests that are not `expected` are disconnected.
    fn send(
        &mut self,
        missing_time: Duration,
        end: Instant,
        expected: impl Fn(&JoinRequest) -> bool,
    ) {
        let mut missing_since = None;
        loop {
            self.answered.retain(|_, (stream, confirmed)| {
                *confirmed
                    || has_confirmation(stream).is_ok_and(|now| {
                        *confirmed = now && stream.set_nonblocking(false).is_ok();
                        *confirmed || !now
                    })
            });
            let ranks: BTreeSet<u64> = self.answered.keys().map(|(rank, _)| *rank).collect();
            let now = Instant::now();
            let others = ranks.into_iter().filter(|rank| *rank > 0).count() as u64;
            if others + 1 >= self.world_size {
                missing_since = None;
                if self.answered.values().all(|(_, confirmed)| *confirmed) {
                    return;
                }
            } else if now >= *missing_since.get_or_insert(now) + missing_time {
                return;
            }
            if now >= end {
                return;
            }
            if let Some((stream, request, _)) = self.listener.poll::<JoinRequest>()
                && expected(&request)
            {
                self.add(request.rank, request.process_id, stream);
            }
        }
    }

    /// The connections, by rank.
    ///
    /// # Errors
    /// A process that has not confirmed the answer. The others, which go on, are told.
    fn into_streams(self) -> Result<BTreeMap<u64, TcpStream>, ClusterError> {
        let mut streams: BTreeMap<u64, TcpStream> = BTreeMap::new();
        let mut silent = None;
        for ((rank, _), (stream, confirmed)) in self.answered {
            streams.insert(rank, stream);
            silent = silent.or((!confirmed).then_some(rank));
        }
        let lost = (1..self.world_size).find(|rank| !streams.contains_key(rank));
        let error = match (lost, silent) {
            (Some(rank), _) => disconnected(rank, &io::ErrorKind::UnexpectedEof.into()),
            (None, Some(rank)) => disconnected(rank, &io::ErrorKind::TimedOut.into()),
            (None, None) => return Ok(streams),
        };
        for stream in streams.values_mut() {
            let _ = stream.write_all(&abort_frame(0, &error.fault.to_string()));
        }
        Err(error)
    }
}

/// The rejection of all processes after a fault.
fn rejection(fault: &ClusterFault) -> JoinReply {
    match fault {
        ClusterFault::Aborted { rank, reason } => {
            JoinReply::Rejected { rank: *rank, reason: reason.clone() }
        }
        fault => JoinReply::Rejected { rank: 0, reason: fault.to_string() },
    }
}

/// Reason why a request must be rejected, if it must.
fn check_request(
    launch: &LaunchInfo,
    facts: &[RunFact],
    request: &JoinRequest,
    duplicate: bool,
) -> Option<ClusterFault> {
    let (rank, world_size) = (request.rank, launch.world_size);
    if let Some(reason) = &request.failure {
        return Some(ClusterFault::Aborted { rank, reason: excerpt(reason) });
    }
    if duplicate || rank == 0 || rank >= world_size || request.world_size != world_size {
        return Some(ClusterFault::RankConflict { rank, world_size });
    }
    let value_of = |facts: &[RunFact], name: &str| {
        let fact = facts.iter().find(|fact| fact.name == name);
        fact.map_or_else(|| "none".into(), |fact| fact.value.clone())
    };
    let mut pairs = facts.iter().chain(&request.facts).map(|fact| {
        (value_of(&request.facts, &fact.name), value_of(facts, &fact.name), fact.name.clone())
    });
    let (peer_value, rank_0_value, fact) =
        pairs.find(|(peer_value, rank_0_value, _)| peer_value != rank_0_value)?;
    let (fact, peer_value) = (excerpt(&fact), excerpt(&peer_value));
    Some(ClusterFault::RunMismatch { rank, fact, peer_value, rank_0_value })
}

/// Time beyond the deadline in which the report of rank 0, which waits as long, can still arrive.
const REPORT_GRACE: Duration = Duration::from_secs(5);

/// Every other rank: joins at rank 0, and connects with its peers when all have joined.
fn join_rank_0(
    launch: &LaunchInfo,
    facts: Vec<RunFact>,
    peers: &[u64],
    deadline: &JoinDeadline,
) -> Result<BTreeMap<u64, TcpStream>, ClusterError> {
    let (rank, world_size, failure) = (launch.rank, launch.world_size, None);
    let mut request =
        JoinRequest { rank, world_size, process_id: new_id(), port: 0, facts, failure };
    let mut own_listener = None;
    let rank_0 = Target::awaited(0, &launch.rendezvous);
    let (first, reply) = meet(rank_0, launch, deadline, |stream, address| {
        if own_listener.is_none() {
            // With rank 0 on this machine, no process of another machine needs to reach this one.
            let loopback = address.ip().is_loopback();
            let ip = if loopback { address.ip() } else { Ipv4Addr::UNSPECIFIED.into() };
            let own_address = Address { host: ip.to_string(), port: 0 };
            let listener = listen_at(&own_address)?;
            request.port = listener.local_addr().map_or(0, |address| address.port());
            own_listener = Some((listener, own_address));
        }
        Ok(ask(stream, &request, deadline.end() + REPORT_GRACE))
    })?;
    let (run_id, addresses) = match reply {
        JoinReply::Accepted { run_id, addresses } => (run_id, addresses),
        JoinReply::Rejected { rank, reason } => {
            return Err(ClusterFault::Aborted { rank, reason: excerpt(&reason) }.into());
        }
    };
    let mut streams = BTreeMap::from([(0, first)]);
    let hello = PeerHello { run_id, rank };
    for peer in peers.iter().copied().filter(|peer| (1..rank).contains(peer)) {
        let Some(address) = addresses.get(peer as usize) else { continue };
        let address = Address { host: address.ip().to_string(), port: address.port() };
        streams.insert(peer, greet((peer, &address), launch, &hello, deadline)?);
    }
    let awaited: BTreeSet<u64> = peers.iter().copied().filter(|peer| *peer > rank).collect();
    if let Some((listener, own_address)) = own_listener {
        let listener = Listener::new(listener, launch.job.clone());
        streams.extend(accept_peers((listener, &own_address), launch, run_id, awaited, deadline)?);
    }
    Ok(streams)
}

/// Connects with a peer that listens.
fn greet(
    (rank, address): (u64, &Address),
    launch: &LaunchInfo,
    hello: &PeerHello,
    deadline: &JoinDeadline,
) -> Result<TcpStream, ClusterError> {
    let peer = Target { rank, address, has_listened: true };
    let (stream, ()) = meet(peer, launch, deadline, |stream, _| {
        let sent = send_message(stream, hello);
        Ok(sent.and_then(|()| read_confirmation(stream, deadline.end() + REPORT_GRACE)))
    })?;
    Ok(stream)
}

/// Waits for the peers that connect with this process.
fn accept_peers(
    (mut listener, own_address): (Listener, &Address),
    launch: &LaunchInfo,
    run_id: u64,
    mut awaited: BTreeSet<u64>,
    deadline: &JoinDeadline,
) -> Result<BTreeMap<u64, TcpStream>, ClusterError> {
    let mut streams = BTreeMap::new();
    while !awaited.is_empty() {
        if deadline.has_passed() {
            let missing = awaited.into_iter().collect();
            return Err(deadline.missing(missing, launch.world_size, own_address).into());
        }
        let Some((mut stream, hello, _)) = listener.poll::<PeerHello>() else { continue };
        // A process of another run may have been given an address of an earlier one.
        if hello.run_id == run_id
            && (awaited.contains(&hello.rank) || streams.contains_key(&hello.rank))
            && send_confirmation(&mut stream).is_ok()
        {
            awaited.remove(&hello.rank);
            streams.insert(hello.rank, stream);
        }
    }
    Ok(streams)
}

fn resolve(address: &Address) -> io::Result<Vec<SocketAddr>> {
    Ok((address.host.as_str(), address.port).to_socket_addrs()?.collect())
}

fn listen_at(address: &Address) -> Result<TcpListener, ClusterError> {
    let listen = || -> io::Result<TcpListener> {
        let addresses = resolve(address)?;
        // The name may resolve to a translated address, which this machine cannot bind.
        let any = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), address.port);
        let listener = TcpListener::bind(&addresses[..]).or_else(|error| match error.kind() {
            io::ErrorKind::AddrNotAvailable => TcpListener::bind(any),
            _ => Err(error),
        })?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    listen().map_err(|error| {
        let (address, reason) = (address.to_string(), error.to_string());
        ClusterFault::CannotListen { address, reason }.into()
    })
}

/// A process to connect with.
struct Target<'a> {
    rank: u64,
    address: &'a Address,
    /// Whether it is known to have listened there: then it has ended where it no longer does.
    has_listened: bool,
}

impl Target<'_> {
    /// A process that may listen later.
    fn awaited(rank: u64, address: &Address) -> Target<'_> {
        Target { rank, address, has_listened: false }
    }
}

/// Tries until the deadline to connect with a process of the same job, and to exchange messages with it. `exchange` returns
/// the answer, an error after which another connection may succeed, or one that ends the attempts.
fn meet<T>(
    Target { rank, address, mut has_listened }: Target,
    launch: &LaunchInfo,
    deadline: &JoinDeadline,
    mut exchange: impl FnMut(&mut TcpStream, SocketAddr) -> Result<io::Result<T>, ClusterError>,
) -> Result<(TcpStream, T), ClusterError> {
    let connect = |address: &SocketAddr| -> io::Result<TcpStream> {
        let mut stream = TcpStream::connect_timeout(address, Duration::from_secs(5))?;
        let end = deadline.end().min(Instant::now() + HANDSHAKE_TIMEOUT);
        introduce(&mut stream, &launch.job, end)?;
        Ok(stream)
    };
    let (mut stranger, mut lost, mut refused_since) = (None, None, None);
    loop {
        let (mut last_error, mut is_listening) = (io::Error::from(io::ErrorKind::NotFound), false);
        match resolve(address) {
            Err(error) => last_error = error,
            Ok(addresses) => {
                for address in addresses {
                    let mut stream = match connect(&address) {
                        Ok(stream) => stream,
                        Err(error) => {
                            is_listening |= error.kind() != io::ErrorKind::ConnectionRefused;
                            last_error = error;
                            continue;
                        }
                    };
                    is_listening = true;
                    match exchange(&mut stream, address)? {
                        Ok(answer) => return Ok((stream, answer)),
                        Err(error) => (lost, has_listened) = (Some(error), true),
                    }
                    break;
                }
            }
        }
        if is_listening || !has_listened {
            refused_since = None;
        }
        let now = Instant::now();
        let is_gone =
            !is_listening && has_listened && now >= *refused_since.get_or_insert(now) + ANSWER_TIME;
        let reason = reason_of(&last_error);
        // Says more than that the last attempt had no answer in time.
        if last_error.kind() == io::ErrorKind::InvalidData {
            stranger = Some(reason.clone());
        }
        if is_gone || deadline.has_passed() {
            if let Some(error) = lost {
                return Err(disconnected(rank, &error));
            }
            let (address, reason) = (address.to_string(), stranger.unwrap_or(reason));
            let waited_s = deadline.waited_s();
            return Err(ClusterFault::Unreachable { rank, address, waited_s, reason }.into());
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

fn disconnected(rank: u64, error: &io::Error) -> ClusterError {
    let (operation, reason) = ("the rendezvous".into(), reason_of(error));
    ClusterFault::Disconnected { rank, operation, reason }.into()
}

/// The error of a connection, in words.
fn reason_of(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "it does not answer".into(),
        io::ErrorKind::UnexpectedEof => "it closed the connection".into(),
        _ => error.to_string(),
    }
}

/// A number that differs from those of other runs and processes.
fn new_id() -> u64 {
    let mut half = [0; 8];
    half.copy_from_slice(&new_nonce()[..8]);
    u64::from_le_bytes(half)
}

#[cfg(test)]
mod tests;
