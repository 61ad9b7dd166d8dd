//! A run of many processes, each of which is a device: what they must mean alike, and where they stand.

use std::sync::Arc;

use narrows_cluster::{RunFact, TcpProcessGroup};
use narrows_runtime::RunError;
use narrows_runtime::process_group::agree;
use narrows_runtime::session::Session;
use narrows_runtime::sha256;

use super::PlannedRun;
use crate::args::checkpoint::CheckpointSettings;
use crate::args::run::{ExecutionTarget, TokenSource, TrainSettings};
use crate::errors::{CommandResult, ExitStatus, Failure, Problem};
use crate::processes::{self, failed, of_process};

/// Meets the other processes, if there are any: all must be there, and mean the same.
pub fn join(
    planned: &PlannedRun,
    training: &TrainSettings,
) -> CommandResult<Option<Arc<TcpProcessGroup>>> {
    let Some(launched) = &training.launched else { return Ok(None) };
    let (devices, processes) = (planned.plan.mesh.devices(), launched.launch.world_size);
    if devices != processes {
        let mut failure =
            Failure::execution(&RunError::ProcessCountMismatch { devices, processes });
        failure.ending = ExitStatus::BadInput;
        return Err(of_process(failure, &launched.process()));
    }
    let neighbours = Session::peers(planned.program.program(), launched.launch.rank);
    Ok(Some(processes::join(launched, facts(planned, training), &neighbours)?))
}

/// That all stand at the same step of the same tokens: each process reads the files for itself.
pub fn all_stand_at(
    cluster: &TcpProcessGroup,
    step: u64,
    tokens_sha256: String,
) -> CommandResult<()> {
    let all = agree(cluster, (step, tokens_sha256), |all| all).map_err(failed)?;
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

/// What must be the same for all processes.
fn facts(planned: &PlannedRun, training: &TrainSettings) -> Vec<RunFact> {
    let PlannedRun { model, plan, .. } = planned;
    let plan = serde_json::to_vec(plan).unwrap_or_default();
    let tokens = match &training.tokens {
        TokenSource::Shipped => "those within the program".into(),
        TokenSource::File(path) => path.display().to_string(),
    };
    let checkpoints = match &training.checkpoints {
        None => "none".into(),
        Some(CheckpointSettings { dir, every, origin, .. }) => {
            format!("every {every} steps in {}, from {origin:?}", dir.display())
        }
    };
    let backend = match training.on {
        ExecutionTarget::Processors => "cpu",
        ExecutionTarget::Gpus { .. } => "cuda",
    };
    let fact = |what: &str, value: String| RunFact { name: what.into(), value };
    vec![
        fact("version", env!("CARGO_PKG_VERSION").into()),
        fact("backend", backend.into()),
        fact("model", model.fingerprint()),
        fact("plan", hex::encode(sha256(&plan))),
        fact("tokens", tokens),
        fact("steps", training.steps.to_string()),
        fact("seed", training.seed.to_string()),
        fact("schedule and optimizer", format!("{:?}", training.optimizer)),
        fact("checkpoints", checkpoints),
    ]
}
