//! The communication thread of a device, which executes the collectives that a program allows beside computation.
//!
//! The thread of the device hands collectives over one by one, and the communication thread executes them in that order, as long as the
//! engine lives. Which collectives are handed over, and when the device waits for them, is decided in `execute/step.rs`.
//!
//! *Order.* The order in which a device executes its instructions without this thread is correct for all devices together. With it, a
//! collective still begins after all that precede it on its communicator, and every wait is for collectives that come earlier
//! in that order. So devices wait for each other in no circle, and collectives of a communicator have the same order on all members.
//!
//! *Failure.* A collective that fails ends the thread's work: those after it are dropped. The next wait of the device returns
//! the error. The flag of the process is raised, so that its other devices stop.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use narrows_plan::DeviceGroup;
use narrows_plan::program::{MicrobatchPass, StageProgram};
use narrows_runtime::RunError;

use crate::abort::{AbortFlag, StopReason};
use crate::device_clock::JobSpan;

/// The communication thread of a device, as the thread of the device uses it.
pub(crate) struct CommunicationThread {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// Collectives handed over so far.
    handed_over: u64,
    /// Of each gather bucket, `handed_over` after its last gather.
    gathers: Vec<u64>,
}

/// A collective, by its place in the program.
#[derive(Clone, Copy)]
pub(crate) struct Job {
    pub pass: MicrobatchPass,
    pub slot: u64,
    /// Index in the list of the pass.
    pub index: usize,
    pub group: DeviceGroup,
    /// Index of its span, if spans are recorded.
    pub span: Option<usize>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// Collectives that have not ended; the first is being executed.
    pending: VecDeque<Job>,
    /// Collectives that have ended.
    ended: u64,
    failure: Option<Failure>,
    /// Recorded spans since they were last taken.
    spans: Vec<JobSpan>,
    /// Whether the thread ends once nothing is pending.
    is_closing: bool,
}

/// Reason why the thread stopped working.
#[derive(Clone)]
enum Failure {
    Aborted,
    Failed(Box<RunError>),
}

impl CommunicationThread {
    /// Starts the thread of a device of a stage, which executes each collective with `run`.
    ///
    /// # Errors
    /// When the system starts no more threads.
    pub fn start(
        stage: &StageProgram,
        abort: Arc<AbortFlag>,
        run: impl FnMut(Job) -> Result<(), StopReason> + Send + 'static,
    ) -> std::io::Result<CommunicationThread> {
        // An instruction is pending once at most: its next execution waits for it.
        let pending = VecDeque::with_capacity(stage.all_instructions().count());
        let gathers = vec![0; stage.gather_buckets.len()];
        let (ended, failure, spans, is_closing) = (0, None, vec![], false);
        let state = Mutex::new(State { pending, ended, failure, spans, is_closing });
        let shared = Arc::new(Shared { state, changed: Condvar::new() });
        let of_thread = shared.clone();
        let thread = std::thread::Builder::new()
            .name("collectives".into())
            .spawn(move || run_jobs(&of_thread, &abort, run))?;
        Ok(CommunicationThread { shared, thread: Some(thread), handed_over: 0, gathers })
    }

    /// Hands a collective over.
    ///
    /// # Safety
    /// Until a [wait](CommunicationThread::wait) for it returns, no instruction is executed that the program does not allow
    /// beside it, and nothing else accesses its operands: see "Two threads" in `arena.rs`.
    pub unsafe fn hand_over(&mut self, job: Job) {
        self.shared.lock().pending.push_back(job);
        self.shared.changed.notify_all();
        self.handed_over += 1;
    }

    /// Notes that all gathers of a bucket have been handed over.
    pub fn end_gather_bucket(&mut self, bucket: usize) {
        self.gathers[bucket] = self.handed_over;
    }

    /// Whether a collective of a device group is pending.
    pub fn uses(&self, group: &DeviceGroup) -> bool {
        self.shared.lock().pending.iter().any(|job| job.group == *group)
    }

    /// Whether nothing is pending.
    pub fn is_idle(&self) -> bool {
        self.shared.lock().pending.is_empty()
    }

    /// Whether the device has gather buckets.
    pub fn has_gathers(&self) -> bool {
        !self.gathers.is_empty()
    }

    /// Waits for all collectives.
    ///
    /// # Errors
    /// When one of them has failed.
    pub fn wait(&self) -> Result<(), StopReason> {
        self.wait_for(self.handed_over)
    }

    /// Waits for the gathers of a bucket.
    ///
    /// # Errors
    /// When a collective has failed.
    pub fn wait_for_gathers(&self, bucket: usize) -> Result<(), StopReason> {
        self.wait_for(self.gathers[bucket])
    }

    /// Waits until this many collectives have ended.
    fn wait_for(&self, count: u64) -> Result<(), StopReason> {
        let mut state = self.shared.lock();
        while state.ended < count && state.failure.is_none() {
            state = self.shared.wait(state);
        }
        match &state.failure {
            None => Ok(()),
            Some(Failure::Aborted) => Err(StopReason::Aborted),
            Some(Failure::Failed(error)) => Err(StopReason::Failed(error.clone())),
        }
    }

    /// Allocates memory for the spans of so many collectives, so that steps do not: how many of a step are handed over differs
    /// from step to step.
    pub fn reserve_spans(&self, collectives: usize) {
        self.shared.lock().spans.reserve(collectives);
    }

    /// Passes each recorded span to `on_span` once.
    pub fn take_spans(&self, on_span: impl FnMut(JobSpan)) {
        self.shared.lock().spans.drain(..).for_each(on_span);
    }

    /// Number of collectives that were handed over.
    #[cfg(test)]
    pub fn handed_over(&self) -> u64 {
        self.handed_over
    }

    /// Ends the thread once it has executed what is pending.
    pub fn close(&self) {
        self.shared.lock().is_closing = true;
        self.shared.changed.notify_all();
    }

    /// Waits for the end of a [closed](CommunicationThread::close) thread.
    pub fn join(&mut self) {
        // A panic of the thread was caught.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }
}

/// Executes collectives until the thread is closed.
fn run_jobs(
    shared: &Shared,
    abort: &AbortFlag,
    mut run: impl FnMut(Job) -> Result<(), StopReason>,
) {
    let mut state = shared.lock();
    loop {
        let Some(job) = state.pending.front().copied() else {
            if state.is_closing {
                return;
            }
            state = shared.wait(state);
            continue;
        };
        let mut failure = state.failure.clone();
        drop(state);
        let start = Instant::now();
        if failure.is_none() {
            let result = catch_unwind(AssertUnwindSafe(|| run(job)));
            failure = match result {
                Ok(Ok(())) => None,
                Ok(Err(StopReason::Aborted)) => Some(Failure::Aborted),
                Ok(Err(StopReason::Failed(error))) => Some(Failure::Failed(error)),
                Err(_) => Some(Failure::Failed(Box::new(RunError::DeviceThreadPanicked))),
            };
        }
        if failure.is_some() {
            abort.raise();
        }
        state = shared.lock();
        state.failure = failure;
        state.pending.pop_front();
        state.ended += 1;
        state.spans.extend(job.span.map(|span| (span, [start, Instant::now()])));
        shared.changed.notify_all();
    }
}
