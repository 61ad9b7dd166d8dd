//! The checkpoint folder of a run: complete checkpoints, unfinished ones, and how one is committed.
//!
//! | name | contents |
//! |---|---|
//! | `step-00000123` | a checkpoint, complete unless it was damaged afterwards |
//! | `step-00000123.replaced` | the previous checkpoint of that step, while it is being replaced |
//! | `step-00000123.damaged` | a damaged checkpoint that was [set aside](set_aside) |
//! | `.narrows-checkpoint-….tmp` | a checkpoint that is being written or removed |
//! | `.narrows-lock` | the file that a run [locks](super::lock) |
//!
//! A checkpoint is committed by renaming its temporary folder, and renamed again before its files are
//! removed. An existing checkpoint of the same step is renamed to `.replaced` first. Whenever a process
//! is killed, every checkpoint that was complete before is still found.

use std::fs::{self, File};
use std::io;
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::error::CheckpointError;
use super::manifest::Manifest;
use crate::atomic_file::temporary_folder;

const STEP: &str = "step-";
const REPLACED: &str = ".replaced";
const DAMAGED: &str = ".damaged";
const TEMPORARY: (&str, &str) = (".narrows-checkpoint-", ".tmp");

/// A folder with the name of a checkpoint. Its manifest says whether it is complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointFolder {
    /// Step in the name.
    pub step: u64,
    /// Path of the folder.
    pub path: PathBuf,
    replaced: bool,
}

impl CheckpointFolder {
    /// Whether all files of the manifest exist and have their sizes.
    fn is_complete(&self) -> bool {
        Manifest::read(&self.path).is_ok()
    }
}

/// Name of a step's checkpoint in the checkpoint folder of its run.
pub fn folder_name(step: u64) -> String {
    format!("{STEP}{step:08}")
}

/// All folders with names of checkpoints, the last step first; none when `dir` does not exist.
///
/// # Errors
/// When the folder cannot be read.
pub fn list(dir: &Path) -> Result<Vec<CheckpointFolder>, CheckpointError> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        entries => entries.map_err(CheckpointError::io(dir, "listed"))?,
    };
    let mut checkpoints = vec![];
    for entry in entries {
        let entry = entry.map_err(CheckpointError::io(dir, "listed"))?;
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        if let Some((step, replaced)) = step_of_name(name).filter(|_| entry.path().is_dir()) {
            checkpoints.push(CheckpointFolder { step, path: entry.path(), replaced });
        }
    }
    checkpoints.sort_by_key(|checkpoint| (std::cmp::Reverse(checkpoint.step), checkpoint.replaced));
    Ok(checkpoints)
}

/// The step in the name of a checkpoint's folder, and whether the checkpoint is being replaced; `None` for other names, which
/// a copy of a checkpoint may have.
fn step_of_name(name: &str) -> Option<(u64, bool)> {
    let (base_name, replaced) = match name.strip_suffix(REPLACED) {
        Some(base_name) => (base_name, true),
        None => (name, false),
    };
    let step = base_name.strip_prefix(STEP)?.parse().ok()?;
    (folder_name(step) == base_name).then_some((step, replaced))
}

/// The step in the name of a checkpoint's folder, if the name has one.
pub(super) fn step_of_folder(path: &Path) -> Option<u64> {
    step_of_name(path.file_name()?.to_str()?).map(|(step, _)| step)
}

/// The last complete checkpoint, if there is one: all files of its manifest exist and have their
/// sizes.
///
/// # Errors
/// When the folder, or a checkpoint after the last complete one, cannot be read or has a newer format. When no checkpoint is
/// complete, the error of the last one.
pub fn latest(dir: &Path) -> Result<Option<PathBuf>, CheckpointError> {
    let mut first_error = None;
    for checkpoint in list(dir)? {
        match Manifest::read(&checkpoint.path) {
            Ok(_) => return Ok(Some(checkpoint.path)),
            Err(error) if error.fault.is_corruption() => first_error.get_or_insert(error),
            Err(error) => return Err(error),
        };
    }
    first_error.map_or(Ok(None), Err)
}

/// Creates a folder and its parents where they do not exist, and flushes the names of the new ones to the disk.
pub(super) fn create(dir: &Path) -> Result<(), CheckpointError> {
    let missing: Vec<&Path> = dir.ancestors().take_while(|folder| !folder.exists()).collect();
    fs::create_dir_all(dir).map_err(CheckpointError::io(dir, "created"))?;
    let parents = missing.into_iter().filter_map(Path::parent);
    for parent in parents {
        // The parent of a relative name is empty.
        sync(if parent.as_os_str().is_empty() { Path::new(".") } else { parent })?;
    }
    Ok(())
}

/// Creates a temporary folder for the files of a checkpoint. It is removed when it is dropped before it
/// is [committed](commit).
pub(super) fn create_temporary(dir: &Path) -> Result<TempDir, CheckpointError> {
    create(dir)?;
    remove_leftovers(dir);
    temporary_entry(dir)
}

/// Checks that checkpoints can be created in a folder: creates and removes one without files.
pub(super) fn probe_entries(dir: &Path) -> Result<(), CheckpointError> {
    let removed = temporary_entry(dir)?.close();
    removed.map_err(CheckpointError::io(dir, "written into"))
}

fn temporary_entry(dir: &Path) -> Result<TempDir, CheckpointError> {
    temporary_folder(dir, TEMPORARY.0, TEMPORARY.1)
        .map_err(CheckpointError::io(dir, "written into"))
}

/// Renames a folder whose files have been flushed to the disk to the name of its step.
pub(super) fn commit(
    temporary: TempDir,
    dir: &Path,
    step: u64,
) -> Result<PathBuf, CheckpointError> {
    sync(temporary.path())?;
    let target = dir.join(folder_name(step));
    let replaced = dir.join(format!("{}{REPLACED}", folder_name(step)));
    if target.exists() {
        remove(&replaced);
        fs::rename(&target, &replaced).map_err(CheckpointError::io(&target, "replaced"))?;
    }
    fs::rename(temporary.path(), &target).map_err(CheckpointError::io(&target, "renamed"))?;
    let _ = temporary.keep();
    sync(dir)?;
    remove(&replaced);
    Ok(target)
}

/// Which checkpoints remain in a folder when a new one is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retention {
    /// The newest ones of a run.
    Newest {
        /// Number of the newest checkpoints that remain, with the new one.
        last: NonZeroUsize,
        /// Checkpoints whose step is a multiple of this number remain too.
        every: Option<NonZeroU64>,
    },
    /// The new one alone, which replaces those of earlier and of later steps.
    Only,
}

impl From<NonZeroUsize> for Retention {
    fn from(last: NonZeroUsize) -> Retention {
        Retention::Newest { last, every: None }
    }
}

/// Removes checkpoints that need not remain besides that of `step`. Of the newest ones, those of later steps remain, which
/// belong to another training history. Damaged ones always remain. A failure to remove a checkpoint is ignored, and retried
/// after the next save.
pub(super) fn prune(dir: &Path, step: u64, retention: Retention) {
    let complete = list(dir).unwrap_or_default().into_iter().filter(CheckpointFolder::is_complete);
    match retention {
        Retention::Only => {
            complete.filter(|old| old.step != step).for_each(|old| remove(&old.path))
        }
        Retention::Newest { last, every } => {
            let (mut newest, mut kept) = (1, vec![step]);
            for old in complete.filter(|checkpoint| checkpoint.step < step) {
                let is_new = newest < last.get();
                let is_multiple = every.is_some_and(|every| old.step.is_multiple_of(every.get()));
                if (is_new || is_multiple) && !kept.contains(&old.step) {
                    newest += 1;
                    kept.push(old.step);
                } else {
                    remove(&old.path);
                }
            }
        }
    }
}

/// Removes all complete checkpoints but that of `step`, if there is a complete one of that step: the end of a save with
/// [`Retention::Only`] that was interrupted. Failures to remove a checkpoint are ignored.
///
/// # Errors
/// When the folder cannot be read.
pub fn keep_only(dir: &Path, step: u64) -> Result<(), CheckpointError> {
    if list(dir)?.iter().any(|found| found.step == step && found.is_complete()) {
        prune(dir, step, Retention::Only);
    }
    Ok(())
}

/// Renames a damaged checkpoint, so that it is no longer found, and returns its new path.
///
/// # Errors
/// When the folder cannot be renamed.
pub fn set_aside(path: &Path) -> Result<PathBuf, CheckpointError> {
    let name = path.file_name().unwrap_or_default().display();
    // Another damaged checkpoint of the same step may lie there.
    let free = (0u64..)
        .map(|number| match number {
            0 => path.with_file_name(format!("{name}{DAMAGED}")),
            number => path.with_file_name(format!("{name}{DAMAGED}-{number}")),
        })
        .find(|target| fs::symlink_metadata(target).is_err());
    let target = free.unwrap_or_else(|| path.to_path_buf());
    fs::rename(path, &target).map_err(CheckpointError::io(path, "renamed"))?;
    Ok(target)
}

/// Removes the temporary folders of processes that were killed.
pub(super) fn remove_leftovers(dir: &Path) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let temporary = name
            .to_str()
            .is_some_and(|name| name.starts_with(TEMPORARY.0) && name.ends_with(TEMPORARY.1));
        if temporary {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Removes a checkpoint, if it exists: first its name, then its files.
fn remove(path: &Path) {
    let (Some(dir), Some(name)) = (path.parent(), path.file_name().and_then(|name| name.to_str()))
    else {
        return;
    };
    let temporary = dir.join(format!("{}{name}{}", TEMPORARY.0, TEMPORARY.1));
    if fs::rename(path, &temporary).is_ok() {
        let _ = fs::remove_dir_all(&temporary);
    }
}

/// Flushes the names in a folder to the disk.
fn sync(folder: &Path) -> Result<(), CheckpointError> {
    let result = File::open(folder).and_then(|folder| folder.sync_all());
    match result {
        // Some file systems do not support this, and Windows cannot open folders: only a power failure
        // could then lose the name.
        Err(error)
            if cfg!(windows)
                || matches!(
                    error.kind(),
                    io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported
                ) =>
        {
            Ok(())
        }
        result => result.map_err(CheckpointError::io(folder, "flushed to the disk")),
    }
}
