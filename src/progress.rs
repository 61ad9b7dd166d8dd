//! Progress bars and spinners on standard error, drawn only on a terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Time between two frames of a spinner.
const TICK: Duration = Duration::from_millis(120);

/// Runs a task, with a spinner beside `message` if `visible`.
pub fn with_spinner<T>(message: &str, visible: bool, task: impl FnOnce() -> T) -> T {
    let progress = match visible {
        true => styled(ProgressBar::new_spinner(), "{spinner} {msg} {elapsed}"),
        false => ProgressBar::hidden(),
    };
    progress.set_message(message.to_owned());
    let result = task();
    progress.finish_and_clear();
    result
}

/// A progress bar with a template of [`indicatif`] and a steady tick.
pub fn styled(progress: ProgressBar, template: &str) -> ProgressBar {
    if let Ok(style) = ProgressStyle::with_template(template) {
        progress.set_style(style);
    }
    // The thread of the ticks is of use on a terminal alone.
    if !progress.is_hidden() {
        progress.enable_steady_tick(TICK);
    }
    progress
}
