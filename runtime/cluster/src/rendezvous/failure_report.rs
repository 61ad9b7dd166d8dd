//! The report of a process that has failed before it could join the others.

use std::time::{Duration, Instant};

use narrows_runtime::process_group::excerpt;

use super::answers::Answers;
use super::connection::{JoinDeadline, Target, listen_at, meet};
use super::messages::{JoinReply, JoinRequest, ask, new_id};
use crate::handshake::Listener;
use crate::launch::LaunchInfo;
use crate::siblings::may_have_siblings;

/// Longest time that a process which has failed waits to tell the others.
const FAILURE_REPORT_TIME: Duration = Duration::from_secs(10);

/// Time after which a process that has seen no other one of its job does not wait. Launchers start all within that time.
const START_TIME: Duration = Duration::from_secs(2);

/// Tells the processes of a run that this one has failed before it could join them. Ends when all have been told that can
/// be reached soon. Where rank 0 is already waiting for the others in another thread, that thread is told, and rejects them.
pub fn report_failure(launch: &LaunchInfo, reason: &str, timeout: Duration) {
    let timeout = timeout.min(FAILURE_REPORT_TIME);
    let start_time = timeout.min(START_TIME);
    let mut report = FailureReport::new(launch, excerpt(reason));
    if !report.send(start_time) && may_have_siblings(launch) {
        report.send(timeout - start_time);
    }
}

/// The report of a failure, which rank 0 sends to those that ask, and another rank to rank 0.
enum FailureReport<'a> {
    Answers(Answers),
    Request(&'a LaunchInfo, JoinRequest),
}

impl FailureReport<'_> {
    fn new(launch: &LaunchInfo, reason: String) -> FailureReport<'_> {
        let (rank, world_size) = (launch.rank, launch.world_size);
        if rank == 0
            && let Ok(listener) = listen_at(&launch.rendezvous)
        {
            let listener = Listener::new(listener, launch.job.clone());
            let reply = JoinReply::Rejected { rank, reason };
            return FailureReport::Answers(Answers::new(listener, world_size, reply));
        }
        let (process_id, port, facts, failure) = (new_id(), 0, vec![], Some(reason));
        let request = JoinRequest { rank, world_size, process_id, port, facts, failure };
        FailureReport::Request(launch, request)
    }

    /// Sends the report for a time. Returns whether all know it.
    fn send(&mut self, timeout: Duration) -> bool {
        let deadline = JoinDeadline { start: Instant::now(), timeout };
        match self {
            FailureReport::Answers(answers) => answers.send(timeout, deadline.end(), |_| true),
            FailureReport::Request(launch, request) => {
                // The answer shows that the request has arrived.
                meet(Target::awaited(0, &launch.rendezvous), launch, &deadline, |stream, _| {
                    Ok(ask(stream, request, deadline.end()))
                })
                .is_ok()
            }
        }
    }
}
