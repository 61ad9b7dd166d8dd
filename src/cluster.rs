//! Joining and leaving the process group of a run or a calibration, and decisions of all its processes.

use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Duration;

use narrows_cluster::{ClusterError, ClusterTimeouts, LaunchInfo, RunFact, TcpProcessGroup};
use narrows_runtime::RunError;
use narrows_runtime::process_group::{ProcessGroup, gather_and_broadcast};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::errors::{CommandResult, ExitStatus, Failure, Problem};
use crate::output;

/// One of several processes that a launcher started.
#[derive(Clone, Debug)]
pub struct LaunchedProcess {
    /// Process rank, number of processes and the rendezvous address.
    pub launch: LaunchInfo,
    /// Timeouts of joining and of collectives.
    pub timeouts: ClusterTimeouts,
}

impl LaunchedProcess {
    /// Whether this process prints and writes files for all processes.
    pub fn is_rank_0(&self) -> bool {
        self.launch.rank == 0
    }

    /// The name of this process in messages: `process 0 of 2`.
    pub fn label(&self) -> String {
        format!("process {} of {}", self.launch.rank, self.launch.world_size)
    }
}

/// Progress of a process into its process group, for the thread that handles signals.
#[derive(Default)]
pub struct Membership {
    state: Mutex<MembershipState>,
    changed: Condvar,
}

#[derive(Default)]
enum MembershipState {
    #[default]
    Outside,
    Joining,
    Joined(Weak<TcpProcessGroup>),
}

/// Reason that other processes report where a signal ended one of them.
const STOPPED_BY_SIGNAL: &str = "a signal stopped it";

/// Longest time that a process which a signal ends waits to tell the others.
const STOP_REPORT_TIME: Duration = Duration::from_secs(5);

impl Membership {
    /// Joins a process group with `join`.
    pub fn join(
        &self,
        join: impl FnOnce() -> CommandResult<Option<Arc<TcpProcessGroup>>>,
    ) -> CommandResult<Option<Arc<TcpProcessGroup>>> {
        self.set(MembershipState::Joining);
        let joined = join();
        self.set(match &joined {
            Ok(Some(group)) => MembershipState::Joined(Arc::downgrade(group)),
            _ => MembershipState::Outside,
        });
        joined
    }

    /// Tells the other processes that a signal ends this one.
    pub fn report_stop(&self, process: &LaunchedProcess) {
        if let MembershipState::Joined(group) =
            &*self.state.lock().unwrap_or_else(PoisonError::into_inner)
        {
            if let Some(group) = group.upgrade() {
                group.abort(group.rank(), STOPPED_BY_SIGNAL);
            }
            return;
        }
        let timeout = process.timeouts.join.min(STOP_REPORT_TIME);
        TcpProcessGroup::report_failure(&process.launch, STOPPED_BY_SIGNAL, timeout);
        // Rank 0 may be about to reject the processes that it has waited for.
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let is_joining = |state: &mut MembershipState| matches!(state, MembershipState::Joining);
        let _ = self.changed.wait_timeout_while(state, STOP_REPORT_TIME, is_joining);
    }

    fn set(&self, state: MembershipState) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = state;
        self.changed.notify_all();
    }
}

/// Joins the process group. Every process must join before the timeout with the same `facts`. `neighbours` are the ranks
/// with which this process exchanges data.
pub fn join(
    process: &LaunchedProcess,
    facts: Vec<RunFact>,
    neighbours: &[u64],
) -> CommandResult<Arc<TcpProcessGroup>> {
    let LaunchedProcess { launch, timeouts } = process;
    let joined =
        TcpProcessGroup::join_with_reports(launch, facts, neighbours, *timeouts, &mut output::warn);
    joined.map(Arc::new).map_err(|error| with_label(cluster_failure(error), &process.label()))
}

/// Leaves the process group with the outcome of this process; a failure is sent to the others.
pub fn leave(
    group: &TcpProcessGroup,
    outcome: CommandResult<()>,
    label: &str,
) -> CommandResult<()> {
    match outcome {
        // All processes agreed to stop.
        Ok(()) | Err(Failure { status: ExitStatus::Stopped, .. }) => {
            let left = group.shut_down().map_err(|error| with_label(cluster_failure(error), label));
            left.and(outcome)
        }
        Err(failure) => {
            group.abort(group.rank(), &reason_of(&failure));
            Err(with_label(failure, label))
        }
    }
}

/// Tells the other processes that this one has failed before it could join them.
pub fn report_failure(process: &LaunchedProcess, failure: Failure) -> Failure {
    report_reason(process, &reason_of(&failure));
    with_label(failure, &process.label())
}

/// Tells the other processes why this one has failed before it could join them.
pub fn report_reason(process: &LaunchedProcess, reason: &str) {
    TcpProcessGroup::report_failure(&process.launch, reason, process.timeouts.join);
}

/// The first problem of a failure with its place, for other processes.
fn reason_of(failure: &Failure) -> String {
    failure.problems.first().map_or("it failed".into(), |problem| {
        let Problem { location, field, message, .. } = problem;
        let places = [location, field].into_iter().filter(|place| !place.is_empty());
        places.chain([message]).cloned().collect::<Vec<String>>().join(": ")
    })
}

/// A failure of the process group.
pub fn cluster_failure(error: ClusterError) -> Failure {
    Failure::execution(&RunError::Cluster(error))
}

/// Prefixes the problems with their process, since the output of all processes is interleaved.
pub fn with_label(mut failure: Failure, label: &str) -> Failure {
    for problem in &mut failure.problems {
        problem.location = match problem.location.is_empty() {
            true => label.to_owned(),
            false => format!("{label}: {}", problem.location),
        };
    }
    failure
}

/// The decision of all processes of a run, if there are several, on a value of each.
///
/// # Errors
/// A lost process.
pub fn agree<T: Serialize + DeserializeOwned>(
    group: Option<&Arc<dyn ProcessGroup>>,
    own: T,
    decide: impl FnOnce(Vec<T>) -> T,
) -> CommandResult<T> {
    match group {
        None => Ok(decide(vec![own])),
        Some(group) => gather_and_broadcast(&**group, own, decide).map_err(cluster_failure),
    }
}
