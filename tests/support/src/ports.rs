use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

/// Ports below those that systems give to connections and to listeners without a port of their own.
const FIRST: u32 = 10_000;
const COUNT: u32 = 22_000;

/// A port of the loopback address at which no program listens, another one with each call. No connection takes it before the test
/// listens at it. No call gives the next port, which a run under the agent of torchrun uses.
pub fn free_port() -> u16 {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    // Test programs that run at the same time begin at ports far from each other.
    let begin = std::process::id().wrapping_mul(7_919) % COUNT;
    loop {
        let number = (begin + 2 * CALLS.fetch_add(1, Ordering::Relaxed)) % COUNT;
        let port = u16::try_from(FIRST + number).expect("a port");
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
