//! Many processes that do one thing: how they begin and end together, whatever it is.

use std::sync::Arc;

use narrows_cluster::{ClusterError, RunFact, TcpProcessGroup};
use narrows_runtime::RunError;
use narrows_runtime::process_group::ProcessGroup;

use crate::args::launch::LaunchedProcess;
use crate::errors::{CommandResult, ExitStatus, Failure};

/// Meets the others: all must be there, and mean the same by these facts. `neighbours` are those it talks to.
pub fn join(
    launched: &LaunchedProcess,
    facts: Vec<RunFact>,
    neighbours: &[u64],
) -> CommandResult<Arc<TcpProcessGroup>> {
    let joined = TcpProcessGroup::join(&launched.launch, facts, neighbours, launched.deadlines);
    joined.map(Arc::new).map_err(|error| of_process(failed(error), &launched.process()))
}

/// Parts from the others, or tells them why it ends.
pub fn part(
    cluster: &TcpProcessGroup,
    done: CommandResult<()>,
    process: &str,
) -> CommandResult<()> {
    match done {
        // Who was asked to stop told the others, and all stopped.
        Ok(()) | Err(Failure { ending: ExitStatus::Stopped, .. }) => {
            let parted = cluster.shut_down().map_err(|error| of_process(failed(error), process));
            parted.and(done)
        }
        Err(failure) => {
            let why = failure.problems.first().map_or("it failed", |problem| &problem.problem);
            cluster.abort(cluster.rank(), why);
            Err(of_process(failure, process))
        }
    }
}

/// That what many processes do ends.
pub fn failed(error: ClusterError) -> Failure {
    Failure::execution(&RunError::Cluster(error))
}

/// Says which process it was: their messages come together.
pub fn of_process(mut failure: Failure, process: &str) -> Failure {
    for problem in &mut failure.problems {
        problem.place = match problem.place.is_empty() {
            true => process.to_owned(),
            false => format!("{process}: {}", problem.place),
        };
    }
    failure
}
