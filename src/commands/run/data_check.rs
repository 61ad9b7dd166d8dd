//! Verification of token files: whether the tokens have the checksum that the header of their file claims.

use std::sync::Arc;
use std::thread::{self, JoinHandle};

use narrows_runtime::data::{DataError, TokenFile};

use crate::args::{TrainSettings, VerifyData};
use crate::cluster::LaunchedProcess;
use crate::errors::{CommandResult, Failure};
use crate::output;

/// Files up to this size are verified before the first step by default: within seconds.
const AT_START_BYTES_MAX: u64 = 1 << 30;

/// The verification of the token files of a run.
pub struct DataCheck {
    /// Files that are being verified while the run trains.
    running: Vec<RunningCheck>,
    clause: &'static str,
}

/// The verification of a file by a thread.
struct RunningCheck {
    file: Arc<TokenFile>,
    thread: JoinHandle<Result<(), DataError>>,
}

impl DataCheck {
    /// Verifies small files, and starts to verify large ones. One process of each node does so.
    ///
    /// # Errors
    /// A file that is damaged or cannot be read.
    pub fn begin(
        tokens: Option<&Arc<TokenFile>>,
        evaluated: Option<&Arc<TokenFile>>,
        training: &TrainSettings,
    ) -> CommandResult<DataCheck> {
        let mut check = DataCheck { running: vec![], clause: "" };
        let is_first = |process: &LaunchedProcess| process.launch.local_rank == 0;
        if training.process.as_ref().is_none_or(is_first) {
            let mut verify = |file| check.verify(file, training.verify_data);
            evaluated.map_or(Ok(""), &mut verify)?;
            check.clause = tokens.map_or(Ok(""), &mut verify)?;
        }
        Ok(check)
    }

    /// Verifies a file, or starts to. Returns a clause on it.
    fn verify(&mut self, file: &Arc<TokenFile>, when: VerifyData) -> CommandResult<&'static str> {
        // Files that claim no checksum have been read to compute one.
        let (Some(_), Some(bytes)) = (file.header().checksum, file.header().file_bytes()) else {
            return Ok("");
        };
        let at_start = match when {
            VerifyData::Auto => bytes <= AT_START_BYTES_MAX,
            VerifyData::Start => true,
            VerifyData::Background => false,
            VerifyData::Never => return Ok(", not verified"),
        };
        let (verified, clause) = match at_start {
            true => (file.verify_checksum(), ", verified"),
            false => (self.start(file), ", verified while the run trains"),
        };
        verified.map_err(Failure::token_file).map(|()| clause)
    }

    /// Starts a thread that verifies a file; without one, verifies the file at once.
    fn start(&mut self, file: &Arc<TokenFile>) -> Result<(), DataError> {
        let verified = file.clone();
        let builder = thread::Builder::new().name("verify data".into());
        match builder.spawn(move || verified.verify_checksum()) {
            Ok(thread) => self.running.push(RunningCheck { file: file.clone(), thread }),
            Err(_) => file.verify_checksum()?,
        }
        Ok(())
    }

    /// Whether the training tokens are verified, as the end of a line about them.
    pub fn clause(&self) -> &'static str {
        self.clause
    }

    /// The failure of a file that was found damaged, or could not be read, since the last call.
    pub fn fault(&mut self) -> Option<Failure> {
        let position = self.running.iter().position(|check| check.thread.is_finished())?;
        let finished = self.running.swap_remove(position);
        // A panic has printed its message.
        let result = finished.thread.join().ok()?;
        result.err().map(Failure::token_file)
    }

    /// Warns of files that the run has read and not verified to the end.
    pub fn warn_if_unfinished(&self) {
        for check in self.running.iter().filter(|check| !check.thread.is_finished()) {
            let file = check.file.path().display();
            output::warn(&format!("{file}: the run ended before its checksum was verified"));
        }
    }
}
