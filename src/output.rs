//! Standard output, standard error, and atomic writes of files.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use narrows_plan::{Plan, printable};
use narrows_runtime::{AtomicFile, link_target};

use crate::captured_output;
use crate::errors::{CommandResult, ExitStatus, Failure, Problem, style};
use crate::resource_limits;

/// Prints a text; styles are dropped where standard output is no terminal. A closed pipe is not an error.
pub fn print(text: &str) -> CommandResult<()> {
    print_to_reader(text).map(drop)
}

/// Prints a text as [`print`] does. Returns whether there is a reader: false once the pipe is closed.
pub fn print_to_reader(text: &str) -> CommandResult<bool> {
    if captured_output::keep_output(text) {
        return Ok(true);
    }
    let mut stdout = anstream::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(write_failure("-", &error)),
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
    if captured_output::keep_message(text) {
        return;
    }
    let _ = anstream::stderr().lock().write_all(text.as_bytes());
}

/// Whether this process prints warnings.
static PRINTS_WARNINGS: AtomicBool = AtomicBool::new(true);

/// Leaves warnings to another process, which has the same ones.
pub fn leave_warnings_to_rank_0() {
    PRINTS_WARNINGS.store(false, Ordering::Relaxed);
}

/// Prints a warning on standard error.
pub fn warn(text: &str) {
    if !PRINTS_WARNINGS.load(Ordering::Relaxed) {
        return;
    }
    let warning = style::WARNING;
    eprint(&format!("{warning}warning:{warning:#} {}\n", printable(text)));
}

/// Whether the argument stands for standard output. Opened by its name in `/dev`, a redirected file would be truncated.
pub fn is_stdout(output: &OsStr) -> bool {
    ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"].iter().any(|name| output == *name)
}

/// Writes a plan to a file or standard output.
pub fn write_plan(output: &OsStr, plan: &Plan) -> CommandResult<()> {
    let mut text = json_text(plan)?;
    text.push('\n');
    write_text(output, &text)
}

/// Writes a text to a file or standard output.
pub fn write_text(output: &OsStr, text: &str) -> CommandResult<()> {
    match is_stdout(output) {
        true => print(text),
        false => write_file(Path::new(output), text.as_bytes()),
    }
}

/// Writes a file, [atomically](write_atomically).
pub fn write_file(path: &Path, content: &[u8]) -> CommandResult<()> {
    write_atomically(path, content)
        .map_err(|error| write_failure(&path.display().to_string(), &error))
}

/// A value as indented JSON.
pub fn json_text(value: &impl serde::Serialize) -> CommandResult<String> {
    serde_json::to_string_pretty(value).map_err(|error| write_failure("-", &error.into()))
}

/// Checks that a file can be written, before a long computation.
pub fn check_writable(path: &Path) -> CommandResult<()> {
    let result = match fs::metadata(path) {
        Ok(existing) if existing.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        Ok(existing) if !existing.is_file() => Ok(()),
        _ => AtomicFile::create(path).map(drop),
    };
    result.map_err(|error| write_failure(&path.display().to_string(), &error))
}

/// Rejects a folder without a name, and standard output in place of one.
///
/// # Errors
/// The flag of the folder.
pub fn require_folder_name(flag: &str, folder: &Path) -> CommandResult<()> {
    let message = match folder.as_os_str() {
        name if name.is_empty() => "the name of the folder is empty",
        name if is_stdout(name) => "a folder cannot go to standard output",
        _ => return Ok(()),
    };
    let hint = "the name of a folder, such as `./-` for one called `-`";
    Err(Failure::input(Problem::new(flag, message).hint(hint)))
}

/// Creates the folder of an output, and its parents.
///
/// # Errors
/// A folder that cannot be created, or whose name a file has.
pub fn create_folder(path: &Path) -> CommandResult<()> {
    let location = path.display().to_string();
    if path.exists() && !path.is_dir() {
        let message = "cannot be written: it is a file, and a folder is needed";
        return Err(Failure::input(Problem::new(location, message).hint("the name of a folder")));
    }
    fs::create_dir_all(path).map_err(|error| write_failure(&location, &error))
}

/// Whether two outputs are one file, which may not exist yet. Several outputs may go to a pipe or a device.
pub fn is_same_output(one: &Path, other: &Path) -> bool {
    let place = |path: &Path| {
        let new = || {
            let path = link_target(path);
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            let folder = fs::canonicalize(folder.unwrap_or(Path::new("."))).ok()?;
            Some(folder.join(path.file_name()?))
        };
        fs::canonicalize(path).ok().or_else(new)
    };
    let is_stream = fs::metadata(one).is_ok_and(|existing| !existing.is_file());
    !is_stream && place(one).is_some_and(|one| place(other) == Some(one))
}

/// A file or stream that cannot be written.
pub fn write_failure(location: &str, error: &io::Error) -> Failure {
    let mut problem = Problem::new(location, format!("cannot be written: {error}"));
    problem.hints.extend(resource_limits::file_size_hint(error.kind()));
    Failure { status: ExitStatus::of_io(error), problems: vec![problem] }
}

/// Writes an [`AtomicFile`], so that readers see the old content or the new one. Anything but a regular file (a pipe,
/// `/dev/null`) is written directly.
pub fn write_atomically(path: &Path, content: &[u8]) -> io::Result<()> {
    match fs::metadata(path) {
        Ok(existing) if existing.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        Ok(existing) if !existing.is_file() => {
            fs::OpenOptions::new().write(true).open(path)?.write_all(content)
        }
        _ => {
            let mut file = AtomicFile::create(path)?;
            file.write(content)?;
            file.finish(&[])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_atomically_without_leftovers() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plan.json");
        write_atomically(&path, b"old").unwrap();
        write_atomically(&path, b"new").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_failed_write_leaves_no_files() {
        let folder = tempfile::tempdir().unwrap();
        assert!(write_atomically(folder.path(), b"text").is_err());
        assert!(write_atomically(&folder.path().join("missing/plan.json"), b"text").is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[cfg(unix)]
    #[test]
    fn links_are_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (real, link) = (folder.path().join("real"), folder.path().join("link"));
        fs::write(&real, b"old").unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        write_atomically(&link, b"new").unwrap();
        assert_eq!(fs::read_to_string(&real).unwrap(), "new");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    }

    /// A link whose file does not exist yet is the same output as the file, and creates it.
    #[cfg(unix)]
    #[test]
    fn links_to_new_files_are_followed() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::os::unix::fs::symlink("a.json", at("link")).unwrap();
        std::os::unix::fs::symlink(at("link"), at("second link")).unwrap();
        std::os::unix::fs::symlink("loop", at("loop")).unwrap();
        for link in ["link", "second link"] {
            assert!(is_same_output(&at(link), &at("a.json")), "{link}");
            assert!(is_same_output(&at("a.json"), &at(link)), "{link}");
        }
        assert!(!is_same_output(&at("link"), &at("b.json")));
        assert!(!is_same_output(&at("loop"), &at("a.json")));
        write_atomically(&at("second link"), b"new").unwrap();
        assert_eq!(fs::read_to_string(at("a.json")).unwrap(), "new");
        assert!(fs::symlink_metadata(at("link")).unwrap().is_symlink());
    }
}
