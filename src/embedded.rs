//! Commands within another program: what they print is kept for it, and a flag in place of signals stops them.
//!
//! Both belong to the thread that runs the command, which is the one that prints.

use std::cell::RefCell;
use std::ffi::OsString;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::args::CommandLine;
use crate::commands;
use crate::errors::ExitStatus;

/// Output and exit code of a command within another program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// The exit code that the program `narrows` would have.
    pub exit_code: u8,
    /// Text for standard output.
    pub output: String,
    /// Text for standard error, without styles.
    pub messages: String,
}

/// The answer so far of the thread's command, and the flag that stops it.
struct Host {
    answer: Answer,
    stop: Arc<AtomicBool>,
}

thread_local! {
    static HOST: RefCell<Option<Host>> = const { RefCell::new(None) };
}

/// Runs the command of these arguments, without the name of the program. It installs no handlers of signals: its searches
/// end soon after `stop` is set, and then the exit code is all that is returned.
pub fn answer(arguments: impl IntoIterator<Item = OsString>, stop: Arc<AtomicBool>) -> Answer {
    let program = OsString::from("narrows");
    let arguments = [program].into_iter().chain(arguments);
    let command_line = match CommandLine::parse_from_words(arguments) {
        Ok(command_line) => command_line,
        Err(error) => {
            let text = error.render().to_string();
            return match error.use_stderr() {
                true => Answer {
                    exit_code: ExitStatus::BadInput.code(),
                    messages: text,
                    ..Answer::default()
                },
                false => Answer { output: text, ..Answer::default() },
            };
        }
    };
    HOST.set(Some(Host { answer: Answer::default(), stop: Arc::clone(&stop) }));
    let result = commands::execute(&command_line.command);
    let Some(Host { mut answer, .. }) = HOST.take() else { return Answer::default() };
    if stop.load(Ordering::Relaxed) {
        // Answers of stopped searches are those of a time limit that nobody gave.
        return Answer { exit_code: ExitStatus::Stopped.code(), ..Answer::default() };
    }
    if let Err(failure) = result {
        answer.exit_code = failure.status.code();
        answer.messages.push_str(&plain(&failure.to_string()));
    }
    answer
}

/// Keeps a text for standard output; `false` where the thread runs no embedded command.
pub fn keep_output(text: &str) -> bool {
    with_answer(|answer| answer.output.push_str(&plain(text)))
}

/// Keeps a text for standard error; `false` where the thread runs no embedded command.
pub fn keep_message(text: &str) -> bool {
    with_answer(|answer| answer.messages.push_str(&plain(text)))
}

/// The flag that stops an embedded command; `None` where the thread runs none.
pub fn stop_flag() -> Option<Arc<AtomicBool>> {
    HOST.with_borrow(|host| host.as_ref().map(|host| Arc::clone(&host.stop)))
}

fn with_answer(keep: impl FnOnce(&mut Answer)) -> bool {
    HOST.with_borrow_mut(|host| host.as_mut().map(|host| keep(&mut host.answer)).is_some())
}

fn plain(text: &str) -> String {
    anstream::adapter::strip_str(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer_to(line: &str) -> Answer {
        answer(line.split_whitespace().map(OsString::from), Arc::default())
    }

    #[test]
    fn an_answer_has_the_text_and_the_exit_code_of_the_program() {
        let answer = answer_to("plan --model cola-tiny --format json");
        assert_eq!((answer.exit_code, answer.messages.as_str()), (0, ""));
        let plan: serde_json::Value = serde_json::from_str(&answer.output).expect("JSON");
        assert_eq!(plan["search"]["status"], "optimal");
        assert!(stop_flag().is_none());

        let answer = answer_to("plan --model cola-7");
        assert_eq!((answer.exit_code, answer.output.as_str()), (2, ""));
        assert!(answer.messages.starts_with("error: --model: there is no preset"), "{answer:?}");

        assert_eq!(answer_to("paln").exit_code, 2);
        let help = answer_to("plan --help");
        assert!(help.exit_code == 0 && help.output.contains("--devices"), "{help:?}");
    }

    #[test]
    fn a_flag_stops_a_search() {
        let stop = Arc::new(AtomicBool::new(true));
        let line = "plan --model cola-7b --devices 512 --global-batch 4096 --format json";
        let answer = answer(line.split_whitespace().map(OsString::from), Arc::clone(&stop));
        assert_eq!(answer, Answer { exit_code: 130, ..Answer::default() });
    }
}
