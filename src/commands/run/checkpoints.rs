//! The checkpoints of a run: where it goes on from, and what is written on the way.

use std::path::{Path, PathBuf};

use narrows_plan::model::Model;
use narrows_runtime::checkpoint::{self, Checkpoint, CheckpointError, FolderLock, ResumeError};
use narrows_runtime::{Optimizer, Trainer};

use crate::args::checkpoint::{CheckpointSettings, RunOrigin};
use crate::errors::{CommandResult, Failure, Problem};
use crate::output;

/// Writes the checkpoints of a run, and knows the last one.
pub struct CheckpointKeeper<'a> {
    asked: Option<&'a CheckpointSettings>,
    model: &'a Model,
    seed: u64,
    resumed: Option<SavedCheckpoint>,
    last: Option<SavedCheckpoint>,
}

/// A checkpoint that is there.
#[derive(Clone, Debug)]
pub struct SavedCheckpoint {
    /// Its step.
    pub step: u64,
    /// Its folder.
    pub path: PathBuf,
}

/// That the folder can be written to, and is no other run's: asked before anything that takes time.
/// Nobody else may use it for as long as what is returned lives.
pub fn admit(asked: Option<&CheckpointSettings>) -> CommandResult<Option<FolderLock>> {
    let Some(asked) = asked else { return Ok(None) };
    is_of_no_other_run(asked)?;
    let lock = checkpoint::lock(&asked.dir).map_err(Failure::checkpoint)?;
    // Another may have ended just before.
    is_of_no_other_run(asked)?;
    Ok(Some(lock))
}

fn is_of_no_other_run(
    CheckpointSettings { dir, origin, .. }: &CheckpointSettings,
) -> CommandResult<()> {
    let found = checkpoint::list(dir).map_err(Failure::checkpoint)?;
    let (RunOrigin::FirstStep, Some(last)) = (origin, found.first()) else { return Ok(()) };
    let problem = format!("holds checkpoints already, the last of step {}", last.step);
    let problem = Problem::new(dir.display().to_string(), problem)
        .hint("--resume to go on from there")
        .hint("--checkpoint-dir with another folder, for another run");
    Err(Failure::input(problem))
}

impl<'a> CheckpointKeeper<'a> {
    /// The checkpoints that are asked for, of a model whose weights began with this seed.
    pub fn new(
        asked: Option<&'a CheckpointSettings>,
        model: &'a Model,
        seed: u64,
    ) -> CheckpointKeeper<'a> {
        CheckpointKeeper { asked, model, seed, resumed: None, last: None }
    }

    /// Where the run went on from.
    pub fn resumed(&self) -> Option<&SavedCheckpoint> {
        self.resumed.as_ref()
    }

    /// The last checkpoint that is there.
    pub fn last(&self) -> Option<&SavedCheckpoint> {
        self.last.as_ref()
    }

    /// Puts a run where its last checkpoint stands, if that is asked for and there is one. `until` is
    /// how many steps the run shall have in the end.
    ///
    /// # Errors
    /// When the checkpoint is damaged, of another model or other data, or beyond the end of the run.
    pub fn resume(&mut self, trainer: &mut Trainer, until: u64) -> CommandResult<()> {
        let Some(CheckpointSettings { dir, origin: RunOrigin::LastCheckpoint, .. }) = self.asked
        else {
            return Ok(());
        };
        let Some(path) = checkpoint::latest(dir).map_err(damaged)? else {
            return Ok(());
        };
        let newest = checkpoint::list(dir).map_err(Failure::checkpoint)?.into_iter().next();
        if let Some(newest) = newest.filter(|newest| newest.path != path) {
            let (newest, path) = (newest.path.display(), path.display());
            output::warn(&format!("{newest} is not whole: the run goes on from {path}"));
        }
        let loaded = checkpoint::load(&path, self.model).map_err(damaged)?;
        if loaded.step > until {
            let problem = format!("{} is of step {} already", path.display(), loaded.step);
            let hint = format!("--steps counts all steps: {} or more", loaded.step);
            return Err(Failure::input(Problem::new("--steps", problem).hint(hint)));
        }
        loaded.resume(trainer).map_err(|error| not_of_this_run(&path, error))?;
        warn_of_another_course(&path, &loaded.optimizer, trainer.optimizer());
        let kept = SavedCheckpoint { step: loaded.step, path };
        (self.resumed, self.last) = (Some(kept.clone()), Some(kept));
        Ok(())
    }

    /// Writes a checkpoint where one is due on the way to step `until`. The last step's is written
    /// [at the end](CheckpointKeeper::save), like that of a run that is stopped.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn on_the_way(&mut self, trainer: &Trainer, until: u64) -> CommandResult<()> {
        let step = trainer.session().steps();
        let due =
            |asked: &CheckpointSettings| step < until && step.is_multiple_of(asked.every.get());
        if self.asked.is_some_and(due) { self.save(trainer) } else { Ok(()) }
    }

    /// Writes a checkpoint, unless that of this step is there.
    ///
    /// # Errors
    /// When it cannot be written, or another process of the run is gone.
    pub fn save(&mut self, trainer: &Trainer) -> CommandResult<()> {
        let step = trainer.session().steps();
        let Some(asked) = self.asked else { return Ok(()) };
        if self.last.as_ref().is_some_and(|last| last.step == step) {
            return Ok(());
        }
        let now = Checkpoint::of_trainer(trainer, self.model, self.seed)
            .map_err(|error| Failure::execution(&error))?;
        let path = match now {
            Some(now) => checkpoint::save(&asked.dir, &now, self.model, asked.keep)
                .map_err(Failure::checkpoint)?,
            // Another process writes it.
            None => asked.dir.join(checkpoint::folder_name(step)),
        };
        self.last = Some(SavedCheckpoint { step, path });
        Ok(())
    }

    /// What a run that ended too early can go on from, as a sentence; `None` when no checkpoints were
    /// asked for.
    pub fn way_on(&self) -> Option<String> {
        let CheckpointSettings { dir, .. } = self.asked?;
        Some(match &self.last {
            Some(SavedCheckpoint { step, path }) => format!(
                "the checkpoint of step {step} is {}: the same command with --resume goes on from it",
                path.display()
            ),
            None => format!("no checkpoint was written to {} yet", dir.display()),
        })
    }
}

/// A checkpoint that cannot be read. Those before it are looked at once it is out of the way.
fn damaged(error: CheckpointError) -> Failure {
    let spoilt = error.fault.is_damage();
    let mut failure = Failure::checkpoint(error);
    if spoilt {
        let hint = "moved out of the folder, it leaves --resume the checkpoint before it";
        failure.problems.iter_mut().for_each(|problem| problem.hints.push(hint.into()));
    }
    failure
}

fn not_of_this_run(path: &Path, error: ResumeError) -> Failure {
    match error {
        ResumeError::Checkpoint(fault) => Failure::checkpoint(CheckpointError::new(path, fault)),
        ResumeError::Data(error) => {
            let place = path.join("state.json").display().to_string();
            let hint = "--seed, --data and --sequence-length as they were";
            Failure::input(Problem {
                field: "field `cursor`".into(),
                ..Problem::new(place, error.fault.to_string()).hint(hint)
            })
        }
    }
}

/// Other hyper-parameters are no error, but nobody should take the curve for that of one run.
fn warn_of_another_course(path: &Path, before: &Optimizer, now: &Optimizer) {
    let figures = |optimizer: &Optimizer| {
        [
            ("--learning-rate", optimizer.peak_learning_rate.to_string()),
            ("--warm-up-steps", optimizer.warm_up_steps.to_string()),
            ("--decay-steps", optimizer.total_steps.to_string()),
            ("--weight-decay", optimizer.weight_decay.to_string()),
            ("--clip-norm", optimizer.clip_norm.to_string()),
        ]
    };
    let pairs = figures(before).into_iter().zip(figures(now));
    let differences: Vec<String> = pairs
        .filter(|(before, now)| before != now)
        .map(|((flag, before), (_, now))| format!("{flag} {before}, now {now}"))
        .collect();
    if !differences.is_empty() {
        output::warn(&format!(
            "{} was made with {}: the curve is not that of one run",
            path.display(),
            differences.join("; ")
        ));
    }
}
