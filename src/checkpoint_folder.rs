//! The last complete checkpoint in the folder of a run.

use std::path::{Path, PathBuf};

use narrows_runtime::checkpoint;

use crate::errors::{CommandResult, Failure};
use crate::output;

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
