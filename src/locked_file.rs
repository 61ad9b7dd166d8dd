//! Files of which one process at a time is the writer.

use std::ffi::OsStr;
use std::fs::{self, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use crate::errors::{CommandResult, Failure, Problem};
use crate::output::write_failure;

/// Renames a file, or the one to which a link leads, to a name that no file has, and returns it.
pub fn set_aside(path: &Path) -> io::Result<PathBuf> {
    let path = match fs::symlink_metadata(path)?.is_symlink() {
        true => fs::canonicalize(path)?,
        false => path.to_path_buf(),
    };
    let name = path.file_name().unwrap_or_default().display();
    let kept = (1u64..)
        .map(|number| path.with_file_name(format!("{name}.old-{number}")))
        .find(|kept| fs::symlink_metadata(kept).is_err());
    let kept = kept.unwrap_or_else(|| path.clone());
    fs::rename(path, &kept)?;
    Ok(kept)
}

/// Number of times that a file is opened again since another run has renamed it.
const RENAMES_MAX: usize = 100;

/// Opens a file of which this process is the only writer until it is closed: lines of two runs would be mixed, or
/// overwrite each other. On file systems without locks no run is refused.
pub fn open_locked(
    name: &str,
    output: &OsStr,
    options: &fs::OpenOptions,
) -> CommandResult<fs::File> {
    let open = || options.open(output).map_err(|error| write_failure(name, &error));
    let mut file = open()?;
    for _ in 0..RENAMES_MAX {
        // Several programs may write to a pipe or a device.
        let is_regular = file.metadata().is_ok_and(|metadata| metadata.is_file());
        match file.try_lock() {
            Err(TryLockError::WouldBlock) if is_regular => {
                let message = "is written by another run that has not ended";
                let hint = "another --metrics file, or the same one after that run has ended";
                return Err(Failure::input(Problem::new(name, message).hint(hint)));
            }
            _ if !is_regular || has_path(&file, output) => return Ok(file),
            // A run that began at the same time has renamed the file before it was locked here.
            _ => file = open()?,
        }
    }
    let message = "was replaced by other runs each time it was opened";
    let hint = "another --metrics file, or the same one after those runs have ended";
    Err(Failure::input(Problem::new(name, message).hint(hint)))
}

/// Whether the path leads to an open file.
#[cfg(unix)]
fn has_path(file: &fs::File, path: &OsStr) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    let id = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    file.metadata().map(id).ok() == fs::metadata(path).map(id).ok()
}

/// Whether the path leads to an open file. Open files cannot be renamed here.
#[cfg(not(unix))]
fn has_path(_file: &fs::File, _path: &OsStr) -> bool {
    true
}
