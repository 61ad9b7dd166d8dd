//! The report of a process that has failed before it could join the others.

use std::time::{Duration, Instant};

use narrows_runtime::process_group::excerpt;

use super::answers::Answers;
use super::connection::{JoinDeadline, Target, listen_at, meet};
use super::messages::{JoinReply, JoinRequest, ask, new_id};
use crate::handshake::Listener;
use crate::launch::LaunchInfo;

/// Longest time that a process which has failed waits to tell the others.
const FAILURE_REPORT_TIME: Duration = Duration::from_secs(10);

/// Tells the processes of a run that this one has failed before it could join them. Ends when all have been told that can
/// be reached soon. Where rank 0 is already waiting for the others in another thread, that thread is told, and rejects them.
pub fn report_failure(launch: &LaunchInfo, reason: &str, timeout: Duration) {
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
