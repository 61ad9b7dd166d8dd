//! The profile that an unfinished calibration has kept so far, for the message of one that ends early.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::errors::{CommandResult, Failure};
use crate::signals::end_on_signals;

/// The kept profile of a calibration, shared with the thread that handles signals.
#[derive(Clone, Default)]
pub struct KeptProfile {
    state: Arc<Mutex<KeptState>>,
}

#[derive(Default)]
enum KeptState {
    /// Too little is measured for a profile.
    #[default]
    Nothing,
    /// The profile of some rounds is in a file.
    Kept { rounds: String, file: PathBuf },
    /// The profile is written.
    Written { file: String },
}

impl KeptProfile {
    /// Ends the calibration on signals, with a sentence on what it has kept.
    pub fn end_on_signals(&self) {
        let kept = self.clone();
        let warning = "Ctrl-C will end the calibration without a message";
        end_on_signals(warning, move || {
            let clause = kept.state().clause();
            let clause = clause.unwrap_or_else(|| "no profile was written".into());
            Some(format!("Stopped by a signal: {clause}"))
        });
    }

    /// Writes the profile of some rounds, such as `2 of 4 rounds`, to a file. A signal waits meanwhile.
    pub fn keep(
        &self,
        rounds: &str,
        file: PathBuf,
        write: impl FnOnce(&Path) -> CommandResult<()>,
    ) {
        let mut state = self.state();
        if write(&file).is_ok() {
            *state = KeptState::Kept { rounds: rounds.to_owned(), file };
        }
    }

    /// Writes the profile of all rounds, and returns the name of its file. A signal waits meanwhile.
    ///
    /// # Errors
    /// Those of `write`.
    pub fn complete(&self, write: impl FnOnce() -> CommandResult<String>) -> CommandResult<String> {
        let mut state = self.state();
        let file = write()?;
        *state = KeptState::Written { file: file.clone() };
        Ok(file)
    }

    /// The failure of a measurement, with what was kept before it.
    pub fn with_kept(&self, mut failure: Failure) -> Failure {
        if let (Some(clause), Some(problem)) = (self.state().clause(), failure.problems.first_mut())
        {
            problem.causes.push(clause);
        }
        failure
    }

    fn state(&self) -> MutexGuard<'_, KeptState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KeptState {
    fn clause(&self) -> Option<String> {
        match self {
            KeptState::Nothing => None,
            KeptState::Kept { rounds, file } => {
                Some(format!("the profile of {rounds} is in {}", file.display()))
            }
            KeptState::Written { file } => Some(format!("the profile is in {file}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::errors::Problem;

    #[test]
    fn a_failure_names_the_profile_that_was_kept_before_it() {
        let kept = KeptProfile::default();
        let causes =
            || kept.with_kept(Failure::input(Problem::new("", ""))).problems[0].causes.clone();
        assert!(causes().is_empty());
        kept.keep("2 of 4 rounds", "here.json.partial".into(), |_| Ok(()));
        assert_eq!(causes(), ["the profile of 2 of 4 rounds is in here.json.partial"]);
        let full = |_: &Path| Err(Failure::input(Problem::new("", "the disk is full")));
        kept.keep("3 of 4 rounds", "here.json.partial".into(), full);
        assert_eq!(causes(), ["the profile of 2 of 4 rounds is in here.json.partial"]);
        kept.complete(|| Ok("here.json".into())).unwrap();
        assert_eq!(causes(), ["the profile is in here.json"]);
    }
}
