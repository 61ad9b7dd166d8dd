//! Many processes that do one thing: how they begin and end together, whatever it is.

use std::sync::Arc;

use narrows_cluster::{Cluster, ClusterError, Fact};
use narrows_runtime::RunError;

use crate::args::launch::Launched;
use crate::errors::{Ending, Failure, Outcome};

/// Meets the others: all must be there, and mean the same by these facts. `neighbours` are those it talks to.
pub fn join(launched: &Launched, facts: Vec<Fact>, neighbours: &[u64]) -> Outcome<Arc<Cluster>> {
    let joined = Cluster::join(&launched.launch, facts, neighbours, launched.deadlines);
    joined.map(Arc::new).map_err(|error| of_process(failed(error), &launched.process()))
}

/// Parts from the others, or tells them why it ends.
pub fn part(cluster: &Cluster, done: Outcome<()>, process: &str) -> Outcome<()> {
    match done {
        // Who was asked to stop told the others, and all stopped.
        Ok(()) | Err(Failure { ending: Ending::Stopped, .. }) => {
            let parted = cluster.part().map_err(|error| of_process(failed(error), process));
            parted.and(done)
        }
        Err(failure) => {
            let why = failure.problems.first().map_or("it failed", |problem| &problem.problem);
            cluster.give_up_because(why);
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
