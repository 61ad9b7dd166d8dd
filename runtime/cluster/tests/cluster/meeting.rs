//! Strangers, slow connections and failed processes at the rendezvous.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use narrows_cluster::{
    Address, ClusterFault, ClusterTimeouts, JobToken, LaunchInfo, TcpProcessGroup,
};
use narrows_runtime::process_group::ProcessGroup;
use narrows_test_support::plans::TestRng;

use super::{TIMEOUTS, fact, launches, run_processes};

fn join_fault(launch: &LaunchInfo, timeouts: ClusterTimeouts) -> Option<ClusterFault> {
    let joined = TcpProcessGroup::join(launch, fact("same"), &[], timeouts);
    joined.err().map(|error| error.fault)
}

/// Joins two processes, the second after `meanwhile`.
fn join_after(launches: &[LaunchInfo], meanwhile: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let first = scope.spawn(|| join_fault(&launches[0], TIMEOUTS));
        meanwhile();
        assert_eq!(join_fault(&launches[1], TIMEOUTS), None);
        assert_eq!(first.join().unwrap(), None);
    });
}

#[test]
fn a_process_of_another_job_is_refused_and_the_others_meet() {
    let launches = launches(2);
    join_after(&launches, || {
        let stranger = LaunchInfo { job: JobToken::new("another job"), ..launches[1].clone() };
        let timeouts = ClusterTimeouts { join: Duration::from_secs(2), ..TIMEOUTS };
        let Some(ClusterFault::Unreachable { rank: 0, reason, .. }) =
            join_fault(&stranger, timeouts)
        else {
            panic!("a stranger has joined")
        };
        assert!(reason.contains("another job listens there"), "{reason}");
    });
}

#[test]
fn garbage_does_not_keep_processes_from_meeting() {
    let launches = launches(2);
    join_after(&launches, || {
        let mut rng = TestRng::new(5);
        for attempt in 0..300 {
            let Ok(mut stream) = TcpStream::connect(launches[0].rendezvous.to_string()) else {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            };
            let greeting: &[u8] =
                [&b"narrows\x03"[..], b"narrows\x02", b"GET / HT", b""][attempt % 4];
            let noise: Vec<u8> = (0..rng.below(200)).map(|_| rng.below(256) as u8).collect();
            let _ = stream.write_all(&[greeting, &noise].concat());
        }
    });
}

/// A host that sends a byte now and then.
#[test]
fn a_slow_host_does_not_prolong_the_timeout() {
    let launches = launches(2);
    let listener = TcpListener::bind(launches[0].rendezvous.to_string()).unwrap();
    listener.set_nonblocking(true).unwrap();
    let timeouts = ClusterTimeouts { join: Duration::from_millis(600), ..TIMEOUTS };
    let start = Instant::now();
    std::thread::scope(|scope| {
        let joining = scope.spawn(|| join_fault(&launches[1], timeouts));
        let mut streams: Vec<TcpStream> = vec![];
        while !joining.is_finished() {
            streams.extend(listener.accept().map(|(stream, _)| stream));
            streams.iter_mut().for_each(|stream| drop(stream.write_all(b"n")));
            std::thread::sleep(Duration::from_millis(100));
        }
        let fault = joining.join().unwrap();
        assert!(matches!(fault, Some(ClusterFault::Unreachable { rank: 0, .. })), "{fault:?}");
    });
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
}

#[test]
fn a_process_that_fails_before_it_joins_tells_the_others() {
    for failed in 0..3 {
        let reason = "plan.json: cannot be read\u{1b}[2J";
        let faults = run_processes(&launches(3), |launch| {
            if launch.rank == failed {
                TcpProcessGroup::report_failure(launch, reason, TIMEOUTS.join);
                return None;
            }
            join_fault(launch, TIMEOUTS)
        });
        for (rank, fault) in faults.iter().enumerate().filter(|(rank, _)| *rank as u64 != failed) {
            let reason = "plan.json: cannot be read\\u{1b}[2J".to_owned();
            let expected = ClusterFault::Aborted { rank: failed, reason };
            assert_eq!(fault.as_ref(), Some(&expected), "process {rank}");
        }
    }
}

/// Forwards one connection to an address. Flips a bit of what is sent there, after `intact` bytes.
fn flip_a_bit(listener: TcpListener, target: String, intact: usize) {
    let (mut visitor, _) = listener.accept().unwrap();
    let mut host = loop {
        match TcpStream::connect(&target) {
            Ok(stream) => break stream,
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let (mut back_from, mut back_to) = (host.try_clone().unwrap(), visitor.try_clone().unwrap());
    std::thread::spawn(move || std::io::copy(&mut back_from, &mut back_to));
    let (mut buffer, mut forwarded) = ([0; 4096], 0);
    while let Ok(count @ 1..) = visitor.read(&mut buffer) {
        if (forwarded..forwarded + count).contains(&intact) {
            buffer[intact - forwarded] ^= 4;
        }
        forwarded += count;
        if host.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
}

#[test]
fn a_bit_that_flips_on_the_way_ends_the_run() {
    // Within the payload of a frame, and within the header of the third.
    for intact in [25_000, 500 + 3 * 10_032] {
        let mut launches = launches(2);
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let target = launches[0].rendezvous.to_string();
        let port = listener.local_addr().unwrap().port();
        launches[1].rendezvous = Address { host: "127.0.0.1".into(), port };
        let proxy = std::thread::spawn(move || flip_a_bit(listener, target, intact));
        let faults = run_processes(&launches, |launch| {
            let group = TcpProcessGroup::join(launch, fact("same"), &[], TIMEOUTS).unwrap();
            for _ in 0..10 {
                let message = vec![launch.rank as u8; 10_000];
                let mut check = |messages: Vec<Vec<u8>>| {
                    assert!(messages[1].iter().all(|byte| *byte == 1), "a damaged message arrived");
                    Ok(vec![])
                };
                if let Err(error) = group.gather_and_broadcast_bytes(message, &mut check) {
                    group.abort(launch.rank, &error.to_string());
                    return Some(error.fault.to_string());
                }
            }
            None
        });
        let fault = faults[0].as_ref().expect("the damage was noticed");
        assert!(fault.contains("process 1 (a frame ") && fault.contains("damaged"), "{fault}");
        proxy.join().unwrap();
    }
}
