//! Strangers at the port where the processes of a run meet.

use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use narrows_test_support::free_port;
use narrows_test_support::plans::TestRng;

use super::fixture::{SMALL_RUN, copy_folder, fixture, start_rank, wait_for_rank};

/// Strangers of one attempt.
const STRANGERS: usize = 40;

/// Lets strangers connect while one of two processes waits for the other; the run then succeeds.
pub fn attempt(seed: u64) {
    let arguments = format!(
        "{SMALL_RUN} --tensor 1 --pipeline 1 --steps 2 --data @t.tokens --join-timeout 30 --collective-timeout 30"
    );
    let mut rng = TestRng::new(seed);
    let token = ["", " --job-token-file @docs.txt"][rng.below(2)];
    let arguments = arguments + token;
    let folder = tempfile::tempdir().expect("a temporary folder");
    copy_folder(fixture(), folder.path()).expect("a copy");
    let port = free_port();
    let first = start_rank(folder.path(), (0, 2), port, &arguments);
    let mut held = vec![];
    for _ in 0..STRANGERS {
        held.extend(visit(&mut rng, port));
    }
    let second = start_rank(folder.path(), (1, 2), port, &arguments);
    for (rank, child) in [first, second].into_iter().enumerate() {
        wait_for_rank(folder.path(), rank, child);
    }
}

/// Connects and sends what no process sends. Returns a connection that stays open.
fn visit(rng: &mut TestRng, port: u16) -> Option<TcpStream> {
    let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) else {
        // The first process does not listen yet.
        std::thread::sleep(Duration::from_millis(5));
        return None;
    };
    let length = [0, 1, 4, 8, 31, 64, 4096][rng.below(7)];
    let mut bytes: Vec<u8> = (0..length).map(|_| rng.below(256) as u8).collect();
    match rng.below(4) {
        0 => bytes.iter_mut().take(8).for_each(|byte| *byte = 0xff),
        1 => bytes.iter_mut().for_each(|byte| *byte = 0),
        2 => bytes.splice(0..0, *b"GET / HTTP/1.1\r\nHost: narrows\r\n\r\n").for_each(drop),
        _ => {}
    }
    // The process may hang up first.
    let _ = stream.write_all(&bytes);
    match rng.below(3) {
        0 => drop(stream.shutdown(Shutdown::Write)),
        1 => return None,
        _ => {}
    }
    Some(stream)
}
