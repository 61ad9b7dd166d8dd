//! Saving and loading checkpoints.

use std::io;
use std::path::{Path, PathBuf};

use narrows_plan::model::Model;

use super::contents::{Checkpoint, CheckpointOrigin, CheckpointOutline, ResumeError};
use super::error::CheckpointError;
use super::folder::{self, Retention};
use super::format::{MANIFEST, MODEL, OPTIMIZER, STATE, parse_json};
use super::manifest::{FileEntry, Manifest};
use super::names::stored_parameters;
use super::shards::ShardReader;
use super::state::RunState;
use super::tensors::{self, HashingWriter, TensorGroup};
use crate::optimizer::Optimizer;
use crate::session::{ModelTensors, TensorKind};
use crate::train::Trainer;

/// Suffix of a parameter's name in the name of a tensor.
pub(super) const WEIGHT_SUFFIX: &str = "";
pub(super) const FIRST_MOMENT_SUFFIX: &str = ".first_moment";
pub(super) const SECOND_MOMENT_SUFFIX: &str = ".second_moment";

/// Writes a checkpoint into the checkpoint folder of a run, which is created if necessary, and removes
/// checkpoints of earlier steps that need not remain. Only one run may write to a folder, which must be [locked](super::lock): two writers would remove each
/// other's unfinished files.
///
/// # Errors
/// When the checkpoint does not belong to the model, or a file cannot be written; existing checkpoints
/// are then unchanged.
pub fn save(
    dir: &Path,
    checkpoint: &Checkpoint,
    model: &Model,
    retention: impl Into<Retention>,
) -> Result<PathBuf, CheckpointError> {
    let parameters = stored_parameters(model);
    let state = RunState::new(checkpoint, model);
    let target = dir.join(folder::folder_name(checkpoint.step));
    let error = |fault| CheckpointError::new(&target, fault);
    state.check_model(model).map_err(error)?;
    for whole in [&checkpoint.weights, &checkpoint.first_moments, &checkpoint.second_moments] {
        tensors::check(&parameters, whole).map_err(error)?;
    }
    let temporary = folder::create_temporary(dir)?;
    // Errors name the final path, not the temporary one.
    let failed = |name: &str| CheckpointError::io(&target.join(name), "written");
    let write_tensors = |name, groups: &[TensorGroup]| {
        tensors::write(&temporary.path().join(name), &parameters, groups).map_err(failed(name))
    };
    let weights = write_tensors(MODEL, &[(WEIGHT_SUFFIX, &checkpoint.weights)])?;
    let moments = [
        (FIRST_MOMENT_SUFFIX, &checkpoint.first_moments),
        (SECOND_MOMENT_SUFFIX, &checkpoint.second_moments),
    ];
    let optimizer = write_tensors(OPTIMIZER, &moments)?;
    let state = write_json(&temporary.path().join(STATE), &state).map_err(failed(STATE))?;
    let manifest = Manifest::new(weights, optimizer, state);
    write_json(&temporary.path().join(MANIFEST), &manifest).map_err(failed(MANIFEST))?;
    let path = folder::commit(temporary, dir, checkpoint.step)?;
    folder::prune(dir, checkpoint.step, retention.into());
    Ok(path)
}

/// Reads a checkpoint from its own folder, and checks that it is complete, undamaged, and of this
/// model.
///
/// # Errors
/// The first problem, with the file and the location in it.
pub fn load(path: &Path, model: &Model) -> Result<Checkpoint, CheckpointError> {
    let manifest = Manifest::read(path)?;
    let state = read_state(path, &manifest, model)?;
    let (weights, first_moments, second_moments) = if manifest.is_of_shards() {
        let mut reader = ShardReader::new(path, &manifest, model);
        (
            reader.whole(TensorKind::Weights)?,
            reader.whole(TensorKind::FirstMoments)?,
            reader.whole(TensorKind::SecondMoments)?,
        )
    } else {
        read_whole(path, &manifest, model)?
    };
    Ok(Checkpoint {
        step: state.step,
        seed: state.seed,
        cursor: state.cursor,
        optimizer: state.optimizer.to_optimizer(),
        evaluations: state.evaluations,
        model_fingerprint: state.model.fingerprint,
        origin: state.origin,
        weights,
        first_moments,
        second_moments,
    })
}

/// Reads the state of a checkpoint without its tensors.
///
/// # Errors
/// A manifest or a state that is missing or damaged.
pub fn outline(path: &Path) -> Result<CheckpointOutline, CheckpointError> {
    let manifest = Manifest::read(path)?;
    let state: RunState = parse_json(&path.join(STATE), &manifest.read_file(path, STATE)?)?;
    Ok(CheckpointOutline {
        step: state.step,
        seed: state.seed,
        sequence_length: state.cursor.sequence_length,
        targets: state.cursor.targets,
        optimizer: state.optimizer.to_optimizer(),
        global_batch: state.origin.map(|origin| origin.workload.global_batch),
    })
}

/// As [`outline`], after verifying the contents of all files.
///
/// # Errors
/// The first problem.
pub fn verified_outline(path: &Path) -> Result<CheckpointOutline, CheckpointError> {
    verify_files(path)?;
    outline(path)
}

/// Whether a folder is a checkpoint, complete or not, rather than the folder of a run's checkpoints.
pub fn is_checkpoint(path: &Path) -> bool {
    path.join(MANIFEST).exists()
}

/// State of the checkpoint from which a run was resumed, without what the run has taken over.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ResumedState {
    /// Number of optimizer steps.
    pub step: u64,
    /// Hyper-parameters of the run that wrote the checkpoint. The resumed run keeps its own.
    pub optimizer: Optimizer,
    /// Outline of the plan of that run.
    pub origin: Option<CheckpointOrigin>,
}

/// Puts a run, under any plan of the model, into the state of a checkpoint, which is [checked](load). Of a checkpoint of
/// shards, a process reads those only that its devices need.
///
/// # Errors
/// The first problem, with the file and the location in it; or a run that reads other tokens, or in another order. The
/// tensors of the run are then unspecified.
pub fn resume(
    path: &Path,
    trainer: &mut Trainer,
    model: &Model,
) -> Result<ResumedState, ResumeError> {
    let manifest = Manifest::read(path)?;
    if !manifest.is_of_shards() {
        let checkpoint = load(path, model)?;
        checkpoint.resume(trainer)?;
        let Checkpoint { step, optimizer, origin, .. } = checkpoint;
        return Ok(ResumedState { step, optimizer, origin });
    }
    let state = read_state(path, &manifest, model)?;
    trainer.sampler().sequence_to_resume(&state.cursor)?;
    ShardReader::new(path, &manifest, model).restore(trainer.session_mut())?;
    trainer.resume(&state.cursor, state.step)?;
    trainer.set_evaluations(state.evaluations);
    let RunState { step, optimizer, origin, .. } = state;
    Ok(ResumedState { step, optimizer: optimizer.to_optimizer(), origin })
}

/// Verifies the contents of a checkpoint, without holding its tensors. Returns its step.
///
/// # Errors
/// The first problem.
pub fn verify(path: &Path, model: &Model) -> Result<u64, CheckpointError> {
    read_state(path, &verify_files(path)?, model).map(|state| state.step)
}

/// Verifies the checksums of all files.
fn verify_files(path: &Path) -> Result<Manifest, CheckpointError> {
    let manifest = Manifest::read(path)?;
    manifest.files().try_for_each(|file| manifest.verify_file(path, file))?;
    Ok(manifest)
}

fn read_state(
    path: &Path,
    manifest: &Manifest,
    model: &Model,
) -> Result<RunState, CheckpointError> {
    let state_path = path.join(STATE);
    let state: RunState = parse_json(&state_path, &manifest.read_file(path, STATE)?)?;
    state.check_model(model).map_err(|fault| CheckpointError::new(&state_path, fault))?;
    Ok(state)
}

/// Weights, first and second moments from the files of whole tensors.
fn read_whole(
    path: &Path,
    manifest: &Manifest,
    model: &Model,
) -> Result<(ModelTensors, ModelTensors, ModelTensors), CheckpointError> {
    let parameters = stored_parameters(model);
    let error = |name: &str| {
        let path = path.join(name);
        move |fault| CheckpointError::new(&path, fault)
    };
    let [weights] = tensors::read(&manifest.read_file(path, MODEL)?, &parameters, [WEIGHT_SUFFIX])
        .map_err(error(MODEL))?;
    let suffixes = [FIRST_MOMENT_SUFFIX, SECOND_MOMENT_SUFFIX];
    let [first_moments, second_moments] =
        tensors::read(&manifest.read_file(path, OPTIMIZER)?, &parameters, suffixes)
            .map_err(error(OPTIMIZER))?;
    Ok((weights, first_moments, second_moments))
}

pub(super) fn write_json(path: &Path, value: &impl serde::Serialize) -> io::Result<FileEntry> {
    let mut file = HashingWriter::create(path)?;
    let mut text = serde_json::to_vec_pretty(value)?;
    text.push(b'\n');
    file.write(&text)?;
    file.finish()
}
