//! Files and folders that are written atomically: under a temporary name, then renamed. Plans, profiles, token files,
//! caches and folders of weights are written so; the folder of a checkpoint is committed by `checkpoint/folder.rs`.

use std::fs::{self, File};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use tempfile::{NamedTempFile, TempDir};

const BUFFER_BYTES: usize = 1 << 20;

/// Beginning and end of temporary names.
const PREFIX: &str = ".narrows-";
const SUFFIX: &str = ".tmp";

/// A file that is written under a temporary name in the folder of its final name. It is removed when
/// it is dropped before it is [finished](AtomicFile::finish).
#[derive(Debug)]
pub struct AtomicFile {
    file: BufWriter<Unnamed>,
    target: PathBuf,
}

/// A temporary file whose errors do not have its temporary name.
#[derive(Debug)]
struct Unnamed(NamedTempFile);

impl Write for Unnamed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.as_file_mut().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.as_file_mut().flush()
    }
}

impl Seek for Unnamed {
    fn seek(&mut self, position: SeekFrom) -> io::Result<u64> {
        self.0.as_file_mut().seek(position)
    }
}

impl AtomicFile {
    /// Starts a file that will replace `path`. Symbolic links are followed.
    ///
    /// # Errors
    /// When `path` is a folder, a pipe or a device, or its folder cannot be written to.
    pub fn create(path: &Path) -> io::Result<AtomicFile> {
        AtomicFile::create_with_prefix(path, PREFIX)
    }

    /// Starts a file as [`create`](AtomicFile::create) does, which may take long. It is locked, and files that killed processes
    /// left unfinished in place of this one are removed.
    ///
    /// # Errors
    /// As [`create`](AtomicFile::create).
    pub fn create_long(path: &Path) -> io::Result<AtomicFile> {
        let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
        let prefix = prefix_of(&target);
        remove_unlocked(parent_folder(&target), &prefix);
        let file = AtomicFile::create_with_prefix(path, &prefix)?;
        // On file systems without locks, nothing is removed either.
        let _ = file.file.get_ref().0.as_file().try_lock();
        Ok(file)
    }

    fn create_with_prefix(path: &Path, prefix: &str) -> io::Result<AtomicFile> {
        let existing = fs::metadata(path).ok();
        if existing.as_ref().is_some_and(|existing| !existing.is_file()) {
            return Err(io::Error::other("it exists and is not a regular file"));
        }
        let target = if existing.is_some() { fs::canonicalize(path)? } else { link_target(path) };
        let mut builder = tempfile::Builder::new();
        builder.prefix(prefix).suffix(SUFFIX);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            // The default mode of new files, which the umask restricts; `tempfile` uses 0600.
            builder.permissions(fs::Permissions::from_mode(0o666));
        }
        let folder = parent_folder(&target);
        let file = builder.tempfile_in(folder).map_err(|error| creation_error(&target, error))?;
        if let Some(existing) = existing {
            file.as_file().set_permissions(existing.permissions())?;
        }
        Ok(AtomicFile { file: BufWriter::with_capacity(BUFFER_BYTES, Unnamed(file)), target })
    }

    /// The temporary name until the file is [finished](AtomicFile::finish).
    pub fn temporary_path(&self) -> &Path {
        self.file.get_ref().0.path()
    }

    /// Appends bytes.
    ///
    /// # Errors
    /// When the write fails, for example because the disk is full.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)
    }

    /// Overwrites the start of the file with `first_bytes`, flushes the file to the disk, and renames
    /// it to its final name.
    ///
    /// # Errors
    /// When flushing or renaming fails; an existing file of that name is then unchanged.
    pub fn finish(mut self, first_bytes: &[u8]) -> io::Result<()> {
        self.file.seek(SeekFrom::Start(0))?;
        self.file.write_all(first_bytes)?;
        let Unnamed(file) = self.file.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.as_file().sync_all()?;
        file.persist(&self.target).map_err(|error| error.error)?;
        sync_folder(parent_folder(&self.target));
        Ok(())
    }
}

/// Longest chain of symbolic links that is followed, as on Linux.
const LINKS_MAX: usize = 40;

/// The path to which a chain of symbolic links leads, which may not exist yet; a path that is no link leads to itself.
pub fn link_target(path: &Path) -> PathBuf {
    let mut target = path.to_path_buf();
    for _ in 0..LINKS_MAX {
        let Ok(next) = fs::read_link(&target) else { break };
        target = parent_folder(&target).join(next);
    }
    target
}

/// A folder that is written under a temporary name beside its final name. It is removed when it is dropped before it is
/// [finished](AtomicFolder::finish), and so are the parents that were created for it.
#[derive(Debug)]
pub struct AtomicFolder {
    temporary: TempDir,
    /// The temporary folder, locked as long as this process lives; `None` on systems that do not open folders.
    _lock: Option<File>,
    target: PathBuf,
    created_parents: CreatedFolders,
}

/// Folders that were created for an output, the deepest first. They are removed when this is dropped, unless something is
/// in them.
#[derive(Debug, Default)]
struct CreatedFolders(Vec<PathBuf>);

impl CreatedFolders {
    /// Creates a folder and its parents where they do not exist.
    ///
    /// # Errors
    /// A parent that is a file, and one in which no folder can be created.
    fn create(folder: &Path) -> io::Result<CreatedFolders> {
        let mut created = CreatedFolders::default();
        let missing: Vec<&Path> = folder
            .ancestors()
            .take_while(|folder| !folder.as_os_str().is_empty() && !folder.exists())
            .collect();
        for folder in missing.into_iter().rev() {
            match fs::create_dir(folder) {
                Ok(()) => created.0.insert(0, folder.to_path_buf()),
                // Another process created it meanwhile.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && folder.is_dir() => {}
                Err(error) => return Err(creation_error(folder, error)),
            }
        }
        Ok(created)
    }
}

impl Drop for CreatedFolders {
    fn drop(&mut self) {
        for folder in &self.0 {
            let _ = fs::remove_dir(folder);
        }
    }
}

impl AtomicFolder {
    /// Starts a folder that will be `target`, whose parents are created. Folders that killed processes left unfinished in place
    /// of this one are removed.
    ///
    /// # Errors
    /// When the parent folder cannot be written to.
    pub fn create(target: &Path) -> io::Result<AtomicFolder> {
        let parent = parent_folder(target);
        let created_parents = CreatedFolders::create(parent)?;
        let prefix = prefix_of(target);
        remove_unlocked(parent, &prefix);
        let temporary = temporary_folder(parent, &prefix, SUFFIX)?;
        let lock = File::open(temporary.path()).ok();
        // On file systems without locks, nothing is removed either.
        let _ = lock.as_ref().map(File::try_lock);
        Ok(AtomicFolder { temporary, _lock: lock, target: target.to_path_buf(), created_parents })
    }

    /// The folder under its temporary name.
    pub fn path(&self) -> &Path {
        self.temporary.path()
    }

    /// The path that a file in the folder has in the end.
    pub fn final_path(&self, path: &Path) -> PathBuf {
        match path.strip_prefix(self.path()) {
            Ok(name) if name.as_os_str().is_empty() => self.target.clone(),
            Ok(name) => self.target.join(name),
            Err(_) => path.to_path_buf(),
        }
    }

    /// Renames the folder to its final name.
    ///
    /// # Errors
    /// When there is a file or a folder with contents of that name.
    pub fn finish(mut self) -> io::Result<()> {
        sync_folder(self.path());
        fs::rename(self.path(), &self.target)?;
        self.created_parents.0.clear();
        let _ = self.temporary.keep();
        sync_folder(parent_folder(&self.target));
        Ok(())
    }
}

/// Beginning of the temporary names of one target, with its name.
fn prefix_of(target: &Path) -> String {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    // The whole name has 255 bytes at most.
    let end = (0..=name.len().min(200)).rev().find(|end| name.is_char_boundary(*end));
    format!("{PREFIX}{}-", &name[..end.unwrap_or(0)])
}

/// Removes the temporary files and folders with a prefix that no process has locked, as far as that is possible.
fn remove_unlocked(folder: &Path, prefix: &str) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        // The random part has no hyphen, so that the prefix of another file does not match.
        let random = name.strip_prefix(prefix).and_then(|rest| rest.strip_suffix(SUFFIX));
        if random.is_some_and(|random| random.chars().all(char::is_alphanumeric))
            && File::open(entry.path()).is_ok_and(|file| file.try_lock().is_ok())
        {
            let _ = match entry.path().is_dir() {
                true => fs::remove_dir_all(entry.path()),
                false => fs::remove_file(entry.path()),
            };
        }
    }
}

/// Creates a folder with a temporary name that begins and ends so.
pub(crate) fn temporary_folder(parent: &Path, prefix: &str, suffix: &str) -> io::Result<TempDir> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(prefix).suffix(suffix);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // The default mode of new folders, which the umask restricts; `tempfile` uses 0700.
        builder.permissions(fs::Permissions::from_mode(0o777));
    }
    let within = parent.join(prefix);
    builder.tempdir_in(parent).map_err(|error| creation_error(&within, error))
}

/// The error of a file or folder that was to be created at `path`, maybe under a temporary name. The message of `tempfile` has that
/// name, and that of the system does not say which parent is at fault.
fn creation_error(path: &Path, error: io::Error) -> io::Error {
    let parent = parent_folder(path);
    let existing = parent.ancestors().find(|folder| folder.exists());
    match (existing, error.kind()) {
        (Some(file), _) if !file.is_dir() => {
            let problem = format!("`{}` is not a folder", file.display());
            io::Error::new(io::ErrorKind::NotADirectory, problem)
        }
        _ if !parent.is_dir() => {
            let problem = format!("there is no folder `{}`", parent.display());
            io::Error::new(io::ErrorKind::NotFound, problem)
        }
        // As in /proc, whose files are those of the kernel.
        (_, io::ErrorKind::NotFound) => {
            let problem = format!("no file can be created in `{}`", parent.display());
            io::Error::new(io::ErrorKind::NotFound, problem)
        }
        (_, kind) => io::Error::from(kind),
    }
}

fn parent_folder(target: &Path) -> &Path {
    match target.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Flushes the folder, so that the new name survives a power failure. Errors are ignored: not every file system supports
/// this, and the file is complete either way.
fn sync_folder(folder: &Path) {
    let _ = File::open(folder).and_then(|folder| folder.sync_all());
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn folders_of_killed_processes_are_removed_and_those_of_others_stay() {
        let parent = tempfile::tempdir().unwrap();
        let at = |name: &str| parent.path().join(name);
        for name in [".narrows-out-a1B2c3.tmp", ".narrows-other-a1B2c3.tmp", ".narrows-a1B2c3.tmp"]
        {
            fs::create_dir(at(name)).unwrap();
            fs::write(at(name).join("config.json"), "{}").unwrap();
        }
        let unfinished = AtomicFolder::create(&at("out")).unwrap();
        assert!(!at(".narrows-out-a1B2c3.tmp").exists());
        assert!(at(".narrows-other-a1B2c3.tmp").exists() && at(".narrows-a1B2c3.tmp").exists());
        // The folder of a living process is locked.
        AtomicFolder::create(&at("out")).unwrap().finish().unwrap();
        assert!(unfinished.path().exists() && at("out").exists());
    }
}
