//! Faults that one process meets and all report: of a save, and of a folder that they do not share.

use std::fs::File;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use super::error::{CheckpointError, CheckpointFault};
use super::folder;
use crate::error::RunError;
use crate::process_group::{ProcessGroup, excerpt, gather_and_broadcast};

/// A fault as other processes receive it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct SharedFault {
    /// The error with its file.
    reason: String,
    /// The number of the error, where the operating system reported one.
    os_error: Option<i32>,
}

impl SharedFault {
    fn of(error: &CheckpointError) -> SharedFault {
        let os_error = match &error.fault {
            CheckpointFault::Io { source, .. } => source.raw_os_error(),
            _ => None,
        };
        SharedFault { reason: error.to_string(), os_error }
    }

    fn into_fault(self, rank: u64) -> CheckpointFault {
        let kind = self.os_error.map(|code| io::Error::from_raw_os_error(code).kind());
        CheckpointFault::OtherProcess { rank, reason: excerpt(&self.reason), kind }
    }
}

/// Gathers the results of all processes. If all have succeeded, returns what the first one makes of their values. If one has
/// failed, all report its fault: that process its own error. `place` is the path that errors of other processes are reported at.
///
/// # Errors
/// The fault of a process, or a process that is gone or late.
pub(super) fn succeed_together<T, R>(
    group: &dyn ProcessGroup,
    place: &Path,
    own: Result<T, CheckpointError>,
    decide: impl FnOnce(Vec<T>) -> R,
) -> Result<R, CheckpointError>
where
    T: Serialize + DeserializeOwned,
    R: Serialize + DeserializeOwned,
{
    let (value, own_error) = match own {
        Ok(value) => (Ok(value), None),
        Err(error) => (Err(SharedFault::of(&error)), Some(error)),
    };
    let outcome = gather_and_broadcast(group, value, |all: Vec<Result<T, SharedFault>>| {
        let with_rank = (0u64..).zip(all).map(|(rank, one)| one.map_err(|fault| (rank, fault)));
        with_rank.collect::<Result<Vec<T>, _>>().map(decide)
    });
    match (outcome, own_error) {
        (Ok(Ok(decided)), _) => Ok(decided),
        (Ok(Err(_)), Some(error)) => Err(error),
        (Ok(Err((rank, fault))), None) => Err(CheckpointError::new(place, fault.into_fault(rank))),
        // Where a process is gone, the first one removes the folder into which the others write.
        (Err(_), Some(error)) if !has_vanished(&error) => Err(error),
        (Err(error), _) => Err(CheckpointError::new(place, RunError::Cluster(error).into())),
    }
}

/// Whether a file could not be written because its folder is gone.
fn has_vanished(error: &CheckpointError) -> bool {
    match &error.fault {
        CheckpointFault::Io { source, .. } => source.kind() == io::ErrorKind::NotFound,
        _ => false,
    }
}

/// Lets the first process create a temporary folder, and tells all its name. The first one also gets the folder.
///
/// # Errors
/// In all processes, when the folder cannot be created, or a process is gone or late.
pub(super) fn create_temporary(
    dir: &Path,
    group: &dyn ProcessGroup,
) -> Result<(Option<TempDir>, String), CheckpointError> {
    let name_of = |folder: &TempDir| {
        folder.path().file_name().unwrap_or_default().to_string_lossy().into_owned()
    };
    let (folder, name) = match (group.rank() == 0).then(|| folder::create_temporary(dir)) {
        None => (None, Ok(String::new())),
        Some(Ok(folder)) => {
            let name = name_of(&folder);
            (Some(folder), Ok(name))
        }
        Some(Err(error)) => (None, Err(error)),
    };
    let first = |all: Vec<String>| all.into_iter().next().unwrap_or_default();
    Ok((folder, succeed_together(group, dir, name, first)?))
}

/// Longest time until a node sees the folder that another one has created.
const VISIBLE_TIME: Duration = Duration::from_secs(3);

/// Creates a file in a folder that another process has just created.
fn create_in_new_folder(file: &Path) -> io::Result<File> {
    let start = Instant::now();
    loop {
        match File::create_new(file) {
            Err(error)
                if error.kind() == io::ErrorKind::NotFound && start.elapsed() < VISIBLE_TIME =>
            {
                // NFS remembers that a name did not exist until the folder around it is opened again.
                file.ancestors().skip(1).for_each(|folder| drop(std::fs::read_dir(folder)));
                std::thread::sleep(VISIBLE_TIME / 30);
            }
            result => return result,
        }
    }
}

/// Checks that all processes of a run write into the same folder, before they have a checkpoint to write: each creates a
/// file in a folder of the first one, which looks for all of them.
///
/// # Errors
/// In all processes: [`CheckpointFault::NotShared`], a process that cannot write into the folder, or one that is gone or
/// late.
pub fn require_shared(dir: &Path, group: &dyn ProcessGroup) -> Result<(), CheckpointError> {
    let (folder, name) = create_temporary(dir, group)?;
    let file_of = |folder: &Path, rank: u64| folder.join(format!("process-{rank}"));
    let file = file_of(&dir.join(name), group.rank());
    let is_written = match create_in_new_folder(&file) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(CheckpointError::io(dir, "written into")(error)),
    };
    let missing = succeed_together(group, dir, is_written, |all| {
        let is_present =
            |rank: u64| folder.as_ref().is_some_and(|folder| file_of(folder.path(), rank).exists());
        let mut ranks = (0u64..).zip(all);
        ranks.find(|(rank, is_written)| !is_written || !is_present(*rank)).map(|(rank, _)| rank)
    })?;
    match missing {
        None => Ok(()),
        Some(rank) => Err(CheckpointError::new(dir, CheckpointFault::NotShared { rank })),
    }
}
