//! Flags for checkpoints.

use std::num::{NonZeroU64, NonZeroUsize};
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use narrows_runtime::checkpoint::{self, CheckpointOutline, FoundCheckpoint, Retention, SaveMode};

use super::launch::LaunchArgs;
use crate::checkpoint_folder::candidates;
use crate::errors::{CommandResult, Failure, Problem};
use crate::output::require_folder_name;

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
    /// Write checkpoints from a copy in memory while the next steps are executed; one at a time
    #[arg(long, requires = "checkpoint_dir")]
    pub checkpoint_async: bool,
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
    /// At the newest undamaged checkpoint, or else at that of the lowest evaluation loss, or else at the first step. Newer ones,
    /// which are damaged, are set aside.
    NewestUndamaged,
}

/// Folder and interval of checkpoints.
#[derive(Debug)]
pub struct CheckpointSettings {
    /// The folder.
    pub dir: PathBuf,
    /// Steps between checkpoints.
    pub every: NonZeroU64,
    /// Whether the run goes on while a checkpoint is written.
    pub mode: SaveMode,
    /// Checkpoints to keep.
    pub retention: Retention,
    /// Whether the checkpoint of the lowest evaluation loss is kept too.
    pub keep_best: bool,
    /// Start of the run.
    pub origin: RunOrigin,
    /// The checkpoint that the run resumes from, as it was found before the folder was locked. With
    /// [`RunOrigin::NewestUndamaged`], it is verified in a run of one process. In a run of several, its tensors may be damaged:
    /// the run then resumes from one before it.
    pub found: Option<FoundCheckpoint>,
}

impl CheckpointSettings {
    /// The state of the checkpoint that the run resumes from, without its tensors; `None` at the first step.
    ///
    /// # Errors
    /// A state that cannot be read.
    pub fn outline(&self) -> CommandResult<Option<CheckpointOutline>> {
        let outline = self.found.as_ref().map(FoundCheckpoint::outline).transpose();
        outline.map_err(Failure::loading_checkpoint)
    }
}

/// The checkpoint in a folder from which a run of this origin starts. Only a run of one process verifies tensors here: several
/// divide them when they have met.
fn find(
    dir: &Path,
    origin: RunOrigin,
    launch: &LaunchArgs,
) -> CommandResult<Option<FoundCheckpoint>> {
    let found = match origin {
        RunOrigin::FirstStep => Ok(None),
        RunOrigin::LastCheckpoint => checkpoint::latest(dir)
            .and_then(|latest| latest.map(|path| FoundCheckpoint::open(&path)).transpose()),
        RunOrigin::NewestUndamaged => {
            let find_undamaged = match launch.resolve()? {
                None => |path: &Path| FoundCheckpoint::verify(path).ok(),
                Some(_) => |path: &Path| {
                    FoundCheckpoint::open(path).ok().filter(|found| found.outline().is_ok())
                },
            };
            candidates(dir).map(|all| all.iter().find_map(|listed| find_undamaged(&listed.path)))
        }
    };
    found.map_err(Failure::loading_checkpoint)
}

impl CheckpointArgs {
    /// The settings; `None` without `--checkpoint-dir`.
    ///
    /// # Errors
    /// A folder or a checkpoint that cannot be read.
    pub fn resolve(&self, launch: &LaunchArgs) -> CommandResult<Option<CheckpointSettings>> {
        let Some(dir) = &self.checkpoint_dir else { return Ok(None) };
        require_folder_name("--checkpoint-dir", dir)?;
        if checkpoint::is_checkpoint(dir) {
            let message = "is one checkpoint, and not a folder of them";
            let folder = dir.parent().filter(|parent| !parent.as_os_str().is_empty());
            let hint = format!("--checkpoint-dir {}", folder.unwrap_or(Path::new(".")).display());
            return Err(Failure::input(
                Problem::new(dir.display().to_string(), message).hint(hint),
            ));
        }
        let origin = match self.resume {
            None => RunOrigin::FirstStep,
            Some(ResumeArg::Last) => RunOrigin::LastCheckpoint,
            Some(ResumeArg::Auto) => RunOrigin::NewestUndamaged,
        };
        Ok(Some(CheckpointSettings {
            dir: dir.clone(),
            every: self.checkpoint_every.unwrap_or(EVERY),
            mode: match self.checkpoint_async {
                true => SaveMode::Background,
                false => SaveMode::Blocking,
            },
            retention: Retention::Newest {
                last: self.keep.unwrap_or(KEEP),
                every: self.keep_every,
            },
            keep_best: self.keep_best,
            origin,
            found: find(dir, origin, launch)?,
        }))
    }
}
