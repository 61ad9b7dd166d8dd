//! Event files of TensorBoard: the scalars of a run, one event for each step.
//!
//! [`record`] frames and checks records, [`event`] encodes events.

mod event;
mod record;

use std::fs::{self, File};
use std::io::{self, BufReader, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use narrows_runtime::train::{Evaluation, StepPrediction, TrainedStep};

use crate::errors::{CommandResult, Failure, Problem};
use crate::output::{create_folder, write_failure};

use event::Event;

/// An event file, which is flushed after every step.
pub struct EventFile {
    path: PathBuf,
    file: File,
}

impl EventFile {
    /// Confirms that a folder, which may be absent, has no events of another run.
    ///
    /// # Errors
    /// A folder or an event file that cannot be read, and events.
    pub fn require_none(folder: &Path) -> CommandResult<()> {
        let failure = |error: io::Error| write_failure(&folder.display().to_string(), &error);
        if !folder.exists() || !has_event_files(folder).map_err(failure)? {
            return Ok(());
        }
        let message = "already holds event files of a run: TensorBoard would mix its graphs with those of this one";
        let problem = Problem::new(folder.display().to_string(), message)
            .hint("another --tensorboard, for another run")
            .hint("--resume with the --checkpoint-dir of that run, to continue it");
        Err(Failure::input(problem))
    }

    /// Creates a new file in a folder of such files, which is created too. Of the files before it, readers ignore events
    /// from step `first_step` on, which follow here: a run that resumes repeats them.
    ///
    /// # Errors
    /// A folder or a file that cannot be created.
    pub fn create(folder: &Path, first_step: u64) -> CommandResult<EventFile> {
        let failure = |error: io::Error| write_failure(&folder.display().to_string(), &error);
        create_folder(folder)?;
        let now = now();
        let (path, file) = create_new(folder, now.as_secs()).map_err(failure)?;
        let mut events = EventFile { path, file };
        let begun = events.append(&[Event::Version, Event::Start { step: first_step }], now);
        if begun.is_err() {
            // The failure is that of the disk.
            let _ = fs::remove_file(&events.path);
        }
        begun.map(|()| events)
    }

    /// Appends the values of a step, and of the evaluation that followed it.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn write(
        &mut self,
        trained: &TrainedStep,
        predicted: &StepPrediction,
        evaluation: Option<&Evaluation>,
    ) -> CommandResult<()> {
        let step_time_s = trained.step_time.as_secs_f64();
        let mut scalars = vec![
            ("train/loss", trained.loss),
            ("train/learning_rate", trained.learning_rate),
            ("train/grad_norm", trained.gradient_norm),
            ("time/tokens_per_s", trained.tokens as f64 / step_time_s),
            ("time/step_time_s", step_time_s),
            ("time/predicted_step_time_s", predicted.step_time_s),
        ];
        scalars.extend(evaluation.map(|evaluation| ("eval/loss", evaluation.loss)));
        self.append(&[Event::Scalars { step: trained.step, scalars }], now())
    }

    fn append(&mut self, events: &[Event], time: Duration) -> CommandResult<()> {
        let records = events.iter().flat_map(|event| record::frame(&event.encode(time)));
        let records: Vec<u8> = records.collect();
        let written = self.file.write_all(&records);
        written.map_err(|error| write_failure(&self.path.display().to_string(), &error))
    }
}

/// Whether a folder has files with graphs that TensorBoard draws. Their names contain `tfevents`.
fn has_event_files(folder: &Path) -> io::Result<bool> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().contains("tfevents") && has_values(&entry.path())? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether an event file has more than its header, which is all that a run leaves that ends before its first step. What
/// cannot be read as events may be anything.
fn has_values(path: &Path) -> io::Result<bool> {
    if !path.is_file() {
        return Ok(true);
    }
    let mut file = BufReader::new(File::open(path)?);
    loop {
        match record::read(&mut file) {
            Ok(None) => return Ok(false),
            Ok(Some(event)) if event::is_header(&event) => {}
            Ok(Some(_)) => return Ok(true),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => return Ok(true),
            Err(error) => return Err(error),
        }
    }
}

/// The time since 1970.
fn now() -> Duration {
    SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default()
}

/// Creates the file of a second. Readers take the files of a folder in the order of their names.
fn create_new(folder: &Path, second: u64) -> io::Result<(PathBuf, File)> {
    let mut number = 0;
    loop {
        let path = folder.join(format!("events.out.tfevents.{second:010}.{number:03}.narrows"));
        match File::create_new(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
            file => return file.map(|file| (path, file)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Records that TensorBoard 2.20 wrote, with its own protocol buffers and checksums.
    #[test]
    fn records_are_those_of_tensorboard() {
        let scalars = vec![("train/loss", 2.5), ("eval/loss", f64::NAN)];
        for (event, expected) in [
            (
                Event::Version,
                "1800000000000000a37f4b220900001040fc54d9411a0d627261696e2e4576656e743a32338d2fe9",
            ),
            (
                Event::Start { step: 301 },
                "100000000000000095fbfe180900001040fc54d94110ad023a020801cb79b93b",
            ),
            (
                Event::Scalars { step: 301, scalars },
                "33000000000000000ca720560900001040fc54d94110ad022a250a110a0a747261696e2f6c6f737315\
                 000020400a100a096576616c2f6c6f7373150000c07f86eac31e",
            ),
        ] {
            let time = Duration::from_millis(1_700_000_000_250);
            assert_eq!(hex::encode(record::frame(&event.encode(time))), expected, "{event:?}");
        }
    }

    #[test]
    fn only_events_with_values_are_those_of_a_run() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events.out.tfevents.0000000001.000.narrows");
        let record = |event: Event| record::frame(&event.encode(Duration::from_secs(1)));
        let header = [record(Event::Version), record(Event::Start { step: 1 })].concat();
        let values = record(Event::Scalars { step: 1, scalars: vec![("train/loss", 2.5)] });
        let cut = &values[..values.len() - 1];
        for (bytes, expected) in [
            (vec![], false),
            (header[..9].to_vec(), false),
            (header.clone(), false),
            ([&header, cut].concat(), false),
            ([&header[..], &values].concat(), true),
            (values.clone(), true),
            (b"no events at all".to_vec(), true),
        ] {
            fs::write(&path, &bytes).unwrap();
            assert_eq!(has_event_files(folder.path()).unwrap(), expected, "{bytes:?}");
        }
    }

    #[test]
    fn files_of_one_second_are_read_in_the_order_of_their_creation() {
        let folder = tempfile::tempdir().unwrap();
        let paths: Vec<PathBuf> =
            (0..3).map(|_| create_new(folder.path(), 1_700_000_000).unwrap().0).collect();
        assert!(paths.is_sorted(), "{paths:?}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
    }
}
