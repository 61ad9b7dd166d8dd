//! Listening at an address, and connecting with a process that listens there.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use narrows_runtime::process_group::{ClusterError, ClusterFault};

use crate::handshake::{HANDSHAKE_TIMEOUT, POLL_INTERVAL, introduce};
use crate::launch::{Address, LaunchInfo};

/// Time that a process has to connect again where it has not received its answer, or has yet to ask.
pub(super) const ANSWER_TIME: Duration = Duration::from_secs(2);

/// Time in which processes must have joined.
pub(super) struct JoinDeadline {
    pub start: Instant,
    pub timeout: Duration,
}

impl JoinDeadline {
    pub fn waited_s(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }

    pub fn has_passed(&self) -> bool {
        self.start.elapsed() >= self.timeout
    }

    pub fn end(&self) -> Instant {
        self.start + self.timeout
    }

    pub fn missing(&self, ranks: Vec<u64>, world_size: u64, address: &Address) -> ClusterFault {
        let (address, waited_s) = (address.to_string(), self.waited_s());
        ClusterFault::MissingProcesses { ranks, world_size, address, waited_s }
    }
}

pub(super) fn resolve(address: &Address) -> io::Result<Vec<SocketAddr>> {
    Ok((address.host.as_str(), address.port).to_socket_addrs()?.collect())
}

pub(super) fn listen_at(address: &Address) -> Result<TcpListener, ClusterError> {
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
pub(super) struct Target<'a> {
    pub rank: u64,
    pub address: &'a Address,
    /// Whether it is known to have listened there: then it has ended where it no longer does.
    pub has_listened: bool,
}

impl Target<'_> {
    /// A process that may listen later.
    pub fn awaited(rank: u64, address: &Address) -> Target<'_> {
        Target { rank, address, has_listened: false }
    }
}

/// Tries until the deadline to connect with a process of the same job, and to exchange messages with it. `exchange` returns
/// the answer, an error after which another connection may succeed, or one that ends the attempts.
pub(super) fn meet<T>(
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

pub(super) fn disconnected(rank: u64, error: &io::Error) -> ClusterError {
    let (operation, reason) = ("the rendezvous".into(), reason_of(error));
    ClusterFault::Disconnected { rank, operation, reason }.into()
}

/// The error of a connection, in words.
pub(super) fn reason_of(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "it does not answer".into(),
        io::ErrorKind::UnexpectedEof => "it closed the connection".into(),
        _ => error.to_string(),
    }
}
