//! A run of many processes, each of which is a device: how they begin and end together.

use std::sync::Arc;

use narrows_runtime::RunError;
use narrows_runtime::cluster::{Cluster, ClusterError, Fact};
use narrows_runtime::data::{digest, hex};
use narrows_runtime::session::Session;

use super::Planned;
use crate::args::checkpoint::Checkpoints;
use crate::args::run::{On, Tokens, Training};
use crate::errors::{Ending, Failure, Outcome, Problem};

/// Meets the other processes, if there are any: all must be there, and mean the same.
pub fn join(planned: &Planned, training: &Training) -> Outcome<Option<Arc<Cluster>>> {
    let Some(launched) = &training.launched else { return Ok(None) };
    let (devices, processes) = (planned.plan.mesh.devices(), launched.launch.world);
    if devices != processes {
        let mut failure = Failure::execution(&RunError::Processes { devices, processes });
        failure.ending = Ending::BadInput;
        return Err(of_process(failure, &training.process()));
    }
    let neighbours = Session::neighbours(planned.program.program(), launched.launch.rank);
    let facts = facts(planned, training);
    let joined = Cluster::join(&launched.launch, facts, &neighbours, launched.deadlines);
    let cluster = joined.map_err(|error| of_process(failed(error), &training.process()))?;
    Ok(Some(Arc::new(cluster)))
}

/// Parts from the others, or tells them why the run ends.
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

/// That all stand at the same step of the same tokens: each process reads the files for itself.
pub fn all_stand_at(cluster: &Cluster, step: u64, tokens_sha256: String) -> Outcome<()> {
    let all = cluster.agree((step, tokens_sha256), |all| all).map_err(failed)?;
    let (first_step, first_tokens) = &all[0];
    let mut others = all.iter().enumerate();
    let Some((rank, (step, tokens))) = others.find(|(_, other)| **other != all[0]) else {
        return Ok(());
    };
    let problem = match tokens == first_tokens {
        false => {
            Problem::new("--data", format!("process {rank} reads other tokens than process 0"))
        }
        true => {
            let problem =
                format!("process {rank} goes on from step {step}, and process 0 from {first_step}");
            Problem::new("--checkpoint-dir", problem)
        }
    };
    Err(Failure::failed(vec![problem.hint("files that are the same for all processes")]))
}

/// That a run of many processes ends.
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

/// What must be the same for all processes.
fn facts(planned: &Planned, training: &Training) -> Vec<Fact> {
    let Planned { model, plan, .. } = planned;
    let plan = serde_json::to_vec(plan).unwrap_or_default();
    let tokens = match &training.tokens {
        Tokens::Shipped => "those within the program".into(),
        Tokens::File(path) => path.display().to_string(),
    };
    let checkpoints = match &training.checkpoints {
        None => "none".into(),
        Some(Checkpoints { dir, every, origin, .. }) => {
            format!("every {every} steps in {}, from {origin:?}", dir.display())
        }
    };
    let backend = match training.on {
        On::Processors => "cpu",
        On::Gpus { .. } => "cuda",
    };
    let fact = |what: &str, value: String| Fact { what: what.into(), value };
    vec![
        fact("version", env!("CARGO_PKG_VERSION").into()),
        fact("backend", backend.into()),
        fact("model", model.fingerprint()),
        fact("plan", hex(&digest(&plan))),
        fact("tokens", tokens),
        fact("steps", training.steps.to_string()),
        fact("seed", training.seed.to_string()),
        fact("schedule and optimizer", format!("{:?}", training.optimizer)),
        fact("checkpoints", checkpoints),
    ]
}
