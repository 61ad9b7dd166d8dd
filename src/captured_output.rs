//! Output of a command that runs within another program, and the flag that stops the command in place of signals.
//!
//! Both belong to the thread that runs the command, which is the one that prints.

use std::cell::RefCell;
use std::ffi::OsString;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

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

/// The answer so far of the thread's command, the flag that stops it, and its arguments.
struct Capture {
    answer: Answer,
    stop: Arc<AtomicBool>,
    arguments: Vec<OsString>,
}

thread_local! {
    static CAPTURE: RefCell<Option<Capture>> = const { RefCell::new(None) };
}

/// Runs the command of these arguments, without the name of the program, and keeps what this thread prints meanwhile.
pub fn capture<T>(
    arguments: Vec<OsString>,
    stop: Arc<AtomicBool>,
    command: impl FnOnce() -> T,
) -> (T, Answer) {
    CAPTURE.set(Some(Capture { answer: Answer::default(), stop, arguments }));
    let result = command();
    let answer = CAPTURE.take().map(|capture| capture.answer).unwrap_or_default();
    (result, answer)
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
    CAPTURE.with_borrow(|capture| capture.as_ref().map(|capture| Arc::clone(&capture.stop)))
}

/// The arguments of an embedded command; `None` where the thread runs none.
pub fn arguments() -> Option<Vec<OsString>> {
    CAPTURE.with_borrow(|capture| capture.as_ref().map(|capture| capture.arguments.clone()))
}

fn with_answer(keep: impl FnOnce(&mut Answer)) -> bool {
    CAPTURE.with_borrow_mut(|capture| {
        capture.as_mut().map(|capture| keep(&mut capture.answer)).is_some()
    })
}

/// The text without styles.
pub fn plain(text: &str) -> String {
    anstream::adapter::strip_str(text).to_string()
}
