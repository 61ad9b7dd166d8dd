//! The files of checkpoints: writing those of whole tensors, and loading all.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use narrows_plan::model::Model;

use super::contents::{Checkpoint, CheckpointOrigin, CheckpointOutline, ResumeError};
use super::error::{CheckpointError, CheckpointFault};
use super::folder::step_of_folder;
use super::format::{
    FIRST_MOMENT_SUFFIX, MANIFEST, MODEL, OPTIMIZER, SECOND_MOMENT_SUFFIX, STATE, WEIGHT_SUFFIX,
    is_shard, parse_json,
};
use super::manifest::{FileEntry, Manifest};
use super::names::stored_parameters;
use super::shards::{self, ShardReader};
use super::state::RunState;
use super::tensors::{self, HashingWriter, TensorGroup};
use crate::gemm_dtype::GemmDtype;
use crate::optimizer::Optimizer;
use crate::process_group::{ProcessGroup, StorageUse};
use crate::session::{ModelTensors, TensorKind};
use crate::train::Trainer;

/// Checks that a checkpoint with this state is one of the model.
pub(super) fn check_whole(
    checkpoint: &Checkpoint,
    state: &RunState,
    model: &Model,
) -> Result<(), CheckpointFault> {
    state.check_model(model)?;
    let parameters = stored_parameters(model);
    let tensors = [&checkpoint.weights, &checkpoint.first_moments, &checkpoint.second_moments];
    tensors.into_iter().try_for_each(|whole| tensors::check(&parameters, whole))
}

/// Writes the files of whole tensors into a folder. Errors name files of `target`, the final folder. The checkpoint must be
/// [checked](check_whole).
pub(super) fn write_whole(
    (folder, target): (&Path, &Path),
    checkpoint: &Checkpoint,
    model: &Model,
) -> Result<BTreeMap<String, FileEntry>, CheckpointError> {
    let parameters = stored_parameters(model);
    let write = |name: &str, groups: &[TensorGroup]| {
        let written = tensors::write(&folder.join(name), &parameters, groups);
        let entry = written.map_err(CheckpointError::io(&target.join(name), "written"))?;
        Ok((name.to_owned(), entry))
    };
    let moments = [
        (FIRST_MOMENT_SUFFIX, &checkpoint.first_moments),
        (SECOND_MOMENT_SUFFIX, &checkpoint.second_moments),
    ];
    let weights = write(MODEL, &[(WEIGHT_SUFFIX, &checkpoint.weights)])?;
    Ok(BTreeMap::from([weights, write(OPTIMIZER, &moments)?]))
}

/// Reads a checkpoint from its own folder, and checks that it is complete, undamaged, and of this
/// model.
///
/// # Errors
/// The first problem, with the file and the location in it.
pub fn load(path: &Path, model: &Model) -> Result<Checkpoint, CheckpointError> {
    load_files(path, &Manifest::read(path)?, model)
}

fn load_files(
    path: &Path,
    manifest: &Manifest,
    model: &Model,
) -> Result<Checkpoint, CheckpointError> {
    let state = read_state(path, manifest, model)?;
    let (weights, first_moments, second_moments) = if manifest.is_of_shards() {
        let storage = StorageUse::begin(None);
        let mut reader = ShardReader::new(path, manifest, model, &storage);
        (
            reader.whole(TensorKind::Weights)?,
            reader.whole(TensorKind::FirstMoments)?,
            reader.whole(TensorKind::SecondMoments)?,
        )
    } else {
        read_whole(path, manifest, model)?
    };
    Ok(Checkpoint {
        step: state.step,
        seed: state.seed,
        cursor: state.cursor,
        optimizer: state.optimizer.to_optimizer(),
        evaluations: state.evaluations,
        model_fingerprint: state.model.fingerprint,
        gemm_dtype: state.gemm_dtype,
        origin: state.origin,
        weights,
        first_moments,
        second_moments,
    })
}

/// Reads the weights of a checkpoint, as [`load`] does, without the moments.
///
/// # Errors
/// The first problem, with the file and the location in it.
pub fn load_weights(path: &Path, model: &Model) -> Result<ModelTensors, CheckpointError> {
    let manifest = Manifest::read(path)?;
    read_state(path, &manifest, model)?;
    read_weights(path, &manifest, model)
}

/// Reads the weights of a checkpoint as the initial ones of a model whose parameters have the same names and shapes. All
/// else may differ, as the positions of a model that is trained on longer sequences do.
///
/// # Errors
/// The first problem, with the file and the location in it.
pub fn load_initial_weights(path: &Path, model: &Model) -> Result<ModelTensors, CheckpointError> {
    read_weights(path, &Manifest::read(path)?, model)
}

fn read_weights(
    path: &Path,
    manifest: &Manifest,
    model: &Model,
) -> Result<ModelTensors, CheckpointError> {
    match manifest.is_of_shards() {
        true => {
            let storage = StorageUse::begin(None);
            ShardReader::new(path, manifest, model, &storage).whole(TensorKind::Weights)
        }
        false => read_whole_weights(path, manifest, model),
    }
}

/// A checkpoint all of whose files exist and have their sizes.
#[derive(Clone, Debug)]
pub struct FoundCheckpoint {
    path: PathBuf,
    manifest: Manifest,
}

impl FoundCheckpoint {
    /// Reads the manifest of a checkpoint.
    ///
    /// # Errors
    /// A manifest that is missing or damaged, and a file that is missing or has another size.
    pub fn open(path: &Path) -> Result<FoundCheckpoint, CheckpointError> {
        Ok(FoundCheckpoint { path: path.to_path_buf(), manifest: Manifest::read(path)? })
    }

    /// As [`open`](FoundCheckpoint::open), and verifies the contents of all files, without holding them: their checksums, the
    /// state and the headers of tensors. Reading the checkpoint then computes no checksum again.
    ///
    /// # Errors
    /// The first problem.
    pub fn verify(path: &Path) -> Result<FoundCheckpoint, CheckpointError> {
        FoundCheckpoint::verify_files(path, &StorageUse::begin(None))
    }

    /// As [`verify`](FoundCheckpoint::verify) where each process of a run verifies a part of the files. The checkpoint is undamaged if
    /// all of them find it so.
    ///
    /// # Errors
    /// The first problem that this process finds, or another process that has ended the run.
    pub fn verify_part(
        path: &Path,
        group: &Arc<dyn ProcessGroup>,
    ) -> Result<FoundCheckpoint, CheckpointError> {
        FoundCheckpoint::verify_files(path, &StorageUse::begin(Some(group.clone())))
    }

    fn verify_files(path: &Path, storage: &StorageUse) -> Result<FoundCheckpoint, CheckpointError> {
        let manifest = Manifest::read(path)?.verify_part(path, storage)?;
        manifest.part(storage).try_for_each(|name| check_tensor_header(path, name))?;
        let found = FoundCheckpoint { path: path.to_path_buf(), manifest };
        found.outline().map(|_| found)
    }

    /// Whether the checkpoint still has the same manifest, and files of the same sizes.
    pub fn is_unchanged(&self) -> bool {
        Manifest::read(&self.path).is_ok_and(|manifest| manifest.has_files_of(&self.manifest))
    }

    /// Path of its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the state of the checkpoint without its tensors.
    ///
    /// # Errors
    /// A state that is missing or damaged.
    pub fn outline(&self) -> Result<CheckpointOutline, CheckpointError> {
        let FoundCheckpoint { path, manifest } = self;
        let state = read_any_state(path, manifest)?;
        Ok(CheckpointOutline {
            step: state.step,
            seed: state.seed,
            sequence_length: state.cursor.sequence_length,
            targets: state.cursor.targets,
            optimizer: state.optimizer.to_optimizer(),
            gemm_dtype: state.gemm_dtype,
            global_batch: state.origin.map(|origin| origin.workload.global_batch),
        })
    }

    /// Puts a run, under any plan of the model, into the state of the checkpoint, which is checked as by [`load`]. Of a
    /// checkpoint of shards, a process reads those only that its devices need.
    ///
    /// # Errors
    /// The first problem, with the file and the location in it; or a run that reads other tokens, or in another order. The
    /// tensors of the run are then unspecified.
    pub fn resume(
        &self,
        trainer: &mut Trainer,
        model: &Model,
    ) -> Result<ResumedState, ResumeError> {
        let FoundCheckpoint { path, manifest } = self;
        let storage = StorageUse::begin(trainer.session().process_group().cloned());
        if !manifest.is_of_shards() {
            let checkpoint = load_files(path, manifest, model)?;
            checkpoint.resume(trainer)?;
            let Checkpoint { step, optimizer, gemm_dtype, origin, .. } = checkpoint;
            return Ok(ResumedState { step, optimizer, gemm_dtype, origin });
        }
        let state = read_state(path, manifest, model)?;
        trainer.sampler().sequence_to_resume(&state.cursor)?;
        ShardReader::new(path, manifest, model, &storage).restore(trainer.session_mut())?;
        trainer.resume(&state.cursor, state.step)?;
        trainer.set_evaluations(state.evaluations);
        let RunState { step, optimizer, gemm_dtype, origin, .. } = state;
        Ok(ResumedState { step, optimizer: optimizer.to_optimizer(), gemm_dtype, origin })
    }
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
    /// Format to which that run rounded the operands of GEMMs.
    pub gemm_dtype: GemmDtype,
    /// Outline of the plan of that run.
    pub origin: Option<CheckpointOrigin>,
}

fn read_state(
    path: &Path,
    manifest: &Manifest,
    model: &Model,
) -> Result<RunState, CheckpointError> {
    let state = read_any_state(path, manifest)?;
    state.check_model(model).map_err(|fault| CheckpointError::new(&path.join(STATE), fault))?;
    Ok(state)
}

/// The state of a checkpoint of any model.
fn read_any_state(path: &Path, manifest: &Manifest) -> Result<RunState, CheckpointError> {
    let state_path = path.join(STATE);
    let state: RunState = parse_json(&state_path, &manifest.read_file(path, STATE)?)?;
    match step_of_folder(path).filter(|step| *step != state.step) {
        None => Ok(state),
        Some(step) => {
            let problem = format!("is {}, and the name of the folder has {step}", state.step);
            let fault = CheckpointFault::InvalidField { field: "step".into(), problem };
            Err(CheckpointError::new(&state_path, fault))
        }
    }
}

/// Checks the header of a file of a checkpoint, if the file has tensors. The tensors are compared with the model only when they
/// are read.
fn check_tensor_header(folder: &Path, name: &str) -> Result<(), CheckpointError> {
    let path = folder.join(name);
    match name {
        MODEL | OPTIMIZER => tensors::check_header(&path),
        _ if is_shard(name) => shards::read_header(&path).map(drop),
        _ => Ok(()),
    }
}

/// Weights, first and second moments from the files of whole tensors.
fn read_whole(
    path: &Path,
    manifest: &Manifest,
    model: &Model,
) -> Result<(ModelTensors, ModelTensors, ModelTensors), CheckpointError> {
    let weights = read_whole_weights(path, manifest, model)?;
    let suffixes = [FIRST_MOMENT_SUFFIX, SECOND_MOMENT_SUFFIX];
    let [first_moments, second_moments] = read_groups(path, manifest, model, OPTIMIZER, suffixes)?;
    Ok((weights, first_moments, second_moments))
}

fn read_whole_weights(
    path: &Path,
    manifest: &Manifest,
    model: &Model,
) -> Result<ModelTensors, CheckpointError> {
    let [weights] = read_groups(path, manifest, model, MODEL, [WEIGHT_SUFFIX])?;
    Ok(weights)
}

/// The tensors of a file with these suffixes.
fn read_groups<const N: usize>(
    path: &Path,
    manifest: &Manifest,
    model: &Model,
    name: &str,
    suffixes: [&'static str; N],
) -> Result<[ModelTensors; N], CheckpointError> {
    let bytes = manifest.read_file(path, name)?;
    tensors::read(&bytes, &stored_parameters(model), suffixes)
        .map_err(|fault| CheckpointError::new(&path.join(name), fault))
}

pub(super) fn write_json(path: &Path, value: &impl serde::Serialize) -> io::Result<FileEntry> {
    let mut file = HashingWriter::create(path)?;
    let mut text = serde_json::to_vec_pretty(value)?;
    text.push(b'\n');
    file.write(&text)?;
    file.finish()
}
