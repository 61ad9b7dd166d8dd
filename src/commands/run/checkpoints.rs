//! The checkpoints of a run, of which it resumes from one and writes new ones.

use std::path::{Path, PathBuf};

use narrows_plan::Bytes;
use narrows_plan::model::Model;
use narrows_runtime::Trainer;
use narrows_runtime::checkpoint::{
    self, CheckpointError, FolderLock, FoundCheckpoint, PendingSave, Retention, SaveMode,
    SaveOptions, TokenizerFile,
};
use serde::{Deserialize, Serialize};

use super::resume::{
    found_before, newest_undamaged, require_same_moments, resume_failure, warn_of_other_recipe,
};
use crate::args::{CheckpointSettings, RunOrigin, RunPlaces, TrainSettings, tokenizer_files_of};
use crate::checkpoint_folder::{BEST_FOLDER, candidates, last_complete};
use crate::cluster::agree;
use crate::errors::{CommandResult, ExitStatus, Failure, Problem};

/// Bytes of a checkpoint for each parameter: its value and both moments, in f32.
const BYTES_PER_PARAMETER: u64 = 12;

/// Resumes from and writes the checkpoints of a run.
pub struct CheckpointKeeper<'a> {
    settings: Option<&'a CheckpointSettings>,
    /// Held by the process that writes.
    lock: Option<&'a FolderLock>,
    model: &'a Model,
    seed: u64,
    tokenizer: Vec<TokenizerFile>,
    places: &'a RunPlaces,
    resumed: Option<CheckpointEntry>,
    last: Option<CheckpointEntry>,
    /// The checkpoint that is being written, if any, and its folder.
    pending: Option<(PendingSave, SaveFolder)>,
}

/// Folder into which a checkpoint is saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SaveFolder {
    /// The folder of the run.
    Run,
    /// The folder of the best checkpoint.
    Best,
}

/// Message of each process to the others after a step while a checkpoint is being written.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct SaveProgress {
    /// Whether the run stops.
    stop: bool,
    /// Whether files are still being written.
    is_writing: bool,
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
    /// The checkpoints of a run of a model.
    pub fn new(
        training: &'a TrainSettings,
        lock: Option<&'a FolderLock>,
        model: &'a Model,
    ) -> CheckpointKeeper<'a> {
        let TrainSettings { checkpoints, recipe, tokenizer, places, .. } = training;
        CheckpointKeeper {
            settings: checkpoints.as_ref(),
            lock,
            model,
            seed: recipe.seed,
            tokenizer: tokenizer.clone(),
            places,
            resumed: None,
            last: None,
            pending: None,
        }
    }

    /// The checkpoint that the run resumed from.
    pub fn resumed(&self) -> Option<&CheckpointEntry> {
        self.resumed.as_ref()
    }

    /// The last checkpoint.
    pub fn last(&self) -> Option<&CheckpointEntry> {
        self.last.as_ref()
    }

    /// The checkpoint of the step with the lowest evaluation loss, if there is one.
    pub fn best(&self, step: Option<u64>) -> Option<PathBuf> {
        let checkpoints = candidates(&self.settings?.dir).ok()?;
        checkpoints.into_iter().find(|checkpoint| Some(checkpoint.step) == step).map(|of| of.path)
    }

    /// Resumes a run of `steps` steps from its last checkpoint, if requested and there is one.
    ///
    /// # Errors
    /// A checkpoint that is damaged, of another model or other data, or beyond the end of the run.
    pub fn resume(&mut self, trainer: &mut Trainer, steps: u64) -> CommandResult<()> {
        let Some(found) = self.checkpoint_to_resume(trainer)? else { return Ok(()) };
        let path = found.path().to_path_buf();
        let resumed = found.resume(trainer, self.model);
        let loaded = resumed.map_err(|error| resume_failure(&path, error))?;
        if loaded.step > steps {
            let message = format!(
                "{steps} is too few: the checkpoint {} is at step {}",
                path.display(),
                loaded.step
            );
            let hint =
                format!("more than {}, since --steps counts all steps of the run", loaded.step);
            return Err(Failure::input(Problem::new("--steps", message).hint(hint)));
        }
        require_same_moments(&path, &loaded, trainer)?;
        warn_of_other_recipe(&path, &loaded, trainer, self.places);
        if self.tokenizer.is_empty() {
            self.tokenizer = tokenizer_files_of(&path)?;
        }
        let saved = CheckpointEntry { step: loaded.step, path };
        (self.resumed, self.last) = (Some(saved.clone()), Some(saved));
        Ok(())
    }

    /// The checkpoint to resume from.
    fn checkpoint_to_resume(&self, trainer: &Trainer) -> CommandResult<Option<FoundCheckpoint>> {
        let Some(settings) = self.settings else { return Ok(None) };
        let path = match settings.origin {
            RunOrigin::FirstStep => return Ok(None),
            RunOrigin::LastCheckpoint => last_complete(&settings.dir, "the run resumes from")?,
            RunOrigin::NewestUndamaged => {
                return newest_undamaged(settings, trainer.session().process_group());
            }
        };
        let Some(path) = path else { return Ok(None) };
        match found_before(settings, &path) {
            Some(found) => Ok(Some(found.clone())),
            None => FoundCheckpoint::open(&path).map(Some).map_err(Failure::loading_checkpoint),
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
        match self.settings.is_some_and(is_due) {
            true => self.write(trainer, SaveFolder::Run),
            false => Ok(()),
        }
    }

    /// Writes a checkpoint, unless there is one of this step, and waits for it.
    ///
    /// # Errors
    /// A checkpoint that cannot be written, a folder that was removed, or a lost process.
    pub fn save(&mut self, trainer: &Trainer) -> CommandResult<()> {
        self.start(trainer, SaveFolder::Run, SaveMode::Blocking)?;
        self.finish_pending()
    }

    /// Writes the checkpoint of the lowest evaluation loss, if it is kept, in place of the one before it.
    ///
    /// # Errors
    /// A checkpoint that cannot be written, or a lost process.
    pub fn save_best(&mut self, trainer: &Trainer) -> CommandResult<()> {
        match self.settings.is_some_and(|settings| settings.keep_best) {
            true => self.write(trainer, SaveFolder::Best),
            false => Ok(()),
        }
    }

    /// Removes all but the best checkpoint of a run that resumes, where a kill left others.
    ///
    /// # Errors
    /// A folder that cannot be read.
    pub fn finish_best(&self, trainer: &Trainer) -> CommandResult<()> {
        let settings = self.settings.filter(|settings| settings.keep_best && self.lock.is_some());
        match (settings, trainer.evaluations().best_step) {
            (Some(settings), Some(step)) => {
                checkpoint::keep_only(&settings.dir.join(BEST_FOLDER), step)
                    .map_err(Failure::checkpoint)
            }
            _ => Ok(()),
        }
    }

    /// Agrees with the other processes after a step whether the run stops, which it does where `stop` is true in any process.
    /// Completes the checkpoint that is being written where all its files are.
    ///
    /// # Errors
    /// A checkpoint that could not be written, or a lost process.
    pub fn agree(&mut self, trainer: &Trainer, stop: bool) -> CommandResult<bool> {
        let lost = |error| Failure::execution(&error);
        let Some((pending, _)) = &self.pending else {
            return trainer.session().any_rank(stop).map_err(lost);
        };
        let progress = SaveProgress { stop, is_writing: !pending.is_written() };
        let any = |all: Vec<SaveProgress>| SaveProgress {
            stop: all.iter().any(|one| one.stop),
            is_writing: all.iter().any(|one| one.is_writing),
        };
        let progress = agree(trainer.session().process_group(), progress, any)?;
        if !progress.is_writing {
            self.finish_pending()?;
        }
        Ok(progress.stop)
    }

    /// Starts a checkpoint, and waits for it unless it is written behind the next steps.
    fn write(&mut self, trainer: &Trainer, folder: SaveFolder) -> CommandResult<()> {
        let mode = self.settings.map_or(SaveMode::Blocking, |settings| settings.mode);
        self.start(trainer, folder, mode)?;
        match mode {
            SaveMode::Blocking => self.finish_pending(),
            SaveMode::Background => Ok(()),
        }
    }

    /// Starts a checkpoint when the one before it is complete; none in the folder of the run if that has one of this step.
    fn start(
        &mut self,
        trainer: &Trainer,
        folder: SaveFolder,
        mode: SaveMode,
    ) -> CommandResult<()> {
        let Some(settings) = self.settings else { return Ok(()) };
        self.finish_pending()?;
        let step = trainer.session().steps();
        let is_saved = self.last.as_ref().is_some_and(|last| last.step == step);
        if folder == SaveFolder::Run && is_saved {
            return Ok(());
        }
        self.verify_lock()?;
        let dir = match folder {
            SaveFolder::Run => settings.dir.clone(),
            SaveFolder::Best => settings.dir.join(BEST_FOLDER),
        };
        let of = (self.model, self.seed);
        let pending = PendingSave::begin(&dir, trainer, of, mode);
        self.pending = Some((pending.map_err(|error| self.failed_save(error))?, folder));
        Ok(())
    }

    /// Waits for the checkpoint that is being written, if any, and completes it.
    ///
    /// # Errors
    /// A checkpoint that could not be written, a folder that was removed, or a lost process.
    pub fn finish_pending(&mut self) -> CommandResult<()> {
        let (Some((pending, folder)), Some(settings)) = (self.pending.take(), self.settings) else {
            return Ok(());
        };
        self.verify_lock()?;
        let step = pending.step();
        let retention = match folder {
            SaveFolder::Run => settings.retention,
            SaveFolder::Best => Retention::Only,
        };
        let options = SaveOptions { retention, tokenizer: &self.tokenizer };
        let path = pending.commit(options).map_err(|error| self.failed_save(error))?;
        if folder == SaveFolder::Run {
            self.last = Some(CheckpointEntry { step, path });
        }
        Ok(())
    }

    /// The failure of a save. Where the disk is full, the same command would fail again.
    fn failed_save(&self, error: CheckpointError) -> Failure {
        let is_full = error.fault.is_full_disk();
        let mut failure = Failure::checkpoint(error);
        if let (true, Some(settings)) = (is_full, self.settings) {
            let bytes = Bytes(BYTES_PER_PARAMETER * self.model.parameters());
            let dir = settings.dir.display();
            let hint = format!(
                "free space for {dir}: a checkpoint takes {bytes}, and old ones are deleted only when a new one is complete, \
                 so that a disk must have room for one more than --keep"
            );
            failure.problems.iter_mut().for_each(|problem| problem.hints.push(hint.clone()));
        }
        failure
    }

    /// A checkpoint in the folder that this run has locked, where that was renamed.
    fn renamed(&self, path: &Path) -> Option<PathBuf> {
        let within = path.strip_prefix(&self.settings?.dir).ok()?;
        let present = self.lock?.renamed_folder()?.join(within);
        present.is_dir().then_some(present)
    }

    fn verify_lock(&self) -> CommandResult<()> {
        self.lock.map_or(Ok(()), FolderLock::verify).map_err(Failure::checkpoint)
    }

    /// The checkpoint from which a run that ended early with this status can resume, as a clause; `None` without checkpoints.
    pub fn resumption(&self, status: ExitStatus) -> Option<String> {
        let CheckpointSettings { dir, origin, .. } = self.settings?;
        let with_resume = if *origin == RunOrigin::FirstStep { " with --resume" } else { "" };
        // Invalid input fails again until it is fixed.
        let condition = if status == ExitStatus::BadInput { "once this is fixed, " } else { "" };
        let is_lost = self.lock.is_some_and(|lock| lock.verify().is_err());
        Some(match &self.last {
            Some(CheckpointEntry { step, path }) if is_lost || !path.is_dir() => {
                match self.renamed(path) {
                    Some(present) => {
                        format!("the checkpoint of step {step} is now {}", present.display())
                    }
                    None => {
                        format!("the checkpoint of step {step} was written to {}", path.display())
                    }
                }
            }
            Some(CheckpointEntry { step, path }) => format!(
                "the checkpoint of step {step} is {}: {condition}the same command{with_resume} continues from it",
                path.display()
            ),
            None if is_lost => return None,
            None => format!("no checkpoint was written to {} yet", dir.display()),
        })
    }
}
