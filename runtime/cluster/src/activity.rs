//! What a process is doing, for the processes that wait for it. One that has waited for its whole timeout asks: a peer
//! that waits for a third process, or writes a checkpoint, is not the one that stalls.

use std::sync::atomic::{AtomicU64, Ordering};

/// An activity of a process, as it answers one that waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activity {
    /// It computes, or anything else that waits for no process.
    Computing,
    /// It writes a checkpoint.
    Saving,
    /// It waits for the process of this rank.
    WaitingFor(u64),
}

impl Activity {
    /// The code in frames.
    pub fn code(self) -> u64 {
        match self {
            Activity::Computing => 0,
            Activity::Saving => 1,
            Activity::WaitingFor(rank) => rank.saturating_add(2),
        }
    }

    /// The activity of a code.
    pub fn from_code(code: u64) -> Activity {
        match code {
            0 => Activity::Computing,
            1 => Activity::Saving,
            code => Activity::WaitingFor(code - 2),
        }
    }
}

/// The present activity of this process.
#[derive(Default)]
pub(crate) struct CurrentActivity(AtomicU64);

impl CurrentActivity {
    /// The present activity.
    pub fn get(&self) -> Activity {
        Activity::from_code(self.0.load(Ordering::Relaxed))
    }

    /// Starts an activity, which ends when the result is dropped.
    pub fn start(&self, activity: Activity) -> ActivityGuard<'_> {
        let before = self.0.swap(activity.code(), Ordering::Relaxed);
        ActivityGuard { current: self, before }
    }

    /// Replaces the activity.
    pub fn set(&self, activity: Activity) {
        self.0.store(activity.code(), Ordering::Relaxed);
    }
}

/// Returns to the activity before it when it is dropped.
pub(crate) struct ActivityGuard<'a> {
    current: &'a CurrentActivity,
    before: u64,
}

impl Drop for ActivityGuard<'_> {
    fn drop(&mut self) {
        self.current.0.store(self.before, Ordering::Relaxed);
    }
}
