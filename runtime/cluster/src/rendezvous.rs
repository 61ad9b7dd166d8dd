//! Rendezvous of the processes of a run.
//!
//! Rank 0 listens at the rendezvous address. Every other process connects with it, both prove that they belong to the job
//! ([`handshake`](super::handshake)), and the process sends a [`JoinRequest`]: rank, world size, the port where it listens
//! itself, and the facts of its run. When all have joined, rank 0 answers with the addresses of all ranks; on a conflict
//! or a timeout it rejects every process with the reason. A process that has failed before it joins sends the reason
//! instead. Then each process connects with those of its peers that have a lower rank, and accepts connections from those
//! that have a higher one.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use narrows_runtime::process_group::{ClusterError, ClusterFault, excerpt};
use serde::{Deserialize, Serialize};

use super::handshake::{
    HANDSHAKE_TIMEOUT, Listener, POLL_INTERVAL, introduce, read_message, send_message,
};
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
        let mut listener = Listener::new(listener, launch.job.clone());
        let reply = JoinReply::Rejected { rank, reason };
        return reject_joiners(&mut listener, &reply, world_size - 1, &deadline);
    }
    let address = launch.rendezvous.to_string();
    let resolve_rendezvous = || resolve(&launch.rendezvous);
    let Ok((mut stream, _)) =
        connect_with_retry(0, &address, launch, &deadline, resolve_rendezvous)
    else {
        return;
    };
    let (port, facts, failure) = (0, vec![], Some(reason));
    if send_message(&mut stream, &JoinRequest { rank, world_size, port, facts, failure }).is_ok() {
        // The answer shows that the request has arrived.
        let _ = read_message::<JoinReply>(&stream, deadline.end());
    }
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

/// Rank 0: waits for all other processes, and sends the same answer to all of them.
fn accept_all(
    launch: &LaunchInfo,
    facts: &[RunFact],
    deadline: &JoinDeadline,
) -> Result<BTreeMap<u64, TcpStream>, ClusterError> {
    let listener = listen_at(&launch.rendezvous)?;
    let own_address = listener.local_addr().unwrap_or(SocketAddr::from(([0, 0, 0, 0], 0)));
    let mut listener = Listener::new(listener, launch.job.clone());
    let mut joined: BTreeMap<u64, (TcpStream, SocketAddr)> = BTreeMap::new();
    let mut rejected = None;
    let outcome = loop {
        if joined.len() as u64 + 1 == launch.world_size {
            break Ok(());
        }
        if deadline.has_passed() {
            let missing = (1..launch.world_size).filter(|rank| !joined.contains_key(rank));
            let missing = missing.collect();
            break Err(deadline.missing(missing, launch.world_size, &launch.rendezvous));
        }
        let Some((mut stream, request, ip)) = listener.poll::<JoinRequest>() else { continue };
        let duplicate = joined.contains_key(&request.rank);
        if let Some(fault) = check_request(launch, facts, &request, duplicate) {
            let _ = send_message(&mut stream, &rejection(&fault));
            rejected = Some(request.rank);
            break Err(fault);
        }
        joined.insert(request.rank, (stream, SocketAddr::new(ip, request.port)));
    };
    let reply = match &outcome {
        Ok(()) => {
            let others = joined.values().map(|(_, address)| *address);
            let addresses = std::iter::once(own_address).chain(others).collect();
            JoinReply::Accepted { run_id: new_run_id(), addresses }
        }
        Err(fault) => rejection(fault),
    };
    let sent: Vec<(u64, io::Result<()>)> = joined
        .iter_mut()
        .map(|(rank, (stream, _))| (*rank, send_message(stream, &reply)))
        .collect();
    if let Err(fault) = outcome {
        // A process whose request was rejected has its answer already.
        let only_rejected = rejected.filter(|rank| *rank != 0 && !joined.contains_key(rank));
        let answered = joined.len() as u64 + u64::from(only_rejected.is_some());
        let pending = (launch.world_size - 1).saturating_sub(answered);
        let timeout = REJECTION_TIME.min(deadline.timeout.saturating_sub(deadline.start.elapsed()));
        let deadline = JoinDeadline { start: Instant::now(), timeout };
        reject_joiners(&mut listener, &reply, pending, &deadline);
        return Err(fault.into());
    }
    for (rank, result) in sent {
        result.map_err(|error| disconnected(rank, &error))?;
    }
    Ok(joined.into_iter().map(|(rank, (stream, _))| (rank, stream)).collect())
}

/// Time that rank 0 stays to reject processes that join after the run has failed.
const REJECTION_TIME: Duration = Duration::from_secs(2);

/// The rejection of all processes after a fault.
fn rejection(fault: &ClusterFault) -> JoinReply {
    match fault {
        ClusterFault::Aborted { rank, reason } => {
            JoinReply::Rejected { rank: *rank, reason: reason.clone() }
        }
        fault => JoinReply::Rejected { rank: 0, reason: fault.to_string() },
    }
}

/// Rejects processes that are still to join, which would otherwise wait for a listener.
fn reject_joiners(
    listener: &mut Listener,
    reply: &JoinReply,
    mut pending: u64,
    deadline: &JoinDeadline,
) {
    while pending > 0 && !deadline.has_passed() {
        if let Some((mut stream, _, _)) = listener.poll::<JoinRequest>() {
            let _ = send_message(&mut stream, reply);
            pending -= 1;
        }
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

/// Every other rank: joins at rank 0, and connects with its peers when all have joined.
fn join_rank_0(
    launch: &LaunchInfo,
    facts: Vec<RunFact>,
    peers: &[u64],
    deadline: &JoinDeadline,
) -> Result<BTreeMap<u64, TcpStream>, ClusterError> {
    let address = launch.rendezvous.to_string();
    let resolve_rendezvous = || resolve(&launch.rendezvous);
    let (mut first, first_address) =
        connect_with_retry(0, &address, launch, deadline, resolve_rendezvous)?;
    // With rank 0 on this machine, no process of another machine needs to reach this one.
    let loopback = first_address.ip().is_loopback();
    let ip = if loopback { first_address.ip() } else { Ipv4Addr::UNSPECIFIED.into() };
    let own_address = Address { host: ip.to_string(), port: 0 };
    let listener = listen_at(&own_address)?;
    let port = listener.local_addr().map_or(0, |address| address.port());
    let (rank, world_size, failure) = (launch.rank, launch.world_size, None);
    let request = JoinRequest { rank, world_size, port, facts, failure };
    let lost_rank_0 = |error: io::Error| disconnected(0, &error);
    send_message(&mut first, &request).map_err(lost_rank_0)?;
    // Rank 0 waits for the whole timeout; a little longer here lets its report of the missing
    // processes arrive.
    let answer_deadline = deadline.end() + Duration::from_secs(5);
    let (run_id, addresses) = match read_message(&first, answer_deadline).map_err(lost_rank_0)? {
        JoinReply::Accepted { run_id, addresses } => (run_id, addresses),
        JoinReply::Rejected { rank, reason } => {
            return Err(ClusterFault::Aborted { rank, reason: excerpt(&reason) }.into());
        }
    };
    let mut streams = BTreeMap::from([(0, first)]);
    for rank in peers.iter().copied().filter(|rank| (1..launch.rank).contains(rank)) {
        let Some(address) = addresses.get(rank as usize).copied() else { continue };
        let (mut stream, _) =
            connect_with_retry(rank, &address.to_string(), launch, deadline, || Ok(vec![address]))?;
        let hello = PeerHello { run_id, rank: launch.rank };
        send_message(&mut stream, &hello).map_err(|error| disconnected(rank, &error))?;
        streams.insert(rank, stream);
    }
    let mut listener = Listener::new(listener, launch.job.clone());
    let mut awaited: BTreeSet<u64> =
        peers.iter().copied().filter(|rank| *rank > launch.rank).collect();
    while !awaited.is_empty() {
        if deadline.has_passed() {
            let missing = awaited.into_iter().collect();
            return Err(deadline.missing(missing, launch.world_size, &own_address).into());
        }
        let Some((stream, hello, _)) = listener.poll::<PeerHello>() else { continue };
        // A process of another run may have been given an address of an earlier one.
        if hello.run_id == run_id && awaited.remove(&hello.rank) {
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

/// Tries until the deadline to connect with a process of the same job.
fn connect_with_retry(
    rank: u64,
    address: &str,
    launch: &LaunchInfo,
    deadline: &JoinDeadline,
    addresses: impl Fn() -> io::Result<Vec<SocketAddr>>,
) -> Result<(TcpStream, SocketAddr), ClusterError> {
    let try_all = || -> io::Result<(TcpStream, SocketAddr)> {
        let mut last_error = io::Error::from(io::ErrorKind::NotFound);
        for address in addresses()? {
            match TcpStream::connect_timeout(&address, Duration::from_secs(5)) {
                Ok(mut stream) => {
                    let end = deadline.end().min(Instant::now() + HANDSHAKE_TIMEOUT);
                    match introduce(&mut stream, &launch.job, end) {
                        Ok(()) => return Ok((stream, address)),
                        Err(error) => last_error = error,
                    }
                }
                Err(error) => last_error = error,
            }
        }
        Err(last_error)
    };
    let mut stranger = None;
    loop {
        let error = match try_all() {
            Ok(connection) => return Ok(connection),
            Err(error) => error,
        };
        let reason = reason_of(&error);
        // Says more than that the last attempt had no answer in time.
        if error.kind() == io::ErrorKind::InvalidData {
            stranger = Some(reason.clone());
        }
        if deadline.has_passed() {
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

/// A number that differs from those of other runs.
fn new_run_id() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (now.as_nanos() as u64) ^ (u64::from(std::process::id()) << 40)
}
