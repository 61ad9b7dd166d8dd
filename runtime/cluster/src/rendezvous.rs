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

mod answers;
mod connection;
mod failure_report;
mod messages;
mod strangers;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use narrows_runtime::process_group::{ClusterError, ClusterFault, excerpt};

use super::handshake::{
    HANDSHAKE_TIMEOUT, Listener, has_confirmation, read_confirmation, send_confirmation,
    send_message,
};
use super::launch::{Address, LaunchInfo};
use answers::Answers;
use connection::{ANSWER_TIME, JoinDeadline, Target, listen_at, meet};
pub(super) use failure_report::report_failure;
pub use messages::RunFact;
use messages::{JoinReply, JoinRequest, PeerHello, ask, new_id};
use strangers::Strangers;

/// Waits for all processes, and returns connections with rank 0 and with the peers. Rank 0 reports whom it turns away.
pub(super) fn connect(
    launch: &LaunchInfo,
    facts: Vec<RunFact>,
    peers: &[u64],
    timeout: Duration,
    report: &mut dyn FnMut(&str),
) -> Result<BTreeMap<u64, TcpStream>, ClusterError> {
    let deadline = JoinDeadline { start: Instant::now(), timeout };
    match launch.rank {
        0 => accept_all(launch, &facts, &deadline, Strangers::new(report)),
        _ => join_rank_0(launch, facts, peers, &deadline),
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
    mut strangers: Strangers,
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
        let joining = listener.poll::<JoinRequest>();
        strangers.report(listener.turned_away());
        let Some((stream, request, ip)) = joining else { continue };
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
