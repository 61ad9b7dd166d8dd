//! Writes to standard output and to files, never half of something.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use narrows_plan::Plan;

use crate::errors::{CommandResult, Failure, Problem, style};

/// Prints a text; styles are dropped where they would not be seen. A reader that went away is no
/// failure: whoever closes a pipe has seen enough.
pub fn print(text: &str) -> CommandResult<()> {
    let mut stdout = anstream::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(unwritable("-", &error)),
        _ => Ok(()),
    }
}

/// Prints one JSON document.
pub fn print_json(value: &impl serde::Serialize) -> CommandResult<()> {
    let mut text = json_text(value)?;
    text.push('\n');
    print(&text)
}

/// Tells something on standard error; nothing can be done when that is closed.
pub fn tell(text: &str) {
    let _ = anstream::stderr().lock().write_all(text.as_bytes());
}

/// A warning: the command goes on.
pub fn warn(text: &str) {
    let warning = style::WARNING;
    tell(&format!("{warning}warning:{warning:#} {text}\n"));
}

/// Whether plans written to `output` share standard output with the report.
pub fn is_stdout(output: &OsStr) -> bool {
    output == "-"
}

/// Writes a plan, whole or not at all.
pub fn write_plan(output: &OsStr, plan: &Plan) -> CommandResult<()> {
    let mut text = json_text(plan)?;
    text.push('\n');
    if is_stdout(output) {
        return print(&text);
    }
    write_whole(Path::new(output), &text)
        .map_err(|error| unwritable(&output.to_string_lossy(), &error))
}

fn json_text(value: &impl serde::Serialize) -> CommandResult<String> {
    serde_json::to_string_pretty(value).map_err(|error| unwritable("-", &error.into()))
}

/// Finds out early whether a file can be written, where what is written takes long to make.
pub fn writable(path: &Path) -> CommandResult<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    let tried = match fs::metadata(path) {
        Ok(existing) if existing.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        Ok(existing) if !existing.is_file() => Ok(()),
        _ => temporary(folder, path).map(drop),
    };
    tried.map_err(|error| unwritable(&path.display().to_string(), &error))
}

/// That something cannot be written.
pub fn unwritable(place: &str, error: &io::Error) -> Failure {
    Failure::input(Problem::new(place, format!("cannot be written: {error}")))
}

/// Writes beside the file and renames, so that its readers see the old text or the new one. What is
/// not a plain file (a pipe, `/dev/null`) is written to; a link is followed.
pub fn write_whole(path: &Path, text: &str) -> io::Result<()> {
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

/// A file that vanishes unless it is persisted, with the permissions of the one it replaces.
fn temporary(folder: &Path, target: &Path) -> io::Result<tempfile::NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".narrows-").suffix(".tmp");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // As any program creates files: the umask takes what the user does not want to give.
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
    fn a_file_is_replaced_whole_and_nothing_is_left_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plan.json");
        write_whole(&path, "old").unwrap();
        write_whole(&path, "new").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn what_cannot_be_written_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        assert!(write_whole(folder.path(), "text").is_err());
        assert!(write_whole(&folder.path().join("missing/plan.json"), "text").is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[cfg(unix)]
    #[test]
    fn links_are_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (real, link) = (folder.path().join("real"), folder.path().join("link"));
        fs::write(&real, "old").unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        write_whole(&link, "new").unwrap();
        assert_eq!(fs::read_to_string(&real).unwrap(), "new");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    }
}
