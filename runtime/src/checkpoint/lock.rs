//! One run at a time in a folder. The system holds the lock for the process, so it is gone with the
//! process however that ends; the file it is on stays, and means nothing by itself.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::Path;

use super::error::{CheckpointError, CheckpointFault};

/// Not named as a checkpoint is, nor as what is left of one.
const NAME: &str = ".narrows-lock";

/// Holds a folder for a run, as long as it lives.
#[derive(Debug)]
pub struct FolderLock {
    /// Closing it gives the folder back.
    _file: File,
}

/// Holds the folder of a run's checkpoints, which is made if it is not there. On a file system that
/// has no locks nothing is held.
///
/// # Errors
/// When another run holds it, or nothing can be written to it.
pub fn lock(dir: &Path) -> Result<FolderLock, CheckpointError> {
    fs::create_dir_all(dir).map_err(CheckpointError::io(dir, "made"))?;
    let path = dir.join(NAME);
    let file = File::options().create(true).truncate(false).write(true).open(&path);
    let file = file.map_err(CheckpointError::io(&path, "written"))?;
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => Err(CheckpointError::new(dir, CheckpointFault::Locked)),
        Err(TryLockError::Error(error)) if error.kind() != io::ErrorKind::Unsupported => {
            Err(CheckpointError::io(&path, "locked")(error))
        }
        _ => Ok(FolderLock { _file: file }),
    }
}
