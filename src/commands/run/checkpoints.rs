//! The checkpoints of a run: resuming from one, and writing new ones.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use narrows_plan::Workload;
use narrows_plan::model::Model;
use narrows_runtime::Trainer;
use narrows_runtime::checkpoint::{
    self, Checkpoint, CheckpointError, FolderLock, ResumeError, ResumedState, Retention,
};
use narrows_runtime::process_group::gather_and_broadcast;

use crate::args::{CheckpointSettings, RunOrigin, flags_of_recipe};
use crate::cluster::cluster_failure;
use crate::errors::{CommandResult, Failure, Problem};
use crate::output;

/// Folder of the checkpoint with the lowest evaluation loss, within the folder of the run.
const BEST_FOLDER: &str = "best";

/// Resumes from and writes the checkpoints of a run.
pub struct CheckpointKeeper<'a> {
    settings: Option<&'a CheckpointSettings>,
    /// Held by the process that writes.
    lock: Option<&'a FolderLock>,
    model: &'a Model,
    seed: u64,
    resumed: Option<CheckpointEntry>,
    last: Option<CheckpointEntry>,
}

/// A checkpoint on disk.
#[derive(Clone, Debug)]
pub struct CheckpointEntry {
    /// Number of steps of the run until the checkpoint.
    pub step: u64,
    /// The folder.
    pub path: PathBuf,
}

/// Locks the checkpoint folder until the result is dropped.
///
/// # Errors
/// A folder that cannot be written, or that belongs to another run.
pub fn lock_folder(settings: Option<&CheckpointSettings>) -> CommandResult<Option<FolderLock>> {
    let Some(settings) = settings else { return Ok(None) };
    reject_other_run(settings)?;
    let lock = checkpoint::lock(&settings.dir).map_err(Failure::checkpoint)?;
    // Another run may have ended in between.
    reject_other_run(settings)?;
    Ok(Some(lock))
}

/// Rejects a folder with checkpoints for a run that starts at its first step.
fn reject_other_run(
    CheckpointSettings { dir, origin, .. }: &CheckpointSettings,
) -> CommandResult<()> {
    let checkpoints = checkpoint::list(dir).map_err(Failure::checkpoint)?;
    let (RunOrigin::FirstStep, Some(last)) = (origin, checkpoints.first()) else { return Ok(()) };
    let message = format!("already holds checkpoints, the last of step {}", last.step);
    let problem = Problem::new(dir.display().to_string(), message)
        .hint("--resume, to continue from there")
        .hint("another --checkpoint-dir, for another run");
    Err(Failure::input(problem))
}

impl<'a> CheckpointKeeper<'a> {
    /// The checkpoints of a model with this seed of its initial weights.
    pub fn new(
        settings: Option<&'a CheckpointSettings>,
        lock: Option<&'a FolderLock>,
        model: &'a Model,
        seed: u64,
    ) -> CheckpointKeeper<'a> {
        CheckpointKeeper { settings, lock, model, seed, resumed: None, last: None }
    }

    /// The checkpoint that the run resumed from.
    pub fn resumed(&self) -> Option<&CheckpointEntry> {
        self.resumed.as_ref()
    }

    /// The last checkpoint.
    pub fn last(&self) -> Option<&CheckpointEntry> {
        self.last.as_ref()
    }

    /// Resumes a run of `steps` steps from its last checkpoint, if requested and there is one.
    ///
    /// # Errors
    /// A checkpoint that is damaged, of another model or other data, or beyond the end of the run.
    pub fn resume(&mut self, trainer: &mut Trainer, steps: u64) -> CommandResult<()> {
        let Some(path) = self.path_to_resume(trainer)? else { return Ok(()) };
        let resumed = checkpoint::resume(&path, trainer, self.model);
        let loaded = resumed.map_err(|error| resume_failure(&path, error))?;
        if loaded.step > steps {
            let message = format!("{} is already of step {}", path.display(), loaded.step);
            let hint = format!("{} or more, since --steps counts all steps", loaded.step);
            return Err(Failure::input(Problem::new("--steps", message).hint(hint)));
        }
        warn_of_other_recipe(&path, &loaded, trainer);
        let saved = CheckpointEntry { step: loaded.step, path };
        (self.resumed, self.last) = (Some(saved.clone()), Some(saved));
        Ok(())
    }

    /// The checkpoint to resume from.
    fn path_to_resume(&self, trainer: &Trainer) -> CommandResult<Option<PathBuf>> {
        let Some(CheckpointSettings { dir, origin, .. }) = self.settings else { return Ok(None) };
        match origin {
            RunOrigin::FirstStep => Ok(None),
            RunOrigin::LastCheckpoint => last_complete(dir),
            RunOrigin::NewestUndamaged => match trainer.session().process_group() {
                None => newest_undamaged(dir, self.model),
                // One process renames damaged checkpoints, and all take the one that it has found.
                Some(group) => {
                    let found = match group.rank() {
                        0 => newest_undamaged(dir, self.model)?,
                        _ => None,
                    };
                    let name = found.as_deref().and_then(Path::file_name);
                    let name = name.map(|name| name.to_string_lossy().into_owned());
                    let first = |all: Vec<Option<String>>| all.into_iter().next().flatten();
                    let name =
                        gather_and_broadcast(&**group, name, first).map_err(cluster_failure)?;
                    Ok(name.map(|name| dir.join(name)))
                }
            },
        }
    }

    /// Writes a checkpoint if one is due before the last step. The one at the end of a run is written by
    /// [`save`](CheckpointKeeper::save).
    ///
    /// # Errors
    /// A checkpoint that cannot be written.
    pub fn save_if_due(&mut self, trainer: &Trainer, steps: u64) -> CommandResult<()> {
        let step = trainer.session().steps();
        let is_due = |settings: &CheckpointSettings| {
            step < steps && step.is_multiple_of(settings.every.get())
        };
        if self.settings.is_some_and(is_due) { self.save(trainer) } else { Ok(()) }
    }

    /// Writes a checkpoint, unless there is one of this step.
    ///
    /// # Errors
    /// A checkpoint that cannot be written, a folder that was removed, or a lost process.
    pub fn save(&mut self, trainer: &Trainer) -> CommandResult<()> {
        let step = trainer.session().steps();
        let Some(settings) = self.settings else { return Ok(()) };
        if self.last.as_ref().is_some_and(|last| last.step == step) {
            return Ok(());
        }
        let path = self.write(trainer, &settings.dir, settings.retention)?;
        self.last = Some(CheckpointEntry { step, path });
        Ok(())
    }

    /// Writes the checkpoint of the lowest evaluation loss, if it is kept, in place of the one before it.
    ///
    /// # Errors
    /// A checkpoint that cannot be written, or a lost process.
    pub fn save_best(&self, trainer: &Trainer) -> CommandResult<()> {
        let Some(settings) = self.settings.filter(|settings| settings.keep_best) else {
            return Ok(());
        };
        let dir = settings.dir.join(BEST_FOLDER);
        self.write(trainer, &dir, NonZeroUsize::MIN.into()).map(drop)
    }

    /// Writes a checkpoint into a folder: with other processes, each writes its part.
    fn write(&self, trainer: &Trainer, dir: &Path, retention: Retention) -> CommandResult<PathBuf> {
        if let Some(lock) = self.lock {
            lock.verify().map_err(Failure::checkpoint)?;
        }
        let saved = match trainer.session().process_group() {
            Some(group) => {
                let of = (self.model, self.seed);
                checkpoint::save_by_all(dir, trainer, &**group, of, retention)
            }
            None => {
                let checkpoint = Checkpoint::of_trainer(trainer, self.model, self.seed)
                    .map_err(|error| Failure::execution(&error))?;
                match checkpoint {
                    Some(checkpoint) => checkpoint::save(dir, &checkpoint, self.model, retention),
                    None => Ok(dir.to_path_buf()),
                }
            }
        };
        saved.map_err(Failure::checkpoint)
    }

    /// The checkpoint from which a run that ended early can resume, as a clause; `None` without checkpoints.
    pub fn resumption(&self) -> Option<String> {
        let CheckpointSettings { dir, .. } = self.settings?;
        Some(match &self.last {
            Some(CheckpointEntry { step, path }) => format!(
                "the checkpoint of step {step} is {}: the same command with --resume continues from it",
                path.display()
            ),
            None => format!("no checkpoint was written to {} yet", dir.display()),
        })
    }
}

/// The last complete checkpoint, with a warning where a later one is incomplete.
fn last_complete(dir: &Path) -> CommandResult<Option<PathBuf>> {
    let Some(path) = checkpoint::latest(dir).map_err(Failure::loading_checkpoint)? else {
        return Ok(None);
    };
    let newest = checkpoint::list(dir).map_err(Failure::checkpoint)?.into_iter().next();
    if let Some(newest) = newest.filter(|newest| newest.path != path) {
        let (newest, path) = (newest.path.display(), path.display());
        output::warn(&format!("{newest} is incomplete: the run resumes from {path}"));
    }
    Ok(Some(path))
}

/// The newest checkpoint whose contents are undamaged. Newer ones are set aside, with a warning.
fn newest_undamaged(dir: &Path, model: &Model) -> CommandResult<Option<PathBuf>> {
    for found in checkpoint::list(dir).map_err(Failure::checkpoint)? {
        match checkpoint::verify(&found.path, model) {
            Ok(_) => return Ok(Some(found.path)),
            Err(error) if error.fault.is_corruption() => {
                let aside = checkpoint::set_aside(&found.path).map_err(Failure::checkpoint)?;
                output::warn(&format!("{error}; the checkpoint is now {}", aside.display()));
            }
            Err(error) => return Err(Failure::checkpoint(error)),
        }
    }
    Ok(None)
}

fn resume_failure(path: &Path, error: ResumeError) -> Failure {
    match error {
        ResumeError::File(error) => Failure::loading_checkpoint(error),
        ResumeError::Checkpoint(fault) => Failure::checkpoint(CheckpointError::new(path, fault)),
        ResumeError::Data(error) => {
            let file = path.join("state.json").display().to_string();
            let problem = Problem::new(file, error.fault.to_string()).field("field `cursor`");
            Failure::input(problem.hint("the same --seed, --data and --sequence-length as before"))
        }
    }
}

/// Warns of each value that is not the checkpoint's, with which the loss curve is not that of a single run.
fn warn_of_other_recipe(path: &Path, checkpoint: &ResumedState, trainer: &Trainer) {
    let batch = |workload: Workload| workload.global_batch;
    let batch_now = batch(trainer.session().program().context.workload);
    let batch_before = checkpoint.origin.map_or(batch_now, |origin| batch(origin.workload));
    let before = flags_of_recipe(&checkpoint.optimizer, batch_before);
    let now = flags_of_recipe(trainer.optimizer(), batch_now);
    for ((flag, before), (_, now)) in before.into_iter().zip(now) {
        if before != now {
            let path = path.display();
            output::warn(&format!(
                "{flag} is {now}, and {before} in {path}: the loss curve is not that of a single run"
            ));
        }
    }
}
