//! Runs of several processes, one per device: joining, and the facts that all processes must share.

use std::sync::Arc;

use narrows_cluster::{RunFact, TcpProcessGroup};
use narrows_runtime::checkpoint::SaveMode;
use narrows_runtime::process_group::gather_and_broadcast;
use narrows_runtime::session::Session;
use narrows_runtime::{GemmDtype, RunError, sha256};
use serde::{Deserialize, Serialize};

use super::PlannedRun;
use crate::args::{
    CheckpointSettings, ExecutionTarget, RunOrigin, TokenSource, TrainSettings, ValidationSettings,
    flags_of_optimizer,
};
use crate::cluster::{self, cluster_failure};
use crate::errors::{CommandResult, ExitStatus, Failure, Problem};
use crate::text::{every as counted_every, plural};

/// Checks that a run of several processes has one for each device of its plan.
pub fn require_one_per_device(planned: &PlannedRun, training: &TrainSettings) -> CommandResult<()> {
    let Some(process) = &training.process else { return Ok(()) };
    let (devices, processes) = (planned.plan.mesh.devices(), process.launch.world_size);
    if devices == processes {
        return Ok(());
    }
    let mut failure = Failure::execution(&RunError::ProcessCountMismatch { devices, processes });
    failure.status = ExitStatus::BadInput;
    Err(failure)
}

/// Joins the process group of the run, if there are other processes.
pub fn join(
    planned: &PlannedRun,
    training: &TrainSettings,
) -> CommandResult<Option<Arc<TcpProcessGroup>>> {
    let Some(process) = &training.process else { return Ok(None) };
    let neighbours = Session::peers(planned.program.program(), process.launch.rank);
    Ok(Some(cluster::join(process, facts(planned, training), &neighbours)?))
}

/// Start of a process, which reads the files itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunStart {
    /// The step after which the run starts.
    pub step: u64,
    /// Digest of the token file.
    pub tokens_sha256: String,
    /// Digest of the token file of evaluations; empty without evaluations.
    pub evaluated_sha256: String,
    /// Digest of the imported weights; empty without an import.
    pub weights_sha256: String,
}

/// Checks that all processes start from the same.
pub fn require_same_start(group: &TcpProcessGroup, start: RunStart) -> CommandResult<()> {
    let all = gather_and_broadcast(group, start, |all| all).map_err(cluster_failure)?;
    let first = &all[0];
    let Some((rank, other)) = all.iter().enumerate().find(|(_, other)| *other != first) else {
        return Ok(());
    };
    let files = [
        ("--data", "a different token file", other.tokens_sha256 == first.tokens_sha256),
        ("--eval-data", "a different token file", other.evaluated_sha256 == first.evaluated_sha256),
        ("--init-from", "different weights", other.weights_sha256 == first.weights_sha256),
    ];
    let problem = match files.into_iter().find(|(.., is_same)| !is_same) {
        Some((flag, read, _)) => {
            Problem::new(flag, format!("process {rank} reads {read} than process 0"))
        }
        None => Problem::new(
            "--checkpoint-dir",
            format!(
                "process {rank} resumes from step {}, and process 0 from {}",
                other.step, first.step
            ),
        ),
    };
    Err(Failure::failed(vec![problem.hint("the same files for all processes")]))
}

/// The facts that must be equal in all processes.
fn facts(planned: &PlannedRun, training: &TrainSettings) -> Vec<RunFact> {
    let PlannedRun { model, plan, .. } = planned;
    let plan = serde_json::to_vec(plan).unwrap_or_default();
    let tokens = match &training.tokens {
        TokenSource::BuiltIn => "the built-in text".into(),
        TokenSource::File(path) => path.display().to_string(),
    };
    let checkpoints = match &training.checkpoints {
        None => "none".into(),
        Some(CheckpointSettings { dir, every, mode, origin, keep_best, .. }) => {
            let origin = match origin {
                RunOrigin::FirstStep => "the first step",
                RunOrigin::LastCheckpoint => "the last checkpoint",
                RunOrigin::NewestUndamaged => "the newest undamaged checkpoint",
            };
            let best = if *keep_best { " and the best" } else { "" };
            let behind = match mode {
                SaveMode::Blocking => "",
                SaveMode::Background => " in the background",
            };
            let dir = dir.display();
            let every = counted_every(every.get(), "step");
            format!("{every}{best}{behind} in {dir}, starting at {origin}")
        }
    };
    let evaluations = match &training.validation {
        None => "none".into(),
        Some(ValidationSettings { file, every, tokens, early_stop }) => {
            let file = file.display();
            let tokens = tokens.map_or("all tokens".into(), |tokens| plural(tokens, "token"));
            let stop = match early_stop {
                None => "without early stop".into(),
                Some(patience) => {
                    format!("early stop after {}", plural(patience.get(), "evaluation"))
                }
            };
            let every = counted_every(every.get(), "step");
            format!("{tokens} of {file} {every}, {stop}")
        }
    };
    let initial_weights = match &training.init_from {
        None => "those of the seed".into(),
        Some(path) => path.display().to_string(),
    };
    let backend = match training.target {
        ExecutionTarget::Cpu => "cpu",
        ExecutionTarget::Gpus { .. } => "cuda",
    };
    let fact = |name: &str, value: String| RunFact { name: name.into(), value };
    let optimizer = flags_of_optimizer(&training.recipe.optimizer).into_iter();
    let optimizer = optimizer.map(|(flag, value)| fact(flag, value));
    let facts = [
        fact("version", env!("CARGO_PKG_VERSION").into()),
        fact("backend", backend.into()),
        fact("model", model.fingerprint()),
        fact("plan", hex::encode(sha256(&plan))),
        fact("tokens", tokens),
        fact("initial weights", initial_weights),
        fact("steps", training.recipe.steps.to_string()),
        fact("evaluations", evaluations),
        fact("seed", training.recipe.seed.to_string()),
        fact("dtype", training.gemm_dtype().map_or("of the plan", GemmDtype::name).into()),
        fact("targets", training.recipe.targets.to_string()),
        fact("checkpoints", checkpoints),
    ];
    facts.into_iter().chain(optimizer).collect()
}
