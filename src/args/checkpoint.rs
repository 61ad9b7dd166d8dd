//! The flags of checkpoints, and what they mean.

use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;

use clap::Args;

/// Steps from a checkpoint to the next, for who does not say.
const EVERY: NonZeroU64 = NonZeroU64::new(100).unwrap();

/// Checkpoints that are kept, for who does not say: one that turns out damaged leaves another.
const KEEP: NonZeroUsize = NonZeroUsize::new(3).unwrap();

/// Flags of checkpoints.
#[derive(Debug, Args)]
pub struct CheckpointArgs {
    /// Write checkpoints into this folder: on the way, at the end, and when the run is stopped
    #[arg(long, value_name = "DIR")]
    pub checkpoint_dir: Option<PathBuf>,
    /// Steps from a checkpoint to the next [default: 100]
    #[arg(long, value_name = "N", requires = "checkpoint_dir")]
    pub checkpoint_every: Option<NonZeroU64>,
    /// How many checkpoints are kept, the oldest being removed [default: 3]
    #[arg(long, value_name = "K", requires = "checkpoint_dir")]
    pub keep: Option<NonZeroUsize>,
    /// Go on from the last whole checkpoint in the folder, if there is one
    #[arg(long, requires = "checkpoint_dir")]
    pub resume: bool,
}

/// Where a run begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunOrigin {
    /// At the first step, in a folder without checkpoints.
    FirstStep,
    /// At the last whole checkpoint, or else at the first step.
    LastCheckpoint,
}

/// Where checkpoints go, and when.
#[derive(Debug)]
pub struct CheckpointSettings {
    /// Their folder.
    pub dir: PathBuf,
    /// Steps from one to the next.
    pub every: NonZeroU64,
    /// How many are kept.
    pub keep: NonZeroUsize,
    /// Where the run begins.
    pub origin: RunOrigin,
}

impl CheckpointArgs {
    /// What they mean; `None` when no checkpoints are asked for.
    pub fn resolve(&self) -> Option<CheckpointSettings> {
        let origin = if self.resume { RunOrigin::LastCheckpoint } else { RunOrigin::FirstStep };
        self.checkpoint_dir.as_ref().map(|dir| CheckpointSettings {
            dir: dir.clone(),
            every: self.checkpoint_every.unwrap_or(EVERY),
            keep: self.keep.unwrap_or(KEEP),
            origin,
        })
    }
}
