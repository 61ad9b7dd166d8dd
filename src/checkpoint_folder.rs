//! The last complete checkpoint in the folder of a run.

use std::path::{Path, PathBuf};

use narrows_runtime::checkpoint::{self, CheckpointError, CheckpointFolder};

use crate::errors::{CommandResult, Failure};
use crate::output;

/// Folder of the checkpoint with the lowest evaluation loss, within the folder of a run.
pub const BEST_FOLDER: &str = "best";

/// The checkpoints from which a run can continue, in the order in which they are tried: those of its folder, the newest first,
/// and then the one with the lowest evaluation loss.
///
/// # Errors
/// A folder that cannot be read.
pub fn candidates(dir: &Path) -> Result<Vec<CheckpointFolder>, CheckpointError> {
    let mut all = checkpoint::list(dir)?;
    all.extend(checkpoint::list(&dir.join(BEST_FOLDER))?);
    Ok(all)
}

/// The last complete checkpoint, with a warning where a later one is incomplete: `consequence` is a clause about the
/// checkpoint that is taken instead, which follows.
///
/// # Errors
/// A folder that cannot be read, or without a complete checkpoint where there are others.
pub fn last_complete(dir: &Path, consequence: &str) -> CommandResult<Option<PathBuf>> {
    let Some(path) = checkpoint::latest(dir).map_err(Failure::loading_checkpoint)? else {
        return Ok(None);
    };
    let newest = checkpoint::list(dir).map_err(Failure::checkpoint)?.into_iter().next();
    if let Some(newest) = newest.filter(|newest| newest.path != path) {
        let (newest, path) = (newest.path.display(), path.display());
        output::warn(&format!("{newest} is incomplete: {consequence} {path}"));
    }
    Ok(Some(path))
}
