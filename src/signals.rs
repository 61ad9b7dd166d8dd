//! Signals: those that ask a command to stop, and those that must not end it.

use std::io;
#[cfg(unix)]
use std::io::Read as _;
#[cfg(unix)]
use std::os::unix::net::UnixStream;
use std::sync::Arc;
#[cfg(unix)]
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::{AtomicBool, Ordering};
#[cfg(unix)]
use std::time::Duration;

use signal_hook::consts::signal;
use signal_hook::flag;
#[cfg(unix)]
use signal_hook::low_level::pipe;

use crate::captured_output;
use crate::cluster::with_label;
use crate::errors::{ExitStatus, Failure, Problem};
use crate::output;
use crate::resource_limits::{self, CpuLimit};

/// A signal that asks for an orderly end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopSignal {
    number: i32,
    name: &'static str,
    sender: Sender,
}

/// Usual sender of a signal, which decides what a further signal means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sender {
    /// A person, a scheduler or a closed terminal. A second, later signal of such a sender ends the program at once.
    Ending,
    /// A scheduler that leaves time for a checkpoint, as Slurm does with `--signal USR1@120`. A further signal is either the same
    /// request, or the first one to end.
    Saving,
    /// The kernel, every second after the CPU time of the process is used up.
    CpuLimit,
}

const fn stop_signal(number: i32, name: &'static str, sender: Sender) -> StopSignal {
    StopSignal { number, name, sender }
}

#[cfg(unix)]
const STOP_SIGNALS: &[StopSignal] = &[
    stop_signal(signal::SIGINT, "SIGINT", Sender::Ending),
    stop_signal(signal::SIGTERM, "SIGTERM", Sender::Ending),
    stop_signal(signal::SIGHUP, "SIGHUP", Sender::Ending),
    stop_signal(signal::SIGUSR1, "SIGUSR1", Sender::Saving),
    stop_signal(signal::SIGUSR2, "SIGUSR2", Sender::Saving),
    stop_signal(signal::SIGALRM, "SIGALRM", Sender::Saving),
    stop_signal(signal::SIGXCPU, "SIGXCPU", Sender::CpuLimit),
];
#[cfg(not(unix))]
const STOP_SIGNALS: &[StopSignal] = &[
    stop_signal(signal::SIGINT, "SIGINT", Sender::Ending),
    stop_signal(signal::SIGTERM, "SIGTERM", Sender::Ending),
];

/// The stop signals that this process was not started with as ignored: `nohup` ignores that of a closed terminal, and shells
/// without job control that of Ctrl-C for background jobs. Ignored signals stay ignored.
fn heeded_signals() -> impl Iterator<Item = StopSignal> {
    STOP_SIGNALS.iter().copied().filter(|signal| !is_ignored(signal.number))
}

#[cfg(unix)]
impl StopSignal {
    /// Exit status of a command that the signal stops.
    fn status(self) -> ExitStatus {
        match self.sender {
            Sender::Ending | Sender::Saving => ExitStatus::Stopped,
            Sender::CpuLimit => ExitStatus::Environment,
        }
    }
}

/// Signals within this time of the first one are the same request: GNU `timeout` signals a program and then its process group.
#[cfg(unix)]
const SAME_REQUEST: Duration = Duration::from_millis(250);

/// A flag that the first signal sets, after which the command ends in order. A second signal ends the program. Where no
/// handler can be installed, `warning` is printed.
pub fn stop_on_signals(warning: &str) -> Arc<AtomicBool> {
    StopRequests::register(warning, Arc::default(), None).stop
}

/// Runs a task with a flag that the first signal sets, after which the task ends in order. A second signal ends the program, as
/// does the first one after the task. Where no handler can be installed, `warning` is printed.
pub fn stop_in_order_during<T>(warning: &str, task: impl FnOnce(&Arc<AtomicBool>) -> T) -> T {
    let ends_at_once = Arc::default();
    let requests = StopRequests::register(warning, Arc::clone(&ends_at_once), None);
    let result = task(&requests.stop);
    // Signals of one request may arrive while its answer is printed.
    ends_at_once.store(!requests.are_pending(), Ordering::Relaxed);
    result
}

/// Requests of signals to stop a run in order.
pub struct StopRequests {
    stop: Arc<AtomicBool>,
    cpu_limit_reached: Arc<AtomicBool>,
    cpu_limit: Option<CpuLimit>,
}

impl StopRequests {
    /// `cpu_limit` was read before the first signal: the kernel raises it by a second with every one.
    fn register(
        warning: &str,
        ends_at_once: Arc<AtomicBool>,
        cpu_limit: Option<CpuLimit>,
    ) -> StopRequests {
        let cpu_limit_reached = Arc::default();
        if let Some(stop) = captured_output::stop_flag() {
            return StopRequests { stop, cpu_limit_reached, cpu_limit };
        }
        let stop = Arc::new(AtomicBool::new(false));
        let is_ending = Arc::new(AtomicBool::new(false));
        let register = |later: &LaterFlag, StopSignal { number, sender, .. }| -> io::Result<()> {
            let status = ExitStatus::Stopped.code().into();
            // Handlers run in this order. Files that are being written have temporary names, so folders stay valid.
            flag::register_conditional_shutdown(number, status, Arc::clone(&ends_at_once))?;
            match sender {
                Sender::Ending => {
                    flag::register_conditional_shutdown(number, status, Arc::clone(&is_ending))?;
                    later.set_by(number)?;
                }
                Sender::Saving => {}
                Sender::CpuLimit => {
                    flag::register(number, Arc::clone(&cpu_limit_reached))?;
                }
            }
            flag::register(number, Arc::clone(&stop)).map(drop)
        };
        let registered = LaterFlag::new(Arc::clone(&is_ending))
            .and_then(|later| heeded_signals().try_for_each(|signal| register(&later, signal)));
        if let Err(error) = registered {
            output::warn(&format!("{warning}: {error}"));
        }
        StopRequests { stop, cpu_limit_reached, cpu_limit }
    }

    /// Whether a signal asks the run to stop.
    pub fn are_pending(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// The failure of a run whose CPU time is used up.
    pub fn fault(&self) -> Option<Failure> {
        let is_reached = self.cpu_limit_reached.load(Ordering::Relaxed);
        is_reached.then(|| cpu_limit_failure(self.cpu_limit))
    }
}

/// A flag that signals set, on Unix [`SAME_REQUEST`] after the first one.
struct LaterFlag {
    #[cfg(unix)]
    sent: UnixStream,
    #[cfg(not(unix))]
    flag: Arc<AtomicBool>,
}

#[cfg(unix)]
impl LaterFlag {
    fn new(flag: Arc<AtomicBool>) -> io::Result<LaterFlag> {
        let (mut received, sent) = UnixStream::pair()?;
        let wait = move || {
            if received.read_exact(&mut [0]).is_ok() {
                std::thread::sleep(SAME_REQUEST);
                flag.store(true, Ordering::Relaxed);
            }
        };
        std::thread::Builder::new().name("further signals".into()).spawn(wait)?;
        Ok(LaterFlag { sent })
    }

    fn set_by(&self, signal: i32) -> io::Result<()> {
        pipe::register(signal, self.sent.try_clone()?).map(drop)
    }
}

#[cfg(not(unix))]
impl LaterFlag {
    fn new(flag: Arc<AtomicBool>) -> io::Result<LaterFlag> {
        Ok(LaterFlag { flag })
    }

    fn set_by(&self, signal: i32) -> io::Result<()> {
        flag::register(signal, Arc::clone(&self.flag)).map(drop)
    }
}

fn cpu_limit_failure(limit: Option<CpuLimit>) -> Failure {
    let message = match limit {
        Some(CpuLimit { seconds, reserved_s: 0 }) => {
            format!("the limit of {seconds} s (`ulimit -t`) is used up: SIGXCPU")
        }
        Some(CpuLimit { seconds, reserved_s }) => format!(
            "the limit of {seconds} s (`ulimit -t`) is used up, but for {reserved_s} s to save the run: SIGXCPU"
        ),
        None => "the limit of this process is used up: SIGXCPU".into(),
    };
    let problem = Problem::new("CPU time", message);
    let problem = problem.hint("a higher limit; each start of the program has the whole limit");
    Failure { status: ExitStatus::Environment, problems: vec![problem] }
}

/// Signals that end a run at once until it can stop in order.
pub struct StopSignals {
    requests: StopRequests,
    ends_at_once: Arc<AtomicBool>,
}

impl StopSignals {
    /// Installs the handlers, as [`stop_on_signals`]. `report` runs before the program ends at once, while nothing is printed. A
    /// second signal does not wait for it. The message begins with `label`, the name of one of several processes.
    pub fn install(
        warning: &str,
        label: Option<String>,
        report: impl Fn() + Send + 'static,
    ) -> StopSignals {
        let ends_at_once = Arc::new(AtomicBool::new(true));
        let ends = Arc::clone(&ends_at_once);
        let cpu_limit = match captured_output::stop_flag() {
            None => resource_limits::reserve_cpu_time(),
            Some(_) => resource_limits::cpu_limit(),
        };
        // Before the other handlers, so that every signal that is handled at all wakes the thread.
        let watched = watch_signals(move |StopSignal { name, sender, .. }| {
            ends.load(Ordering::Relaxed).then(|| {
                report();
                match sender {
                    Sender::CpuLimit => {
                        let failure = cpu_limit_failure(cpu_limit);
                        label
                            .iter()
                            .fold(failure, |failure, label| with_label(failure, label))
                            .to_string()
                    }
                    Sender::Ending | Sender::Saving => {
                        let process =
                            label.as_ref().map_or(String::new(), |label| format!("{label}: "));
                        format!("{process}stopped by {name} before the first step\n")
                    }
                }
            })
        });
        if let Err(error) = watched {
            output::warn(&format!("{warning}: {error}"));
        }
        // Where a thread watches, the handlers themselves end the program on the second signal only.
        let in_handler = if cfg!(unix) { Arc::default() } else { Arc::clone(&ends_at_once) };
        let requests = StopRequests::register(warning, in_handler, cpu_limit);
        StopSignals { requests, ends_at_once }
    }

    /// The requests of signals from now on, which end nothing at once.
    pub fn stop_in_order(self) -> StopRequests {
        self.ends_at_once.store(false, Ordering::Relaxed);
        self.requests
    }
}

/// Signals that end a command at once, except within tasks that end in order.
pub struct EndingSignals {
    requests: StopRequests,
    ends_at_once: Arc<AtomicBool>,
}

impl EndingSignals {
    /// Installs the handlers. `text` is printed when a signal ends the command; where none can be installed, `warning` is.
    pub fn install(warning: &str, text: String) -> EndingSignals {
        let ends_at_once = Arc::new(AtomicBool::new(true));
        let ends = Arc::clone(&ends_at_once);
        // Before the other handlers, as those of a run.
        let watched = watch_signals(move |_| ends.load(Ordering::Relaxed).then(|| text.clone()));
        if let Err(error) = watched {
            output::warn(&format!("{warning}: {error}"));
        }
        let in_handler = if cfg!(unix) { Arc::default() } else { Arc::clone(&ends_at_once) };
        let requests = StopRequests::register(warning, in_handler, resource_limits::cpu_limit());
        EndingSignals { requests, ends_at_once }
    }

    /// The requests of signals, which tasks that end in order heed.
    pub fn requests(&self) -> &StopRequests {
        &self.requests
    }

    /// Runs a task that no first signal ends: it heeds the [requests](EndingSignals::requests) itself.
    pub fn in_order<T>(&self, task: impl FnOnce() -> T) -> T {
        self.ends_at_once.store(false, Ordering::Relaxed);
        let result = task();
        // Signals of one request may arrive while its answer is printed.
        self.ends_at_once.store(!self.requests.are_pending(), Ordering::Relaxed);
        result
    }
}

/// Ends the program on the first signal that asks for it, also while it waits for input. A thread runs `clean_up` first, while
/// nothing is printed; the program continues where that returns `None`, because nothing was left to stop. Otherwise the
/// sentence is printed. Signals that are ignored stay ignored. Where no handler can be installed, `warning` is printed.
pub fn end_on_signals(warning: &str, clean_up: impl Fn() -> Option<String> + Send + 'static) {
    let clean_up = move |_| clean_up().map(|sentence| format!("{sentence}\n"));
    if let Err(error) = watch_signals(clean_up) {
        output::warn(&format!("{warning}: {error}"));
    }
}

/// Runs `clean_up` on each signal. Where that returns a text, prints it and ends the program. A command within another program
/// leaves signals to that one.
#[cfg(unix)]
fn watch_signals(
    clean_up: impl Fn(StopSignal) -> Option<String> + Send + 'static,
) -> io::Result<()> {
    if captured_output::stop_flag().is_some() {
        return Ok(());
    }
    let (mut received, sent) = UnixStream::pair()?;
    let last = Arc::new(AtomicUsize::new(0));
    let last_received = Arc::clone(&last);
    let watch = move || {
        while received.read_exact(&mut [0]).is_ok() {
            let signal = STOP_SIGNALS[last_received.load(Ordering::Relaxed)];
            // Meanwhile the command can neither report that its file is gone nor end.
            let held = io::stderr().lock();
            if let Some(text) = clean_up(signal) {
                output::eprint(&text);
                std::process::exit(signal.status().code().into());
            }
            drop(held);
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(watch)?;
    heeded_signals().try_for_each(|signal| {
        let index = STOP_SIGNALS.iter().position(|other| *other == signal).unwrap_or_default();
        // In this order, so that the thread reads the signal that has woken it, or a later one.
        flag::register_usize(signal.number, Arc::clone(&last), index)?;
        pipe::register(signal.number, sent.try_clone()?).map(drop)
    })
}

#[cfg(not(unix))]
fn watch_signals(
    _clean_up: impl Fn(StopSignal) -> Option<String> + Send + 'static,
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
