//! The answer of rank 0 to all processes.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use narrows_runtime::process_group::ClusterError;

use super::connection::disconnected;
use super::messages::{JoinReply, JoinRequest};
use crate::frame::abort_frame;
use crate::handshake::{Listener, has_confirmation, send_message};

/// The answer of rank 0 to all processes, sent until each has confirmed it.
pub(super) struct Answers {
    listener: Listener,
    world_size: u64,
    reply: JoinReply,
    /// The processes, by rank and number, that have been answered, and whether they have confirmed it.
    answered: BTreeMap<(u64, u64), (TcpStream, bool)>,
}

impl Answers {
    pub fn new(listener: Listener, world_size: u64, reply: JoinReply) -> Answers {
        Answers { listener, world_size, reply, answered: BTreeMap::new() }
    }

    /// Answers a process.
    pub fn add(&mut self, rank: u64, process_id: u64, mut stream: TcpStream) {
        let sent = stream
            .set_nonblocking(false)
            .and_then(|()| send_message(&mut stream, &self.reply))
            .and_then(|()| stream.set_nonblocking(true));
        if sent.is_ok() {
            self.answered.insert((rank, process_id), (stream, false));
        }
    }

    /// Waits until the end for confirmations, and for `missing_time` in which a process has not asked or has lost its
    /// connection. Requests that are not `expected` are disconnected. Returns whether all processes have confirmed the answer.
    pub fn send(
        &mut self,
        missing_time: Duration,
        end: Instant,
        expected: impl Fn(&JoinRequest) -> bool,
    ) -> bool {
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
                    return true;
                }
            } else if now >= *missing_since.get_or_insert(now) + missing_time {
                return false;
            }
            if now >= end {
                return false;
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
    pub fn into_streams(self) -> Result<BTreeMap<u64, TcpStream>, ClusterError> {
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
