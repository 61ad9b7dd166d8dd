//! Flags for checkpoints.

use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use narrows_runtime::checkpoint::{self, CheckpointOutline, Retention};

use crate::errors::{CommandResult, Failure};

/// Default number of steps between checkpoints.
const EVERY: NonZeroU64 = NonZeroU64::new(100).unwrap();

/// Default number of checkpoints to keep, as replacements for a damaged one.
const KEEP: NonZeroUsize = NonZeroUsize::new(3).unwrap();

/// Flags for checkpoints.
#[derive(Debug, Args)]
pub struct CheckpointArgs {
    /// Write checkpoints to this folder: regularly, at the end, and when the run is stopped
    #[arg(long, value_name = "DIR")]
    pub checkpoint_dir: Option<PathBuf>,
    /// Steps between checkpoints [default: 100]
    #[arg(long, value_name = "N", requires = "checkpoint_dir")]
    pub checkpoint_every: Option<NonZeroU64>,
    /// Number of checkpoints to keep; older ones are deleted [default: 3]
    #[arg(long, value_name = "K", requires = "checkpoint_dir")]
    pub keep: Option<NonZeroUsize>,
    /// Also keep each checkpoint whose step is a multiple of M
    #[arg(long, value_name = "M", requires = "checkpoint_dir")]
    pub keep_every: Option<NonZeroU64>,
    /// Keep the checkpoint with the lowest evaluation loss too, in the folder `best` of --checkpoint-dir
    #[arg(long, requires = "checkpoint_dir")]
    pub keep_best: bool,
    /// Resume from the last complete checkpoint in the folder, if there is one; with `auto`, damaged ones are set aside
    #[arg(
        long,
        value_name = "auto",
        value_enum,
        requires = "checkpoint_dir",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "last"
    )]
    pub resume: Option<ResumeArg>,
}

/// `--resume`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ResumeArg {
    /// From the last complete checkpoint; one whose contents are damaged ends the run
    Last,
    /// From the newest undamaged checkpoint; damaged ones are renamed, with a warning
    Auto,
}

/// Start of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunOrigin {
    /// At the first step, in a folder without checkpoints.
    FirstStep,
    /// At the last complete checkpoint, or else at the first step.
    LastCheckpoint,
    /// At the newest undamaged checkpoint, or else at the first step. Newer ones, which are damaged, are set aside.
    NewestUndamaged,
}

/// Folder and interval of checkpoints.
#[derive(Debug)]
pub struct CheckpointSettings {
    /// The folder.
    pub dir: PathBuf,
    /// Steps between checkpoints.
    pub every: NonZeroU64,
    /// Checkpoints to keep.
    pub retention: Retention,
    /// Whether the checkpoint of the lowest evaluation loss is kept too.
    pub keep_best: bool,
    /// Start of the run.
    pub origin: RunOrigin,
}

impl CheckpointSettings {
    /// The state of the checkpoint that the run resumes from, without its tensors; `None` at the first step.
    ///
    /// # Errors
    /// A folder or a checkpoint that cannot be read.
    pub fn outline(&self) -> CommandResult<Option<CheckpointOutline>> {
        if self.origin == RunOrigin::FirstStep {
            return Ok(None);
        }
        if self.origin == RunOrigin::NewestUndamaged {
            let found = checkpoint::list(&self.dir).map_err(Failure::loading_checkpoint)?;
            return Ok(found
                .iter()
                .find_map(|found| checkpoint::verified_outline(&found.path).ok()));
        }
        let latest = checkpoint::latest(&self.dir).map_err(Failure::loading_checkpoint)?;
        let outline = latest.map(|path| checkpoint::outline(&path)).transpose();
        outline.map_err(Failure::loading_checkpoint)
    }
}

impl CheckpointArgs {
    /// The settings; `None` without `--checkpoint-dir`.
    pub fn resolve(&self) -> Option<CheckpointSettings> {
        let origin = match self.resume {
            None => RunOrigin::FirstStep,
            Some(ResumeArg::Last) => RunOrigin::LastCheckpoint,
            Some(ResumeArg::Auto) => RunOrigin::NewestUndamaged,
        };
        self.checkpoint_dir.as_ref().map(|dir| CheckpointSettings {
            dir: dir.clone(),
            every: self.checkpoint_every.unwrap_or(EVERY),
            retention: Retention { last: self.keep.unwrap_or(KEEP), every: self.keep_every },
            keep_best: self.keep_best,
            origin,
        })
    }
}
