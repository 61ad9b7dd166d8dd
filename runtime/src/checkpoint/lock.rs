//! A lock that admits one run at a time to a folder. The operating system releases the lock when the
//! process ends, however it ends; the lock file stays and means nothing by itself.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::Path;

use super::error::{CheckpointError, CheckpointFault};

/// Distinct from the names of checkpoints and of their temporary folders.
const NAME: &str = ".narrows-lock";

/// Locks a folder until it is dropped.
#[derive(Debug)]
pub struct FolderLock {
    /// Closing the file releases the lock.
    _file: File,
}

/// Locks the checkpoint folder of a run, which is created if necessary. On file systems without locks
/// this function only creates the folder.
///
/// # Errors
/// When another run has locked the folder, or it cannot be written to.
pub fn lock(dir: &Path) -> Result<FolderLock, CheckpointError> {
    fs::create_dir_all(dir).map_err(CheckpointError::io(dir, "created"))?;
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
