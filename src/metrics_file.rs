//! Metrics files: one JSON object per line, appended after every step.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;

use narrows_plan::json;
use serde::Deserialize;

use crate::errors::{CommandResult, Failure, Problem};
use crate::input::TextDocument;
use crate::locked_file::{open_locked, set_aside};
use crate::output::{is_stdout, warn, write_failure};

/// A metrics file that is flushed after every line, and locked until it is dropped.
pub struct MetricsFile {
    name: String,
    file: Box<dyn Write>,
}

/// The field of an existing line that is read.
#[derive(Deserialize)]
struct StepNumber {
    step: u64,
}

/// The fields of a line that are drawn. Lines of other programs may lack some.
#[derive(Debug, Deserialize)]
pub struct MetricsLine {
    /// Number of the step.
    pub step: u64,
    /// Loss of the step.
    pub loss: Option<f64>,
    /// Loss of the evaluation that followed the step.
    pub eval_loss: Option<f64>,
    /// Gradient norm before clipping.
    pub grad_norm: Option<f64>,
    /// Learning rate.
    pub learning_rate: Option<f64>,
    /// Measured step time.
    pub step_time_s: Option<f64>,
    /// Predicted step time.
    pub predicted_step_time_s: Option<f64>,
}

/// The name and the complete lines of a metrics file, or of standard input.
///
/// # Errors
/// A file that cannot be read, and a complete line that is no metrics record.
pub fn read(input: &OsStr) -> CommandResult<(String, Vec<MetricsLine>)> {
    let document = TextDocument::find(input)?;
    let name = document.name().to_owned();
    let unreadable =
        |error: io::Error| Failure::input(Problem::new(&name, format!("cannot be read: {error}")));
    let mut reader = BufReader::new(document.open()?);
    let (mut lines, mut line) = (vec![], vec![]);
    // The last line may still be written.
    while reader.read_until(b'\n', &mut line).map_err(unreadable)? > 0
        && line.last() == Some(&b'\n')
    {
        let hint = "the file of `narrows run --metrics FILE`";
        lines.push(parse_line(&name, lines.len() as u64 + 1, &line, hint)?);
        line.clear();
    }
    Ok((name, lines))
}

/// Reads a line, which is line `number` of the file.
fn parse_line<'a, T: Deserialize<'a>>(
    name: &str,
    number: u64,
    line: &'a [u8],
    hint: &str,
) -> CommandResult<T> {
    serde_json::from_slice(line).map_err(|error| {
        let defect = json::defect_of_line(&error);
        let problem = Problem::new(name, format!("is not a line of metrics: {defect}"));
        Failure::input(problem.field(format!("line {number}")).hint(hint))
    })
}

impl MetricsFile {
    /// Creates a file, or opens standard output. An existing file with a complete line is renamed, with a warning, so
    /// that no line of another run is lost.
    ///
    /// # Errors
    /// A file that cannot be written or renamed, one into which another run writes, and one with other lines; the file
    /// is then left unchanged.
    pub fn create(output: &OsStr) -> CommandResult<MetricsFile> {
        MetricsFile::begin(output, |name, kept| {
            format!("{name} has the steps of another run: it is now {kept}")
        })
    }

    /// As [`create`](MetricsFile::create), for a run that begins anew since there is no checkpoint to resume from.
    ///
    /// # Errors
    /// Those of [`create`](MetricsFile::create).
    pub fn restart(output: &OsStr) -> CommandResult<MetricsFile> {
        MetricsFile::begin(output, |name, kept| {
            format!(
                "{name} has steps of which no checkpoint is left: it is now {kept}, and the run begins at the first \
                 step"
            )
        })
    }

    /// Begins a file. `warning` gets the name of an existing file with lines, and the name that it has from now on.
    fn begin(output: &OsStr, warning: impl Fn(&str, &str) -> String) -> CommandResult<MetricsFile> {
        if let Some(other) = MetricsFile::open_other(output)? {
            return Ok(other);
        }
        let name = output.to_string_lossy().into_owned();
        let mut options = fs::OpenOptions::new();
        let file = open_locked(&name, output, options.read(true).append(true).create(true))?;
        if lines_until(&name, &file, u64::MAX)?.bytes == 0 {
            file.set_len(0).map_err(|error| write_failure(&name, &error))?;
            return Ok(MetricsFile { name, file: Box::new(file) });
        }
        let kept = set_aside(Path::new(output)).map_err(|error| write_failure(&name, &error))?;
        warn(&warning(&name, &kept.display().to_string()));
        // The lock is held until the new file has one: another run would rename the new file in place of this one.
        let begun = MetricsFile::begin(output, warning);
        drop(file);
        begun
    }

    /// Opens standard output, a pipe or a device; `None` for a regular file and where there is none.
    fn open_other(output: &OsStr) -> CommandResult<Option<MetricsFile>> {
        let name = output.to_string_lossy().into_owned();
        if is_stdout(output) {
            return Ok(Some(MetricsFile { name, file: Box::new(io::stdout()) }));
        }
        if fs::metadata(output).map_or(true, |metadata| metadata.is_file()) {
            return Ok(None);
        }
        let file = open_locked(&name, output, fs::OpenOptions::new().append(true))?;
        Ok(Some(MetricsFile { name, file: Box::new(file) }))
    }

    /// Continues a file after the line of `step`. Lines of later steps and an incomplete line are removed, since the
    /// steps are repeated.
    ///
    /// # Errors
    /// A line that is not a metrics record, or a file into which another run writes; the file is then left unchanged.
    pub fn resume(output: &OsStr, step: u64) -> CommandResult<MetricsFile> {
        if let Some(other) = MetricsFile::open_other(output)? {
            return Ok(other);
        }
        let name = output.to_string_lossy().into_owned();
        let mut options = fs::OpenOptions::new();
        let file = open_locked(&name, output, options.read(true).append(true).create(true))?;
        let lines = lines_until(&name, &file, step)?;
        if let Some(last) = lines.last_step.filter(|last| *last < step) {
            let steps = match last + 1 {
                first if first == step => format!("step {step}"),
                first => format!("steps {first} to {step}"),
            };
            warn(&format!("{name} has no line of {steps}, which the checkpoint has"));
        }
        file.set_len(lines.bytes).map_err(|error| write_failure(&name, &error))?;
        Ok(MetricsFile { name, file: Box::new(file) })
    }

    /// The name in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Appends a JSON object as a line.
    pub fn write(&mut self, value: &impl serde::Serialize) -> CommandResult<()> {
        let mut line =
            serde_json::to_vec(value).map_err(|e| write_failure(&self.name, &e.into()))?;
        line.push(b'\n');
        match self.file.write_all(&line).and_then(|()| self.file.flush()) {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                Err(write_failure(&self.name, &error))
            }
            _ => Ok(()),
        }
    }
}

/// The first lines of a file.
#[derive(Default)]
struct FirstLines {
    bytes: u64,
    /// Step of the last of them.
    last_step: Option<u64>,
}

/// The lines up to that of `step`.
fn lines_until(name: &str, file: &fs::File, step: u64) -> CommandResult<FirstLines> {
    let (mut reader, mut line) = (BufReader::new(file), vec![]);
    let (mut lines, mut number) = (FirstLines::default(), 0);
    loop {
        line.clear();
        number += 1;
        let read = reader.read_until(b'\n', &mut line).map_err(|error| {
            Failure::input(Problem::new(name, format!("cannot be read: {error}")))
        })?;
        if line.last() != Some(&b'\n') && is_truncated_record(&line) {
            return Ok(lines);
        }
        let hint = "another file name, or the metrics file of this run";
        let record: StepNumber = parse_line(name, number, &line, hint)?;
        if record.step > step {
            return Ok(lines);
        }
        lines = FirstLines { bytes: lines.bytes + read as u64, last_step: Some(record.step) };
    }
}

/// Whether a line without an end is a partially written record, and not the end of another file. File systems fill what was
/// not on the disk before a power failure with zeros.
fn is_truncated_record(line: &[u8]) -> bool {
    const PREFIX: &[u8] = b"{\"step\":";
    line.starts_with(PREFIX) || PREFIX.starts_with(line) || line.iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests {
    use narrows_test_support::damage::damaged;

    use super::*;

    #[test]
    fn a_file_is_truncated_where_its_run_resumes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.jsonl");
        let line = |step: u64| serde_json::json!({ "step": step });
        for (before, step, expected) in [
            ("", 2, "{\"step\":3}\n"),
            ("{\"step\":1}\n{\"step\":2}\n", 2, "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n"),
            ("{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n", 1, "{\"step\":1}\n{\"step\":2}\n"),
            ("{\"step\":1}\n{\"st", 1, "{\"step\":1}\n{\"step\":2}\n"),
            ("{\"step\":1}\n\0\0\0\0", 1, "{\"step\":1}\n{\"step\":2}\n"),
            // A record without the end of its line was not finished either.
            ("{\"step\":1}", 1, "{\"step\":2}\n"),
        ] {
            fs::write(&path, before).unwrap();
            let mut lines = MetricsFile::resume(path.as_os_str(), step).unwrap();
            lines.write(&line(step + 1)).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), expected, "{before:?}");
        }
    }

    #[test]
    fn a_run_that_begins_loses_no_line_of_another() {
        for begin in [MetricsFile::create, MetricsFile::restart] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("m.jsonl");
            let write_line = || {
                let mut lines = begin(path.as_os_str()).unwrap();
                lines.write(&serde_json::json!({ "step": 1 })).unwrap();
            };
            write_line();
            fs::write(&path, "{\"st").unwrap();
            write_line();
            fs::write(&path, "{\"step\":1}\n{\"st").unwrap();
            write_line();
            write_line();
            let names = ["m.jsonl", "m.jsonl.old-1", "m.jsonl.old-2"];
            let texts = names.map(|name| fs::read_to_string(folder.path().join(name)).unwrap());
            assert_eq!(texts, ["{\"step\":1}\n", "{\"step\":1}\n{\"st", "{\"step\":1}\n"]);
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
            fs::write(&path, "Call me Ishmael.\n").unwrap();
            assert!(begin(path.as_os_str()).is_err(), "a file of another kind");
            assert_eq!(fs::read_to_string(&path).unwrap(), "Call me Ishmael.\n");
        }
    }

    /// Runs begin until none is refused.
    #[test]
    fn runs_that_begin_at_once_lose_and_share_no_file() {
        const RUNS: u64 = 8;
        for round in 0..50 {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("m.jsonl");
            let line = |step: u64| format!("{{\"step\":{step}}}\n");
            fs::write(&path, line(0)).unwrap();
            let begin = |run: u64| {
                let mut lines = loop {
                    match MetricsFile::create(path.as_os_str()) {
                        Ok(lines) => break lines,
                        Err(failure) => {
                            assert!(
                                failure.problems[0].message.contains("another run"),
                                "{failure}"
                            );
                        }
                    }
                };
                lines.write(&serde_json::json!({ "step": run })).unwrap();
                assert_eq!(fs::read_to_string(&path).unwrap(), line(run), "round {round}");
            };
            std::thread::scope(|scope| {
                let begin = &begin;
                (1..=RUNS).for_each(|run| drop(scope.spawn(move || begin(run))));
            });
            let files = fs::read_dir(folder.path()).unwrap();
            let mut texts: Vec<String> =
                files.map(|file| fs::read_to_string(file.unwrap().path()).unwrap()).collect();
            texts.sort();
            assert_eq!(texts, (0..=RUNS).map(line).collect::<Vec<_>>(), "round {round}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_link_leads_to_the_new_file() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("disk")).unwrap();
        fs::write(at("disk/target.jsonl"), "{\"step\":1}\n").unwrap();
        std::os::unix::fs::symlink("disk/target.jsonl", at("m.jsonl")).unwrap();
        let mut lines = MetricsFile::create(at("m.jsonl").as_os_str()).unwrap();
        lines.write(&serde_json::json!({ "step": 2 })).unwrap();
        assert_eq!(fs::read_link(at("m.jsonl")).unwrap(), Path::new("disk/target.jsonl"));
        let texts = ["disk/target.jsonl", "disk/target.jsonl.old-1"]
            .map(|name| fs::read_to_string(at(name)).unwrap());
        assert_eq!(texts, ["{\"step\":2}\n", "{\"step\":1}\n"]);
    }

    #[test]
    fn a_file_has_one_writer_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.jsonl");
        let mut first = MetricsFile::create(path.as_os_str()).unwrap();
        first.write(&serde_json::json!({ "step": 1 })).unwrap();
        for second in [MetricsFile::create, |output: &OsStr| MetricsFile::resume(output, 1)] {
            let Err(failure) = second(path.as_os_str()) else { panic!("not refused") };
            assert!(failure.problems[0].message.contains("another run"), "{failure}");
        }
        first.write(&serde_json::json!({ "step": 2 })).unwrap();
        drop(first);
        let expected = "{\"step\":1}\n{\"step\":2}\n";
        assert_eq!(fs::read_to_string(&path).unwrap(), expected);
        MetricsFile::create(path.as_os_str()).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "");
    }

    #[test]
    fn damaged_lines_are_read_or_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.jsonl");
        let lines =
            "{\"step\":1,\"loss\":5.5,\"grad_norm\":1e-3}\n{\"step\":2,\"eval_loss\":null}\n";
        arbtest::arbtest(|u| {
            fs::write(&path, damaged(u, lines.as_bytes())?).unwrap();
            let _ = read(path.as_os_str());
            let _ = MetricsFile::resume(path.as_os_str(), 1);
            Ok(())
        })
        .budget_ms(200);
    }

    #[test]
    fn a_file_of_another_kind_is_left_unchanged() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("thesis.txt");
        for end in ["\n", ""] {
            fs::write(&path, format!("{{\"step\":1}}\nCall me Ishmael.{end}")).unwrap();
            let Err(failure) = MetricsFile::resume(path.as_os_str(), 9) else {
                panic!("not rejected")
            };
            assert_eq!(failure.problems[0].field, "line 2");
            assert!(fs::read_to_string(&path).unwrap().contains("Ishmael"));
        }
    }
}
