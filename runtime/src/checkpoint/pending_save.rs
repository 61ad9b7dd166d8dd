//! Saving in two parts: first the files are written, by the calling thread or by one of their own from a copy in memory while
//! the run goes on; then they are committed as one checkpoint.
//!
//! A run of several processes writes shards at once, each the slices that it holds, into a folder that all nodes share. The
//! first process commits them when all are written. Both parts are then collective: all processes call them in the same
//! order.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};

use narrows_plan::model::Model;
use tempfile::TempDir;

use super::companions::{self, SaveOptions};
use super::contents::Checkpoint;
use super::error::{CheckpointError, CheckpointFault};
use super::folder;
use super::format::{MANIFEST, STATE};
use super::manifest::{FileEntry, Manifest};
use super::shard_writer::{copy_shards, local_shards, write_copies, write_local_shards};
use super::shared_fault::{create_temporary, succeed_together};
use super::state::RunState;
use super::storage::{check_whole, write_json, write_whole};
use crate::process_group::StorageUse;
use crate::train::Trainer;

/// The thread that writes the files of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SaveMode {
    /// The calling thread, which returns when they are written.
    Blocking,
    /// A thread of their own, from a copy of the tensors in the memory of the machine.
    Background,
}

/// Writes a checkpoint into the checkpoint folder of a run, which is created if necessary, and removes checkpoints that need
/// not remain. As [`PendingSave`], for one process.
///
/// # Errors
/// When the checkpoint does not belong to the model, or a file cannot be written; existing checkpoints
/// are then unchanged.
pub fn save<'a>(
    dir: &Path,
    checkpoint: &Checkpoint,
    model: &Model,
    options: impl Into<SaveOptions<'a>>,
) -> Result<PathBuf, CheckpointError> {
    let step = checkpoint.step;
    let (dir, target) = (dir.to_path_buf(), dir.join(folder::folder_name(step)));
    let (state, temporary) = start_whole(&dir, &target, checkpoint, model)?;
    let writer = Writer::Ended(write_whole((temporary.path(), &target), checkpoint, model));
    let (temporary, storage, model) = (Some(temporary), StorageUse::begin(None), model.clone());
    PendingSave { dir, target, step, temporary, writer, state, storage, model }.commit(options)
}

/// Checks a checkpoint of whole tensors, and creates a folder for its files.
fn start_whole(
    dir: &Path,
    target: &Path,
    checkpoint: &Checkpoint,
    model: &Model,
) -> Result<(RunState, TempDir), CheckpointError> {
    let state = RunState::new(checkpoint, model);
    check_whole(checkpoint, &state, model).map_err(|fault| CheckpointError::new(target, fault))?;
    Ok((state, folder::create_temporary(dir)?))
}

type Files = Result<BTreeMap<String, FileEntry>, CheckpointError>;

/// The files of this process.
enum Writer {
    Ended(Files),
    Thread(JoinHandle<Files>),
}

/// A checkpoint whose files are written, or are being written. Unless it is [committed](PendingSave::commit) there is no
/// checkpoint.
pub struct PendingSave {
    dir: PathBuf,
    /// The folder of the checkpoint when it is complete.
    target: PathBuf,
    step: u64,
    /// Temporary folder, which the committing process alone has.
    temporary: Option<TempDir>,
    writer: Writer,
    state: RunState,
    storage: StorageUse,
    model: Model,
}

impl PendingSave {
    /// Starts a checkpoint of a run with this model and seed in its checkpoint folder, which is created if necessary. Only one
    /// run may write to a folder, which must be [locked](super::lock). In a run of several processes all must call this
    /// function.
    ///
    /// # Errors
    /// When the folder cannot be written into, or a device or a process is lost. Errors of the files are those of
    /// [`commit`](PendingSave::commit).
    pub fn begin(
        dir: &Path,
        trainer: &Trainer,
        (model, seed): (&Model, u64),
        mode: SaveMode,
    ) -> Result<PendingSave, CheckpointError> {
        let step = trainer.session().steps();
        let target = dir.join(folder::folder_name(step));
        let dir = dir.to_path_buf();
        let lost = |error| CheckpointError::new(&target, CheckpointFault::from(error));
        let Some(group) = trainer.session().process_group() else {
            let checkpoint = Checkpoint::of_trainer(trainer, model, seed).map_err(lost)?;
            // One process has all tensors.
            let missing = || CheckpointError::new(&target, CheckpointFault::Missing);
            let checkpoint = checkpoint.ok_or_else(missing)?;
            let (state, temporary) = start_whole(&dir, &target, &checkpoint, model)?;
            let (folder, model) = (temporary.path().to_path_buf(), model.clone());
            let (final_folder, of) = (target.clone(), model.clone());
            let write = move || write_whole((&folder, &final_folder), &checkpoint, &of);
            let writer = Writer::start(mode, write, &target)?;
            let (temporary, storage) = (Some(temporary), StorageUse::begin(None));
            return Ok(PendingSave { dir, target, step, temporary, writer, state, storage, model });
        };
        let (temporary, name) = create_temporary(&dir, &**group)?;
        let storage = StorageUse::begin(Some(group.clone()));
        let folder = dir.join(name);
        let shards = local_shards(trainer.session(), model, (group.rank(), group.world_size()));
        let writer = match mode {
            SaveMode::Blocking => {
                Writer::Ended(write_local_shards((&folder, &target), trainer.session(), &shards))
            }
            SaveMode::Background => {
                let copies = copy_shards(trainer.session(), shards).map_err(lost)?;
                let final_folder = target.clone();
                let write = move || write_copies((&folder, &final_folder), &copies);
                Writer::start(mode, write, &target)?
            }
        };
        let state = RunState::of_trainer(trainer, model, seed);
        let model = model.clone();
        Ok(PendingSave { dir, target, step, temporary, writer, state, storage, model })
    }

    /// Number of steps of the run until the checkpoint.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Whether the files of this process are written, or cannot be.
    pub fn is_written(&self) -> bool {
        match &self.writer {
            Writer::Ended(_) => true,
            Writer::Thread(thread) => thread.is_finished(),
        }
    }

    /// Waits until the files of all processes are written, completes the checkpoint, and removes others that need not remain.
    /// Returns its path.
    ///
    /// # Errors
    /// When a file of any process could not be written, or a process is gone or late; existing checkpoints are then unchanged.
    pub fn commit<'a>(
        self,
        options: impl Into<SaveOptions<'a>>,
    ) -> Result<PathBuf, CheckpointError> {
        let SaveOptions { retention, tokenizer } = options.into();
        let PendingSave { dir, target, step, temporary, writer, state, storage, model } = self;
        let own_files = writer.wait(&target);
        let files = match storage.group() {
            None => own_files?,
            Some(group) => {
                let mut files = BTreeMap::new();
                succeed_together(&**group, &target, own_files, |all| {
                    files.extend(all.into_iter().flatten());
                })?;
                files
            }
        };
        let is_first = temporary.is_some();
        let complete = |temporary: TempDir| {
            companions::write((temporary.path(), &target), &model, tokenizer)?;
            complete(temporary, (&dir, &target), files, &state, step)
        };
        let completed = temporary.map_or(Ok(()), complete);
        match storage.group() {
            None => completed?,
            Some(group) => {
                succeed_together(&**group, &target, completed, |_| ())?;
            }
        }
        if is_first {
            folder::prune(&dir, step, retention);
        }
        Ok(target)
    }
}

/// Completes a checkpoint whose files are all written.
fn complete(
    temporary: TempDir,
    (dir, target): (&Path, &Path),
    files: BTreeMap<String, FileEntry>,
    state: &RunState,
    step: u64,
) -> Result<(), CheckpointError> {
    for (name, entry) in &files {
        let present = std::fs::metadata(temporary.path().join(name));
        if !present.is_ok_and(|file| file.len() == entry.bytes) {
            let fault = CheckpointFault::ShardNotShared { file: name.clone() };
            return Err(CheckpointError::new(dir, fault));
        }
    }
    // Errors name the final path, not the temporary one.
    let failed = |name: &str| CheckpointError::io(&target.join(name), "written");
    let state_entry = write_json(&temporary.path().join(STATE), state).map_err(failed(STATE))?;
    let manifest = Manifest::new(&state.format, files, state_entry);
    write_json(&temporary.path().join(MANIFEST), &manifest).map_err(failed(MANIFEST))?;
    folder::commit(temporary, dir, step).map(drop)
}

impl Writer {
    fn start(
        mode: SaveMode,
        write: impl FnOnce() -> Files + Send + 'static,
        target: &Path,
    ) -> Result<Writer, CheckpointError> {
        match mode {
            SaveMode::Blocking => Ok(Writer::Ended(write())),
            SaveMode::Background => thread::Builder::new()
                .name("checkpoint".into())
                .spawn(write)
                .map(Writer::Thread)
                .map_err(CheckpointError::io(target, "written by a thread")),
        }
    }

    fn wait(self, target: &Path) -> Files {
        match self {
            Writer::Ended(files) => files,
            Writer::Thread(thread) => thread.join().unwrap_or_else(|_| {
                let panicked = io::Error::other("the thread that wrote it panicked");
                Err(CheckpointError::io(target, "written")(panicked))
            }),
        }
    }
}
