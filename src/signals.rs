//! Ctrl-C and SIGTERM.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::errors::ExitStatus;
use crate::output;

/// A flag that the first signal sets, after which the command ends in order. A second signal ends the program. Where no
/// handler can be installed, `warning` is printed.
pub fn stop_on_signals(warning: &str) -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    let handler = move || {
        if flag.swap(true, Ordering::Relaxed) {
            // Files that are being written have temporary names, so folders stay valid.
            std::process::exit(ExitStatus::Stopped.code().into());
        }
    };
    if let Err(error) = ctrlc::set_handler(handler) {
        output::warn(&format!("{warning}: {error}"));
    }
    stop
}
