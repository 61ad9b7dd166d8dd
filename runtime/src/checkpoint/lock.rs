//! A lock that admits one run at a time to a folder. The operating system releases the lock when the
//! process ends, however it ends; the lock file stays beside checkpoints and means nothing by itself.
//! A run that leaves no checkpoint removes the lock file and the folders that it created.

use std::fs::{self, File, Metadata, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use super::error::{CheckpointError, CheckpointFault};
use super::folder::{create, probe_entries, remove_leftovers};

/// Distinct from the names of checkpoints and of their temporary folders.
const NAME: &str = ".narrows-lock";

/// Locks a folder until it is dropped.
#[derive(Debug)]
pub struct FolderLock {
    dir: PathBuf,
    /// Closing the file releases the lock.
    file: File,
    /// The lock file and the folders that did not exist before, in the order of their removal.
    created: Vec<PathBuf>,
}

/// Removes what the lock has created if there is nothing else in the folder.
impl Drop for FolderLock {
    fn drop(&mut self) {
        let entries = fs::read_dir(&self.dir).map(Iterator::count);
        if entries.is_ok_and(|count| count == 1) && self.verify().is_ok() {
            for path in &self.created {
                // A folder that has other entries by now stays.
                let _ = fs::remove_file(path).or_else(|_| fs::remove_dir(path));
            }
        }
    }
}

impl FolderLock {
    /// Checks that the folder still has the locked file. Where the folder or the file was removed or renamed, another run
    /// can lock a new file of the same name, and the two would remove each other's checkpoints.
    ///
    /// # Errors
    /// [`CheckpointFault::LockLost`], or a file that cannot be examined.
    pub fn verify(&self) -> Result<(), CheckpointError> {
        let path = self.dir.join(NAME);
        let lost = || {
            let fault = CheckpointFault::LockLost { present: self.renamed_folder() };
            Err(CheckpointError::new(&self.dir, fault))
        };
        let present = match fs::symlink_metadata(&path) {
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
                ) =>
            {
                return lost();
            }
            result => result.map_err(CheckpointError::io(&path, "examined"))?,
        };
        let locked = self.file.metadata().map_err(CheckpointError::io(&path, "examined"))?;
        if is_same_file(&present, &locked) { Ok(()) } else { lost() }
    }

    /// The folder of the locked file under its present name, if it was renamed and the system says so.
    pub fn renamed_folder(&self) -> Option<PathBuf> {
        let present = folder_of(&self.file)?;
        let is_renamed = fs::canonicalize(&self.dir).map_or(true, |dir| dir != present);
        (is_renamed && present.is_dir()).then_some(present)
    }
}

/// The folder of an open lock file. The name of a removed file has an ending that no lock file has.
#[cfg(target_os = "linux")]
fn folder_of(file: &File) -> Option<PathBuf> {
    use std::os::fd::AsRawFd;
    let path = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
    (path.file_name()? == NAME).then(|| path.parent().map(Path::to_path_buf))?
}

#[cfg(not(target_os = "linux"))]
fn folder_of(_file: &File) -> Option<PathBuf> {
    None
}

#[cfg(unix)]
fn is_same_file(one: &Metadata, other: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

/// Other systems do not let a file be removed while it is open.
#[cfg(not(unix))]
fn is_same_file(_one: &Metadata, _other: &Metadata) -> bool {
    true
}

/// Locks the checkpoint folder of a run, which is created if necessary, and removes what killed runs left unfinished there.
/// On file systems without locks this function only creates the folder and checks that it can have checkpoints.
///
/// # Errors
/// When another run has locked the folder, or no checkpoint can be created in it.
pub fn lock(dir: &Path) -> Result<FolderLock, CheckpointError> {
    let path = dir.join(NAME);
    let missing = path.ancestors().take_while(|path| !path.as_os_str().is_empty());
    let created = missing.take_while(|path| !path.exists()).map(Path::to_path_buf).collect();
    create(dir)?;
    let file = File::options().create(true).truncate(false).write(true).open(&path);
    let file = file.map_err(CheckpointError::io(&path, "written"))?;
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => Err(CheckpointError::new(dir, CheckpointFault::Locked)),
        Err(TryLockError::Error(error)) if error.kind() != io::ErrorKind::Unsupported => {
            Err(CheckpointError::io(&path, "locked")(error))
        }
        locked => {
            if locked.is_ok() {
                remove_leftovers(dir);
            }
            let lock = FolderLock { dir: dir.to_path_buf(), file, created };
            // A run that ended without a checkpoint may have removed the file since it was opened.
            lock.verify()?;
            // A lock file that an earlier run left may be writable in a folder that is not.
            probe_entries(dir)?;
            Ok(lock)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_removes_what_a_killed_one_left() {
        let dir = tempfile::tempdir().unwrap();
        let left = dir.path().join(".narrows-checkpoint-step-00000010.tmp");
        let kept = dir.path().join("step-00000012");
        fs::create_dir(&left).unwrap();
        fs::create_dir(&kept).unwrap();
        let first = lock(dir.path()).unwrap();
        assert!(!left.exists() && kept.exists());
        // One that is refused removes nothing.
        fs::create_dir(&left).unwrap();
        assert!(lock(dir.path()).is_err() && left.exists());
        drop(first);
        assert!(kept.exists() && dir.path().join(NAME).exists(), "there is a checkpoint");
    }

    /// The path of the folder is too long for the names of checkpoints, but not for that of the lock file. Other than with
    /// permissions, root cannot create them either.
    #[test]
    #[cfg(target_os = "linux")]
    fn a_folder_that_can_have_the_lock_file_alone_is_refused() {
        const PATH_BYTES_MAX: usize = 4095;
        let outer = tempfile::tempdir().unwrap();
        let mut dir = outer.path().to_path_buf();
        let target = PATH_BYTES_MAX - NAME.len() - 3;
        while dir.as_os_str().len() < target {
            let left = target - dir.as_os_str().len() - 1;
            // The rest must have room for a separator and a name.
            dir.push("d".repeat(if left > 200 { left.min(200).min(left - 2) } else { left }));
        }
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join(NAME), "").unwrap();
        let error = lock(&dir).unwrap_err().to_string();
        assert!(error.contains(": cannot be written into: "), "{error}");
        assert!(dir.join(NAME).exists(), "the lock file was there before");
    }

    #[test]
    fn a_run_without_a_checkpoint_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        drop(lock(&dir.path().join("a/b")).unwrap());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        // What was there before stays.
        let folder = dir.path().join("c");
        fs::create_dir(&folder).unwrap();
        drop(lock(&folder).unwrap());
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
        fs::write(folder.join(NAME), "").unwrap();
        drop(lock(&folder).unwrap());
        assert!(folder.join(NAME).exists());
        // So do the files of others, and the folder of a run that is refused.
        let held = lock(&dir.path().join("d")).unwrap();
        assert!(lock(&dir.path().join("d")).is_err());
        fs::write(dir.path().join("d/file"), "").unwrap();
        drop(held);
        assert!(dir.path().join("d/file").exists());
    }
}
