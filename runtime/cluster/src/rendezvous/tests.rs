//! Handshakes that are damaged on the way.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use narrows_runtime::process_group::ProcessGroup as _;
use narrows_test_support::free_port;

use super::super::handshake::{POLL_INTERVAL, read_message};
use super::super::job_token::JobToken;
use super::super::launcher::Launcher;
use super::super::process_group::{ClusterTimeouts, TcpProcessGroup};
use super::*;

/// Side whose bytes are damaged.
#[derive(Clone, Copy, Debug)]
enum Sender {
    Initiator,
    Responder,
}

/// Forwards connections to a port. Flips a bit of the first one, after `intact` bytes of a sender.
struct Proxy {
    port: u16,
    has_damaged: Arc<AtomicBool>,
    connections: Arc<AtomicUsize>,
}

impl Proxy {
    fn start(target: u16, sender: Sender, intact: usize) -> Proxy {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let (has_damaged, connections) = <(Arc<AtomicBool>, Arc<AtomicUsize>)>::default();
        let proxy =
            Proxy { port, has_damaged: has_damaged.clone(), connections: connections.clone() };
        std::thread::spawn(move || {
            for initiator in listener.incoming().flatten() {
                let Ok(responder) = TcpStream::connect(("127.0.0.1", target)) else { continue };
                let is_first = connections.fetch_add(1, Ordering::Relaxed) == 0;
                let damage = is_first.then_some(intact);
                let (from_initiator, from_responder) = match sender {
                    Sender::Initiator => (damage, None),
                    Sender::Responder => (None, damage),
                };
                let back = (responder.try_clone().unwrap(), initiator.try_clone().unwrap());
                forward((initiator, responder), from_initiator, has_damaged.clone());
                forward(back, from_responder, has_damaged.clone());
            }
        });
        proxy
    }
}

/// Forwards bytes in one direction until the connection ends.
fn forward(
    (mut from, mut to): (TcpStream, TcpStream),
    damage: Option<usize>,
    has_damaged: Arc<AtomicBool>,
) {
    std::thread::spawn(move || {
        let (mut buffer, mut forwarded) = ([0; 4096], 0);
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            if let Some(at) = damage.filter(|at| (forwarded..forwarded + count).contains(at)) {
                buffer[at - forwarded] ^= 1 << (at % 8);
                has_damaged.store(true, Ordering::Relaxed);
            }
            forwarded += count;
            if to.write_all(&buffer[..count]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
        let _ = from.shutdown(Shutdown::Read);
    });
}

fn launch_of(rank: u64, world_size: u64, port: u16) -> LaunchInfo {
    LaunchInfo {
        launcher: Launcher::Torchrun,
        rank,
        world_size,
        local_rank: rank,
        local_world_size: world_size,
        rendezvous: Address { host: "127.0.0.1".into(), port },
        job: JobToken::new("a job"),
    }
}

fn launch(rank: u64, port: u16) -> LaunchInfo {
    launch_of(rank, 2, port)
}

const TIMEOUT: Duration = Duration::from_secs(30);

/// Calls `attempt` for every byte of a sender until it returns that there is no such byte. Returns the number of bytes.
fn for_every_byte(attempt: impl Fn(usize) -> bool + Sync) -> usize {
    let (next, end) = (AtomicUsize::new(0), AtomicUsize::new(usize::MAX));
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                loop {
                    let byte = next.fetch_add(1, Ordering::Relaxed);
                    if byte >= end.load(Ordering::Relaxed) {
                        return;
                    }
                    if !attempt(byte) {
                        end.fetch_min(byte, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    end.into_inner()
}

/// Joins two processes whose first connection is damaged, and returns the outcome of each; `None` where the damaged byte is
/// never sent.
fn join_over(sender: Sender, byte: usize, values: [&str; 2]) -> Option<[Option<ClusterFault>; 2]> {
    let port = free_port();
    let facts = |value: &str| vec![RunFact { name: "a property".into(), value: value.to_owned() }];
    let fault = |launch: LaunchInfo, value| {
        connect(&launch, facts(value), &[], TIMEOUT, &mut |_| ()).err().map(|error| error.fault)
    };
    let start = Instant::now();
    let (proxy, outcomes) = std::thread::scope(|scope| {
        let first = scope.spawn(|| fault(launch(0, port), values[0]));
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let proxy = Proxy::start(port, sender, byte);
        let second = fault(launch(1, proxy.port), values[1]);
        (proxy, [first.join().unwrap(), second])
    });
    assert!(start.elapsed() < TIMEOUT / 2, "{sender:?}, byte {byte}: {:?}", start.elapsed());
    proxy.has_damaged.load(Ordering::Relaxed).then_some(outcomes)
}

#[test]
fn a_process_joins_again_after_any_damaged_byte() {
    for (sender, bytes_min) in [(Sender::Initiator, 150), (Sender::Responder, 100)] {
        let bytes = for_every_byte(|byte| match join_over(sender, byte, ["same", "same"]) {
            Some(outcomes) => {
                assert_eq!(outcomes, [None, None], "{sender:?}, byte {byte}");
                true
            }
            None => false,
        });
        assert!(bytes >= bytes_min, "{sender:?} sends {bytes} bytes");
    }
}

#[test]
fn a_rejection_arrives_after_any_damaged_byte() {
    for sender in [Sender::Initiator, Sender::Responder] {
        for_every_byte(|byte| match join_over(sender, byte, ["this", "that"]) {
            Some([first, second]) => {
                let mismatch = matches!(&first, Some(ClusterFault::RunMismatch { peer_value, .. })
                    if peer_value == "that");
                assert!(mismatch, "{sender:?}, byte {byte}: {first:?}");
                let reason = first.unwrap().to_string();
                let rejected = Some(ClusterFault::Aborted { rank: 0, reason });
                assert_eq!(second, rejected, "{sender:?}, byte {byte}");
                true
            }
            None => false,
        });
    }
}

#[test]
fn peers_connect_again_after_any_damaged_byte() {
    for sender in [Sender::Initiator, Sender::Responder] {
        let bytes = for_every_byte(|byte| {
            let own_address = Address { host: "127.0.0.1".into(), port: 0 };
            let listener = listen_at(&own_address).unwrap();
            let proxy = Proxy::start(listener.local_addr().unwrap().port(), sender, byte);
            let deadline = || JoinDeadline { start: Instant::now(), timeout: TIMEOUT };
            let mut streams = std::thread::scope(|scope| {
                let accepting = scope.spawn(|| {
                    let launch = launch(1, 0);
                    let listener = Listener::new(listener, launch.job.clone());
                    let awaited = BTreeSet::from([2]);
                    accept_peers((listener, &own_address), &launch, 7, awaited, &deadline())
                });
                let address = Address { port: proxy.port, ..own_address.clone() };
                let hello = PeerHello { run_id: 7, rank: 2 };
                let greeted = greet((1, &address), &launch(2, 0), &hello, &deadline());
                let accepted = accepting.join().unwrap().unwrap();
                [greeted.unwrap(), accepted.into_values().next().unwrap()]
            });
            let was_damaged = proxy.has_damaged.load(Ordering::Relaxed);
            if proxy.connections.load(Ordering::Relaxed) > 1 {
                // Both have the ends of the undamaged connection.
                streams[0].write_all(b"!").unwrap();
                streams[1].set_read_timeout(Some(TIMEOUT)).unwrap();
                let mut received = [0];
                streams[1].read_exact(&mut received).unwrap();
                assert_eq!(received, *b"!", "{sender:?}, byte {byte}");
            }
            was_damaged
        });
        assert!(bytes >= 56, "{sender:?} sends {bytes} bytes");
    }
}

/// Sends the request of a process that then ends.
fn join_and_end(launch: &LaunchInfo, reads_answer: bool) {
    let deadline = JoinDeadline { start: Instant::now(), timeout: TIMEOUT };
    let (rank, world_size) = (launch.rank, launch.world_size);
    let request = JoinRequest {
        rank,
        world_size,
        process_id: new_id(),
        port: 1,
        facts: vec![],
        failure: None,
    };
    let target = Target::awaited(0, &launch.rendezvous);
    let ask = |stream: &mut TcpStream, _| {
        send_message(stream, &request).unwrap();
        if reads_answer {
            read_message::<JoinReply>(stream, deadline.end()).unwrap();
        }
        Ok(Ok(()))
    };
    meet(target, launch, &deadline, ask).unwrap();
}

#[test]
fn a_process_that_ends_while_it_waits_may_be_started_again() {
    let port = free_port();
    std::thread::scope(|scope| {
        let join = |rank| {
            move || {
                let launch = launch_of(rank, 3, port);
                connect(&launch, vec![], &[], TIMEOUT, &mut |_| ()).map(|all| all.len())
            }
        };
        let first = scope.spawn(join(0));
        join_and_end(&launch_of(1, 3, port), false);
        std::thread::sleep(5 * POLL_INTERVAL);
        let others = [1, 2].map(|rank| scope.spawn(join(rank)));
        assert_eq!(first.join().unwrap(), Ok(2));
        assert_eq!(others.map(|other| other.join().unwrap()), [Ok(1), Ok(1)]);
    });
}

/// The last process to join ends with the answer. It is named at once by all others.
#[test]
fn a_process_that_ends_when_all_have_joined_is_named() {
    let port = free_port();
    let timeouts = ClusterTimeouts { join: TIMEOUT, collective: TIMEOUT };
    let start = Instant::now();
    std::thread::scope(|scope| {
        let join = |rank, peers: &'static [u64]| {
            move || {
                let group =
                    TcpProcessGroup::join(&launch_of(rank, 4, port), vec![], peers, timeouts)?;
                group.gather_and_broadcast_bytes(vec![], &mut |_| Ok(vec![])).map(drop)
            }
        };
        let first = scope.spawn(join(0, &[]));
        let (other, neighbour) = (scope.spawn(join(2, &[])), scope.spawn(join(3, &[1])));
        std::thread::sleep(20 * POLL_INTERVAL);
        join_and_end(&launch_of(1, 4, port), true);
        let fault = first.join().unwrap().unwrap_err().fault;
        assert!(matches!(fault, ClusterFault::Disconnected { rank: 1, .. }), "{fault}");
        let reason = fault.to_string();
        let aborted = ClusterFault::Aborted { rank: 0, reason };
        assert_eq!(other.join().unwrap().unwrap_err().fault, aborted);
        // It connects with the process that has ended.
        let fault = neighbour.join().unwrap().unwrap_err().fault;
        assert!(matches!(fault, ClusterFault::Unreachable { rank: 1, .. }), "{fault}");
    });
    assert!(start.elapsed() < TIMEOUT / 3, "{:?}", start.elapsed());
}
