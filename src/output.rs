//! Standard output, standard error, and atomic writes of files.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use narrows_plan::Plan;

use crate::errors::{CommandResult, Failure, Problem, style};

/// Prints a text; styles are dropped where standard output is no terminal. A closed pipe is not an error.
pub fn print(text: &str) -> CommandResult<()> {
    let mut stdout = anstream::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(write_failure("-", &error)),
        _ => Ok(()),
    }
}

/// Prints one JSON document.
pub fn print_json(value: &impl serde::Serialize) -> CommandResult<()> {
    let mut text = json_text(value)?;
    text.push('\n');
    print(&text)
}

/// Prints a text on standard error. Errors are ignored, because they cannot be reported.
pub fn eprint(text: &str) {
    let _ = anstream::stderr().lock().write_all(text.as_bytes());
}

/// Prints a warning on standard error.
pub fn warn(text: &str) {
    let warning = style::WARNING;
    eprint(&format!("{warning}warning:{warning:#} {text}\n"));
}

/// Whether the argument stands for standard output.
pub fn is_stdout(output: &OsStr) -> bool {
    output == "-"
}

/// Writes a plan to a file or standard output.
pub fn write_plan(output: &OsStr, plan: &Plan) -> CommandResult<()> {
    let mut text = json_text(plan)?;
    text.push('\n');
    if is_stdout(output) {
        return print(&text);
    }
    write_atomically(Path::new(output), &text)
        .map_err(|error| write_failure(&output.to_string_lossy(), &error))
}

fn json_text(value: &impl serde::Serialize) -> CommandResult<String> {
    serde_json::to_string_pretty(value).map_err(|error| write_failure("-", &error.into()))
}

/// Checks that a file can be written, before a long computation.
pub fn check_writable(path: &Path) -> CommandResult<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    let result = match fs::metadata(path) {
        Ok(existing) if existing.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        Ok(existing) if !existing.is_file() => Ok(()),
        _ => temporary(folder, path).map(drop),
    };
    result.map_err(|error| write_failure(&path.display().to_string(), &error))
}

/// A file or stream that cannot be written.
pub fn write_failure(location: &str, error: &io::Error) -> Failure {
    Failure::input(Problem::new(location, format!("cannot be written: {error}")))
}

/// Writes a temporary file beside the target and renames it, so that readers see the old text or the new one. Anything
/// but a regular file (a pipe, `/dev/null`) is written directly; links are followed.
pub fn write_atomically(path: &Path, text: &str) -> io::Result<()> {
    let target = match fs::metadata(path) {
        Ok(existing) if existing.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
        Ok(existing) if !existing.is_file() => {
            return fs::OpenOptions::new().write(true).open(path)?.write_all(text.as_bytes());
        }
        Ok(_) => fs::canonicalize(path)?,
        Err(_) => path.to_path_buf(),
    };
    let folder = match target.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_path_buf(),
        _ => PathBuf::from("."),
    };
    let mut file = temporary(&folder, &target)?;
    file.write_all(text.as_bytes())?;
    file.as_file().sync_all()?;
    file.persist(&target).map(drop).map_err(|error| error.error)
}

/// A file that is deleted unless it is persisted, with the permissions of the one it replaces.
fn temporary(folder: &Path, target: &Path) -> io::Result<tempfile::NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".narrows-").suffix(".tmp");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // The default mode of new files; the umask applies.
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    let file = builder.tempfile_in(folder)?;
    if let Ok(existing) = fs::metadata(target) {
        file.as_file().set_permissions(existing.permissions())?;
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_atomically_without_leftovers() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plan.json");
        write_atomically(&path, "old").unwrap();
        write_atomically(&path, "new").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_failed_write_leaves_no_files() {
        let folder = tempfile::tempdir().unwrap();
        assert!(write_atomically(folder.path(), "text").is_err());
        assert!(write_atomically(&folder.path().join("missing/plan.json"), "text").is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[cfg(unix)]
    #[test]
    fn links_are_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (real, link) = (folder.path().join("real"), folder.path().join("link"));
        fs::write(&real, "old").unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        write_atomically(&link, "new").unwrap();
        assert_eq!(fs::read_to_string(&real).unwrap(), "new");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    }
}
