//! Checkpoints: where a run stands, in files.
//!
//! A checkpoint holds whole, unsharded tensors under Hugging Face style names ([`names`]), so nothing
//! in it depends on the plan: a run goes on under the same plan bit by bit, under another as near as
//! sums of f32 in another order come. It is a folder of four files:
//!
//! | file | contents |
//! |---|---|
//! | `model.safetensors` | the weights |
//! | `optimizer.safetensors` | the moments, under the weights' names and `.first_moment`, `.second_moment` |
//! | `state.json` | step, seed, data cursor, hyper-parameters, the model's fingerprint |
//! | `manifest.json` | size and SHA-256 of the others |
//!
//! [`save`] writes them under a temporary name, makes sure that they are on the disk, and renames the
//! folder; [`latest`] finds the last whole one by looking, so there is no pointer to be wrong;
//! [`load`] checks every byte. Whatever the bytes are, what is wrong is a [`CheckpointError`] with the
//! place it is at, never a panic.
//!
//! ```no_run
//! # use std::{num::NonZeroUsize, path::Path};
//! # use narrows_runtime::checkpoint::{self, Checkpoint};
//! # fn run(
//! #     model: &narrows_plan::model::Model, trainer: &mut narrows_runtime::Trainer,
//! # ) -> Result<(), Box<dyn std::error::Error>> {
//! let dir = Path::new("checkpoints");
//! if let Some(path) = checkpoint::latest(dir)? {
//!     checkpoint::load(&path, model)?.resume(trainer)?;
//! }
//! let now = Checkpoint::of_trainer(trainer, model, 1)?.expect("the only process");
//! checkpoint::save(dir, &now, model, NonZeroUsize::new(3).unwrap())?;
//! # Ok(())
//! # }
//! ```

mod error;
mod folder;
mod lock;
mod manifest;
mod names;
mod restore;
mod state;
mod tensors;

use std::io;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use narrows_plan::model::Model;

pub use error::{CheckpointError, CheckpointFault, TensorFault};
pub use folder::{FoundCheckpoint, folder_name, latest, list};
pub use lock::{FolderLock, lock};
pub use names::{StoredParameter, stored_name, stored_parameters};
pub use restore::ResumeError;
pub use state::CheckpointOrigin;

use crate::data::Cursor;
use crate::optimizer::Optimizer;
use crate::session::NamedTensors;
use manifest::{FileEntry, Manifest};
use state::RunState;
use tensors::HashingWriter;

/// The version of the format that is written and read.
pub const FORMAT_VERSION: u64 = 1;

const MODEL: &str = "model.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const STATE: &str = "state.json";
const MANIFEST: &str = "manifest.json";

const WEIGHTS: &str = "";
const FIRST_MOMENTS: &str = ".first_moment";
const SECOND_MOMENTS: &str = ".second_moment";

/// Where a run stands.
#[derive(Clone, Debug, PartialEq)]
pub struct Checkpoint {
    /// Optimizer steps made.
    pub step: u64,
    /// The run's seed.
    pub seed: u64,
    /// What it reads next.
    pub cursor: Cursor,
    /// The hyper-parameters it was trained with.
    pub optimizer: Optimizer,
    /// [`Model::fingerprint`] of its model.
    pub model_fingerprint: String,
    /// The plan's outlines, for people.
    pub origin: Option<CheckpointOrigin>,
    /// Weights, by logical name.
    pub weights: NamedTensors,
    /// AdamW's first moments, by the logical name of their parameter.
    pub first_moments: NamedTensors,
    /// AdamW's second moments, likewise.
    pub second_moments: NamedTensors,
}

/// Writes a checkpoint into the folder of a run's checkpoints, which is made if it is not there, and
/// removes the oldest ones before it, so that `keep` of them are left with the new one. The folder is
/// one run's alone: two that write at once remove each other's unfinished files, so a run [`lock`]s it.
///
/// # Errors
/// When the checkpoint is not of this model, and when a file cannot be written: then the checkpoints
/// that were there are still there.
pub fn save(
    dir: &Path,
    checkpoint: &Checkpoint,
    model: &Model,
    keep: NonZeroUsize,
) -> Result<PathBuf, CheckpointError> {
    let stored = names::stored_parameters(model);
    let state = RunState::new(checkpoint, model);
    let refuse =
        |fault| CheckpointError::new(&dir.join(folder::folder_name(checkpoint.step)), fault);
    state.check_model(model).map_err(refuse)?;
    for whole in [&checkpoint.weights, &checkpoint.first_moments, &checkpoint.second_moments] {
        tensors::check(&stored, whole).map_err(refuse)?;
    }
    let written = folder::create_temporary(dir)?;
    // The temporary name would help nobody.
    let failed = |name: &str| {
        CheckpointError::io(&dir.join(folder::folder_name(checkpoint.step)).join(name), "written")
    };
    let tensors = |name, kinds: &[tensors::TensorGroup]| {
        tensors::write(&written.path().join(name), &stored, kinds).map_err(failed(name))
    };
    let model = tensors(MODEL, &[(WEIGHTS, &checkpoint.weights)])?;
    let moments =
        [(FIRST_MOMENTS, &checkpoint.first_moments), (SECOND_MOMENTS, &checkpoint.second_moments)];
    let optimizer = tensors(OPTIMIZER, &moments)?;
    let state = write_json(&written.path().join(STATE), &state).map_err(failed(STATE))?;
    let manifest = Manifest::new(model, optimizer, state);
    write_json(&written.path().join(MANIFEST), &manifest).map_err(failed(MANIFEST))?;
    let path = folder::commit(written, dir, checkpoint.step)?;
    folder::prune(dir, checkpoint.step, keep);
    Ok(path)
}

/// Reads a checkpoint, given its own folder, and checks that it is whole, as it was written, and of
/// this model.
///
/// # Errors
/// The first thing that is wrong, with the file and the place in it.
pub fn load(path: &Path, model: &Model) -> Result<Checkpoint, CheckpointError> {
    let manifest = Manifest::read(path)?;
    let state_path = path.join(STATE);
    let state: RunState = state::read_json(&state_path, &manifest.open(path, STATE)?)?;
    state.check_model(model).map_err(|fault| CheckpointError::new(&state_path, fault))?;
    let stored = names::stored_parameters(model);
    let refuse = |name: &str| {
        let path = path.join(name);
        move |fault| CheckpointError::new(&path, fault)
    };
    let [weights] =
        tensors::read(&manifest.open(path, MODEL)?, &stored, [WEIGHTS]).map_err(refuse(MODEL))?;
    let suffixes = [FIRST_MOMENTS, SECOND_MOMENTS];
    let [first_moments, second_moments] =
        tensors::read(&manifest.open(path, OPTIMIZER)?, &stored, suffixes)
            .map_err(refuse(OPTIMIZER))?;
    Ok(Checkpoint {
        step: state.step,
        seed: state.seed,
        cursor: state.cursor,
        optimizer: state.optimizer.optimizer(),
        model_fingerprint: state.model.fingerprint,
        origin: state.made_under,
        weights,
        first_moments,
        second_moments,
    })
}

fn write_json(path: &Path, value: &impl serde::Serialize) -> io::Result<FileEntry> {
    let mut file = HashingWriter::create(path)?;
    let mut text = serde_json::to_vec_pretty(value)?;
    text.push(b'\n');
    file.write(&text)?;
    file.finish()
}
