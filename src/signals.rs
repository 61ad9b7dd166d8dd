//! Signals: those that ask a command to stop, and those that must not end it.

use std::io;
#[cfg(unix)]
use std::io::Read as _;
#[cfg(unix)]
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::signal;
use signal_hook::flag;
#[cfg(unix)]
use signal_hook::low_level::pipe;

use crate::captured_output;
use crate::errors::ExitStatus;
use crate::output;

/// Signals that ask for an orderly end: Ctrl-C, a scheduler, and a closed terminal.
#[cfg(unix)]
const STOP_SIGNALS: [i32; 3] = [signal::SIGINT, signal::SIGTERM, signal::SIGHUP];
#[cfg(not(unix))]
const STOP_SIGNALS: [i32; 2] = [signal::SIGINT, signal::SIGTERM];

/// A flag that the first signal sets, after which the command ends in order. A second signal ends the program. Signals
/// that the program was started with as ignored stay ignored: `nohup` ignores that of a closed terminal, and shells
/// without job control that of Ctrl-C for background jobs. Where no handler can be installed, `warning` is printed.
pub fn stop_on_signals(warning: &str) -> Arc<AtomicBool> {
    StopSignals::register(warning, false).stop
}

/// Signals that end the program at once, with the exit code of one that is stopped, until it can stop in order.
pub struct StopSignals {
    stop: Arc<AtomicBool>,
    ends_at_once: Arc<AtomicBool>,
}

impl StopSignals {
    /// Installs the handlers, as [`stop_on_signals`].
    pub fn install(warning: &str) -> StopSignals {
        StopSignals::register(warning, true)
    }

    /// As [`install`](StopSignals::install), but `report` runs before the program ends at once, while nothing is printed. A
    /// second signal does not wait for it.
    pub fn install_with_report(warning: &str, report: impl Fn() + Send + 'static) -> StopSignals {
        // The handlers themselves end the program on the second signal only.
        let StopSignals { stop, .. } = StopSignals::register(warning, false);
        let ends_at_once = Arc::new(AtomicBool::new(true));
        let ends = Arc::clone(&ends_at_once);
        let watched = watch_signals(move || {
            ends.load(Ordering::Relaxed).then(|| {
                report();
                None
            })
        });
        if let Err(error) = watched {
            output::warn(&format!("{warning}: {error}"));
        }
        StopSignals { stop, ends_at_once }
    }

    fn register(warning: &str, ends_at_once: bool) -> StopSignals {
        if let Some(stop) = captured_output::stop_flag() {
            return StopSignals { stop, ends_at_once: Arc::default() };
        }
        let stop = Arc::new(AtomicBool::new(false));
        let ends_at_once = Arc::new(AtomicBool::new(ends_at_once));
        let status = ExitStatus::Stopped.code().into();
        let register = |signal| -> io::Result<()> {
            // Handlers run in this order. Files that are being written have temporary names, so folders stay valid.
            flag::register_conditional_shutdown(signal, status, Arc::clone(&ends_at_once))?;
            flag::register_conditional_shutdown(signal, status, Arc::clone(&stop))?;
            flag::register(signal, Arc::clone(&stop)).map(drop)
        };
        let mut signals = STOP_SIGNALS.into_iter().filter(|signal| !is_ignored(*signal));
        if let Err(error) = signals.try_for_each(register) {
            output::warn(&format!("{warning}: {error}"));
        }
        StopSignals { stop, ends_at_once }
    }

    /// The flag that the first signal sets from now on.
    pub fn stop_in_order(self) -> Arc<AtomicBool> {
        self.ends_at_once.store(false, Ordering::Relaxed);
        self.stop
    }
}

/// Ends the program with [`ExitStatus::Stopped`] on the first signal that asks for it, also while it waits for input. A
/// thread runs `clean_up` first, while nothing is printed; the program continues where that returns `None`, because
/// nothing was left to stop. Otherwise the sentence is printed. Signals that are ignored stay ignored. Where no handler can
/// be installed, `warning` is printed.
pub fn end_on_signals(warning: &str, clean_up: impl Fn() -> Option<String> + Send + 'static) {
    if let Err(error) = watch_signals(move || clean_up().map(Some)) {
        output::warn(&format!("{warning}: {error}"));
    }
}

/// Runs `clean_up` on each signal, and ends the program where it returns something: a sentence to print, or none.
#[cfg(unix)]
fn watch_signals(clean_up: impl Fn() -> Option<Option<String>> + Send + 'static) -> io::Result<()> {
    let (mut received, sent) = UnixStream::pair()?;
    let watch = move || {
        while received.read_exact(&mut [0]).is_ok() {
            // Meanwhile the command can neither report that its file is gone nor end.
            let held = io::stderr().lock();
            if let Some(sentence) = clean_up() {
                if let Some(sentence) = sentence {
                    output::eprint(&format!("{sentence}\n"));
                }
                std::process::exit(ExitStatus::Stopped.code().into());
            }
            drop(held);
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(watch)?;
    let mut signals = STOP_SIGNALS.into_iter().filter(|signal| !is_ignored(*signal));
    signals.try_for_each(|signal| pipe::register(signal, sent.try_clone()?).map(drop))
}

#[cfg(not(unix))]
fn watch_signals(
    _clean_up: impl Fn() -> Option<Option<String>> + Send + 'static,
) -> io::Result<()> {
    Ok(())
}

/// Turns the signal of a file that exceeds the size limit of the process into an error of the write. Its default action
/// ends the process without a message.
pub fn catch_file_size_limit() {
    #[cfg(unix)]
    if let Err(error) = flag::register(signal::SIGXFSZ, Arc::default()) {
        output::warn(&format!("a file beyond the size limit will end the program: {error}"));
    }
}

/// Whether the parent of this process made it ignore a signal.
#[cfg(unix)]
#[allow(unsafe_code)]
fn is_ignored(signal: i32) -> bool {
    let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: without a new action, the call only writes the present one, a plain struct for which zeros are valid.
    let action = unsafe {
        libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr());
        action.assume_init()
    };
    action.sa_sigaction == libc::SIG_IGN
}

#[cfg(not(unix))]
fn is_ignored(_signal: i32) -> bool {
    false
}
