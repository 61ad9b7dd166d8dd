//! Activity of a process, which it reports to processes that wait for it. One that has waited for its whole timeout asks: a peer
//! that waits for a third process, or writes a checkpoint, is not the one that stalls.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

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
pub(crate) struct CurrentActivity {
    /// Code of the activity, of which saving is none: a thread may save while the process computes or waits.
    code: AtomicU64,
    is_saving: AtomicBool,
}

impl CurrentActivity {
    /// The present activity. A process that computes while it saves may be slow for that reason.
    pub fn get(&self) -> Activity {
        match Activity::from_code(self.code.load(Ordering::Relaxed)) {
            Activity::Computing if self.is_saving.load(Ordering::Relaxed) => Activity::Saving,
            activity => activity,
        }
    }

    /// Starts an activity, which ends when the result is dropped.
    pub fn start(&self, activity: Activity) -> ActivityGuard<'_> {
        let before = self.code.swap(activity.code(), Ordering::Relaxed);
        ActivityGuard { current: self, before }
    }

    /// Says whether a checkpoint is being written.
    pub fn set_saving(&self, is_saving: bool) {
        self.is_saving.store(is_saving, Ordering::Relaxed);
    }
}

/// Returns to the activity before it when it is dropped.
pub(crate) struct ActivityGuard<'a> {
    current: &'a CurrentActivity,
    before: u64,
}

impl Drop for ActivityGuard<'_> {
    fn drop(&mut self) {
        self.current.code.store(self.before, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_waits_while_it_saves_is_not_the_one_that_is_late() {
        let current = CurrentActivity::default();
        current.set_saving(true);
        assert_eq!(current.get(), Activity::Saving);
        let waiting = current.start(Activity::WaitingFor(3));
        assert_eq!(current.get(), Activity::WaitingFor(3));
        drop(waiting);
        assert_eq!(current.get(), Activity::Saving);
        current.set_saving(false);
        assert_eq!(current.get(), Activity::Computing);
    }
}
