//! Files that are there whole or not at all.

use std::fs::{self, File};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

const BUFFER_BYTES: usize = 1 << 20;

/// A file that is being written under another name, in the folder of the one it will be. It
/// vanishes unless it is [finished](AtomicFile::finish).
#[derive(Debug)]
pub struct AtomicFile {
    file: BufWriter<NamedTempFile>,
    target: PathBuf,
}

impl AtomicFile {
    /// Begins a file. A link is followed; a folder, a pipe or a device is refused.
    pub fn create(path: &Path) -> io::Result<AtomicFile> {
        let existing = fs::metadata(path).ok();
        if existing.as_ref().is_some_and(|existing| !existing.is_file()) {
            return Err(io::Error::other("it is there, and not a plain file"));
        }
        let target = if existing.is_some() { fs::canonicalize(path)? } else { path.to_path_buf() };
        let mut builder = tempfile::Builder::new();
        builder.prefix(".narrows-").suffix(".tmp");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            // As any program creates files: the umask takes what the user does not want to give.
            builder.permissions(fs::Permissions::from_mode(0o666));
        }
        let folder = folder(&target);
        if !folder.is_dir() {
            let problem = format!("there is no folder `{}`", folder.display());
            return Err(io::Error::new(io::ErrorKind::NotFound, problem));
        }
        // Without the temporary name, which would help nobody.
        let file = builder.tempfile_in(folder).map_err(|error| io::Error::from(error.kind()))?;
        if let Some(existing) = existing {
            file.as_file().set_permissions(existing.permissions())?;
        }
        Ok(AtomicFile { file: BufWriter::with_capacity(BUFFER_BYTES, file), target })
    }

    /// Writes at the end.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)
    }

    /// Replaces the first bytes, makes sure that all of them are on the disk, and gives the file
    /// its name.
    pub fn finish(mut self, first_bytes: &[u8]) -> io::Result<()> {
        self.file.seek(SeekFrom::Start(0))?;
        self.file.write_all(first_bytes)?;
        let file = self.file.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.as_file().sync_all()?;
        file.persist(&self.target).map_err(|error| error.error)?;
        sync_folder(folder(&self.target));
        Ok(())
    }
}

fn folder(target: &Path) -> &Path {
    match target.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// So that the new name survives a power cut. Not every file system can, and the file is whole
/// either way.
fn sync_folder(folder: &Path) {
    let _ = File::open(folder).and_then(|folder| folder.sync_all());
}
