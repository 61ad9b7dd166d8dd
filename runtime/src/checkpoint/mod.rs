//! Checkpoints: the state of a run, in files.
//!
//! A checkpoint holds whole, unsharded tensors under Hugging Face style names (`names.rs`), so nothing
//! in it depends on the plan. A run resumes bit for bit under the same plan, and up to the rounding of
//! f32 sums in another order under a different one. A checkpoint is a folder of four files, and of
//! [companions](SaveOptions) with which other programs load the weights:
//!
//! | file | contents |
//! |---|---|
//! | `model.safetensors` | the weights |
//! | `optimizer.safetensors` | the moments, under the weights' names with `.first_moment` or `.second_moment` |
//! | `state.json` | step, seed, data cursor, hyper-parameters, fingerprint of the model |
//! | `manifest.json` | size and SHA-256 of the other files |
//!
//! Runs of several processes write shards instead: the slices of the tensors that each process holds.
//!
//! [`save`] and [`PendingSave`] write them into a temporary folder, flushes them to the disk, and renames the folder;
//! [`latest`] looks for the last complete checkpoint, so that no pointer to it can be wrong; [`load`]
//! verifies every byte. Invalid bytes are a [`CheckpointError`] with their location, never a panic.
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
//! let checkpoint = Checkpoint::of_trainer(trainer, model, 1)?.expect("rank 0");
//! checkpoint::save(dir, &checkpoint, model, NonZeroUsize::new(3).unwrap())?;
//! # Ok(())
//! # }
//! ```

mod companions;
mod contents;
mod error;
mod folder;
mod format;
mod lock;
mod manifest;
mod names;
mod pending_save;
mod shard_writer;
mod shards;
mod shared_fault;
mod state;
mod storage;
mod tensors;

pub use companions::{CONFIG_FILE, MODEL_FILE, SaveOptions, TokenizerFile};
pub use contents::{Checkpoint, CheckpointOrigin, CheckpointOutline, ResumeError};
pub use error::{CheckpointError, CheckpointFault, TensorFault};
pub use folder::{CheckpointFolder, Retention, folder_name, keep_only, latest, list, set_aside};
pub use lock::{FolderLock, lock};
pub use names::{StoredParameter, stored_parameters};
pub use pending_save::{PendingSave, SaveMode, save};
pub use shared_fault::require_shared;
pub use storage::{
    FoundCheckpoint, ResumedState, is_checkpoint, load, load_initial_weights, load_weights,
};
pub(crate) use tensors::transpose;
