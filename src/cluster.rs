//! Joining and leaving the process group of a run or a calibration.

use std::sync::Arc;

use narrows_cluster::{ClusterError, ClusterTimeouts, LaunchInfo, RunFact, TcpProcessGroup};
use narrows_runtime::RunError;
use narrows_runtime::process_group::ProcessGroup;

use crate::errors::{CommandResult, ExitStatus, Failure, Problem};

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

/// Joins the process group. Every process must join before the timeout with the same `facts`. `neighbours` are the ranks
/// with which this process exchanges data.
pub fn join(
    process: &LaunchedProcess,
    facts: Vec<RunFact>,
    neighbours: &[u64],
) -> CommandResult<Arc<TcpProcessGroup>> {
    let joined = TcpProcessGroup::join(&process.launch, facts, neighbours, process.timeouts);
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
    let reason = reason_of(&failure);
    TcpProcessGroup::report_failure(&process.launch, &reason, process.timeouts.join);
    with_label(failure, &process.label())
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
