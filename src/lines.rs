//! Files of lines, each a JSON document, that grow while a run goes on.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};

use serde::Deserialize;

use crate::errors::{CommandResult, Failure, Problem};
use crate::output::{is_stdout, unwritable};

/// A file of lines, each of which is there as soon as it is written.
pub struct LineFile {
    name: String,
    file: Box<dyn Write>,
}

/// What is looked for in a line that is there already.
#[derive(Deserialize)]
struct StepNumber {
    step: u64,
}

impl LineFile {
    /// Begins a file, or standard output. What is there under its name is lost.
    pub fn create(output: &OsStr) -> CommandResult<LineFile> {
        let name = output.to_string_lossy().into_owned();
        let file: Box<dyn Write> = if is_stdout(output) {
            Box::new(io::stdout())
        } else {
            Box::new(fs::File::create(output).map_err(|error| unwritable(&name, &error))?)
        };
        Ok(LineFile { name, file })
    }

    /// Goes on with a file after the line of `step`. Lines of later steps, and the piece of one that
    /// was being written, are cut off: their steps are made again.
    ///
    /// # Errors
    /// When a line is not one of metrics: then the file stays as it is.
    pub fn resume(output: &OsStr, step: u64) -> CommandResult<LineFile> {
        let plain = fs::metadata(output).is_ok_and(|metadata| metadata.is_file());
        if is_stdout(output) || !plain {
            return LineFile::create(output);
        }
        let name = output.to_string_lossy().into_owned();
        let failed = |error: io::Error| unwritable(&name, &error);
        let mut options = fs::OpenOptions::new();
        let mut file = options.read(true).write(true).open(output).map_err(failed)?;
        let kept = length_until(&name, &file, step)?;
        file.set_len(kept).and_then(|()| file.seek(SeekFrom::Start(kept))).map_err(failed)?;
        Ok(LineFile { name, file: Box::new(file) })
    }

    /// What messages call it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Writes a JSON document as a line.
    pub fn write(&mut self, value: &impl serde::Serialize) -> CommandResult<()> {
        let mut line = serde_json::to_vec(value).map_err(|e| unwritable(&self.name, &e.into()))?;
        line.push(b'\n');
        match self.file.write_all(&line).and_then(|()| self.file.flush()) {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                Err(unwritable(&self.name, &error))
            }
            _ => Ok(()),
        }
    }
}

/// Bytes of the lines up to that of a step.
fn length_until(name: &str, file: &fs::File, step: u64) -> CommandResult<u64> {
    let (mut reader, mut line) = (BufReader::new(file), vec![]);
    let (mut kept, mut number) = (0, 0);
    loop {
        line.clear();
        number += 1;
        let read = reader.read_until(b'\n', &mut line).map_err(|error| {
            Failure::input(Problem::new(name, format!("cannot be read: {error}")))
        })?;
        if line.last() != Some(&b'\n') && is_piece(&line) {
            return Ok(kept);
        }
        let found: StepNumber = serde_json::from_slice(&line).map_err(|error| {
            let problem = format!("is not a line of metrics: {error}");
            let problem =
                Problem { field: format!("line {number}"), ..Problem::new(name, problem) };
            Failure::input(problem.hint("another name, or the file that the run began"))
        })?;
        if found.step > step {
            return Ok(kept);
        }
        kept += read as u64;
    }
}

/// Whether a line was still being written, rather than being the end of some other file.
fn is_piece(line: &[u8]) -> bool {
    const BEGINNING: &[u8] = b"{\"step\":";
    line.starts_with(BEGINNING) || BEGINNING.starts_with(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_cut_where_its_run_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.jsonl");
        let line = |step: u64| serde_json::json!({ "step": step });
        for (before, step, expected) in [
            ("", 2, "{\"step\":3}\n"),
            ("{\"step\":1}\n{\"step\":2}\n", 2, "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n"),
            ("{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n", 1, "{\"step\":1}\n{\"step\":2}\n"),
            ("{\"step\":1}\n{\"st", 1, "{\"step\":1}\n{\"step\":2}\n"),
            // A whole document without the end of its line was not finished either.
            ("{\"step\":1}", 1, "{\"step\":2}\n"),
        ] {
            fs::write(&path, before).unwrap();
            let mut lines = LineFile::resume(path.as_os_str(), step).unwrap();
            lines.write(&line(step + 1)).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), expected, "{before:?}");
        }
    }

    #[test]
    fn another_file_is_left_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("thesis.txt");
        for end in ["\n", ""] {
            fs::write(&path, format!("{{\"step\":1}}\nCall me Ishmael.{end}")).unwrap();
            let Err(failure) = LineFile::resume(path.as_os_str(), 9) else { panic!("not refused") };
            assert_eq!(failure.problems[0].field, "line 2");
            assert!(fs::read_to_string(&path).unwrap().contains("Ishmael"));
        }
    }
}
