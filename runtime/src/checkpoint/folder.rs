//! The folder of a run's checkpoints: what is whole in it, what is not, and how one becomes whole.
//!
//! | name | what it is |
//! |---|---|
//! | `step-00000123` | a checkpoint; renamed to this when it was whole, so it is, unless damaged since |
//! | `step-00000123.replaced` | what that was before another run wrote it again |
//! | `.narrows-checkpoint-….tmp` | being written or being removed; of no use to anybody |
//! | `.narrows-lock` | what a run holds [locked](super::lock); of no use by itself |
//!
//! A checkpoint gets its name by a rename, and loses it by one before its files are removed. Where
//! the name is taken, what has it steps aside first: for that moment it is found as `.replaced`. So
//! whenever a process is killed, what was whole before is still found.

use std::fs::{self, File};
use std::io;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::error::CheckpointError;
use super::manifest::Manifest;

const STEP: &str = "step-";
const REPLACED: &str = ".replaced";
const TEMPORARY: (&str, &str) = (".narrows-checkpoint-", ".tmp");

/// A folder that is named as a checkpoint is. Whether it is one, its manifest says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundCheckpoint {
    /// The step in its name.
    pub step: u64,
    /// The folder.
    pub path: PathBuf,
    replaced: bool,
}

/// The name of a step's checkpoint in the folder of its run.
pub fn folder_name(step: u64) -> String {
    format!("{STEP}{step:08}")
}

/// All folders named as checkpoints, the last step first; none when there is no such folder.
///
/// # Errors
/// When the folder cannot be read.
pub fn list(dir: &Path) -> Result<Vec<FoundCheckpoint>, CheckpointError> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        entries => entries.map_err(CheckpointError::io(dir, "listed"))?,
    };
    let mut found = vec![];
    for entry in entries {
        let entry = entry.map_err(CheckpointError::io(dir, "listed"))?;
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let (whole, replaced) = match name.strip_suffix(REPLACED) {
            Some(whole) => (whole, true),
            None => (name, false),
        };
        let step = whole.strip_prefix(STEP).and_then(|digits| digits.parse().ok());
        if let Some(step) = step.filter(|step| folder_name(*step) == whole) {
            found.push(FoundCheckpoint { step, path: entry.path(), replaced });
        }
    }
    found.sort_by_key(|found| (std::cmp::Reverse(found.step), found.replaced));
    Ok(found)
}

/// The last whole checkpoint, if there is any: all files that its manifest lists are there, as
/// long as they were.
///
/// # Errors
/// When the folder cannot be read; and when there are checkpoints but none of them is whole, what is
/// wrong with the last one.
pub fn latest(dir: &Path) -> Result<Option<PathBuf>, CheckpointError> {
    let mut first_error = None;
    for found in list(dir)? {
        match Manifest::read(&found.path) {
            Ok(_) => return Ok(Some(found.path)),
            Err(error) => first_error.get_or_insert(error),
        };
    }
    first_error.map_or(Ok(None), Err)
}

/// A new folder for a checkpoint's files, next to what it will be. It vanishes unless it is
/// [named](name).
pub(super) fn create_temporary(dir: &Path) -> Result<TempDir, CheckpointError> {
    fs::create_dir_all(dir).map_err(CheckpointError::io(dir, "made"))?;
    remove_leftovers(dir);
    let mut builder = tempfile::Builder::new();
    builder.prefix(TEMPORARY.0).suffix(TEMPORARY.1);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // As any program makes folders: the umask takes what the user does not want to give.
        builder.permissions(fs::Permissions::from_mode(0o777));
    }
    builder
        .tempdir_in(dir)
        .map_err(|error| CheckpointError::io(dir, "written into")(io::Error::from(error.kind())))
}

/// Gives a folder, all of whose files are on the disk, the name of its step.
pub(super) fn commit(written: TempDir, dir: &Path, step: u64) -> Result<PathBuf, CheckpointError> {
    sync(written.path())?;
    let target = dir.join(folder_name(step));
    let aside = dir.join(format!("{}{REPLACED}", folder_name(step)));
    if target.exists() {
        remove(&aside);
        fs::rename(&target, &aside).map_err(CheckpointError::io(&target, "replaced"))?;
    }
    fs::rename(written.path(), &target).map_err(CheckpointError::io(&target, "named"))?;
    let _ = written.keep();
    sync(dir)?;
    remove(&aside);
    Ok(target)
}

/// Removes the oldest checkpoints before `step`, so that `keep` are left with that of the step itself.
/// Later ones are of another course of training, and damaged ones may be worth a look: both are left.
/// Failing to remove one is no failure of the new one, and is tried again after the next.
pub(super) fn prune(dir: &Path, step: u64, keep: NonZeroUsize) {
    let found = list(dir).unwrap_or_default();
    let before = found.into_iter().filter(|found| found.step < step);
    let mut kept = vec![step];
    for old in before.filter(|found| Manifest::read(&found.path).is_ok()) {
        if kept.len() < keep.get() && !kept.contains(&old.step) {
            kept.push(old.step);
        } else {
            remove(&old.path);
        }
    }
}

/// Removes what writers and removers that were killed have left.
fn remove_leftovers(dir: &Path) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let left = name
            .to_str()
            .is_some_and(|name| name.starts_with(TEMPORARY.0) && name.ends_with(TEMPORARY.1));
        if left {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Takes its name from a checkpoint, if it is there, and then its files.
fn remove(path: &Path) {
    let (Some(dir), Some(name)) = (path.parent(), path.file_name().and_then(|name| name.to_str()))
    else {
        return;
    };
    let aside = dir.join(format!("{}{name}{}", TEMPORARY.0, TEMPORARY.1));
    if fs::rename(path, &aside).is_ok() {
        let _ = fs::remove_dir_all(&aside);
    }
}

/// Makes sure that the names in a folder are on the disk.
fn sync(folder: &Path) -> Result<(), CheckpointError> {
    let done = File::open(folder).and_then(|folder| folder.sync_all());
    match done {
        // Some file systems cannot, and Windows opens no folders: a kill does no harm there either,
        // only a power cut might.
        Err(error)
            if cfg!(windows)
                || matches!(
                    error.kind(),
                    io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported
                ) =>
        {
            Ok(())
        }
        done => done.map_err(CheckpointError::io(folder, "written to the disk")),
    }
}
