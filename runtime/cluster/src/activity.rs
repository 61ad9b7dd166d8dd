//! Activity of a process, which it reports to processes that wait for it. One that has waited for its whole timeout asks: a peer
//! that waits for a third process, or uses storage, is not the one that stalls.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// An activity of a process, as it answers one that waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activity {
    /// Computation, or anything else that waits for no process.
    Computing,
    /// Reading or writing of a checkpoint or another long file; or waiting for a process that did so this long ago.
    Storage(Duration),
    /// Waiting for the process of this rank.
    WaitingFor(u64),
}

/// Bit of the codes of [`Activity::Storage`]; the others are milliseconds.
const STORAGE: u64 = 1 << 63;

impl Activity {
    /// The code in frames.
    pub fn code(self) -> u64 {
        match self {
            Activity::Computing => 0,
            Activity::Storage(age) => STORAGE | u64::try_from(age.as_millis()).unwrap_or(u64::MAX),
            Activity::WaitingFor(rank) => rank.saturating_add(1).min(STORAGE - 1),
        }
    }

    /// The activity of a code.
    pub fn from_code(code: u64) -> Activity {
        match code {
            0 => Activity::Computing,
            code if code & STORAGE != 0 => {
                Activity::Storage(Duration::from_millis(code & !STORAGE))
            }
            code => Activity::WaitingFor(code - 1),
        }
    }
}

/// The present activity of this process.
pub(crate) struct CurrentActivity {
    /// Code of the activity, of which storage is none: a thread may write while the process computes or waits.
    code: AtomicU64,
    storage_uses: AtomicUsize,
    /// Milliseconds from `start` to the last time that the process which this one waits for, or one further on, is known to have
    /// used storage; 0 if none did.
    peer_storage_ms: AtomicU64,
    start: Instant,
}

impl CurrentActivity {
    /// A process that computes.
    pub fn new() -> CurrentActivity {
        CurrentActivity {
            code: AtomicU64::new(Activity::Computing.code()),
            storage_uses: AtomicUsize::new(0),
            peer_storage_ms: AtomicU64::new(0),
            start: Instant::now(),
        }
    }

    /// The present activity. A process that computes while it uses storage may be slow for that reason.
    pub fn get(&self) -> Activity {
        match Activity::from_code(self.code.load(Ordering::Relaxed)) {
            Activity::Computing if self.storage_uses.load(Ordering::Relaxed) > 0 => {
                Activity::Storage(Duration::ZERO)
            }
            Activity::WaitingFor(rank) => match self.peer_storage_ms.load(Ordering::Relaxed) {
                0 => Activity::WaitingFor(rank),
                ms => Activity::Storage(
                    self.start.elapsed().saturating_sub(Duration::from_millis(ms)),
                ),
            },
            activity => activity,
        }
    }

    /// Starts a wait for the process of this rank, which ends when the result is dropped.
    pub fn wait_for(&self, rank: u64) -> WaitGuard<'_> {
        self.peer_storage_ms.store(0, Ordering::Relaxed);
        let before = self.code.swap(Activity::WaitingFor(rank).code(), Ordering::Relaxed);
        WaitGuard { current: self, before }
    }

    /// Takes an answer of the process that this one waits for, so that a process which waits for this one hears of it.
    pub fn note_answer(&self, answer: Activity) {
        let ms = match answer {
            Activity::Storage(age) => {
                let ms = self.start.elapsed().saturating_sub(age).as_millis();
                u64::try_from(ms).unwrap_or(u64::MAX).max(1)
            }
            _ => 0,
        };
        self.peer_storage_ms.store(ms, Ordering::Relaxed);
    }

    /// Begins a use of storage.
    pub fn begin_storage_use(&self) {
        self.storage_uses.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends a use of storage.
    pub fn end_storage_use(&self) {
        self.storage_uses.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Returns to the activity before the wait when it is dropped.
pub(crate) struct WaitGuard<'a> {
    current: &'a CurrentActivity,
    before: u64,
}

impl Drop for WaitGuard<'_> {
    fn drop(&mut self) {
        self.current.peer_storage_ms.store(0, Ordering::Relaxed);
        self.current.code.store(self.before, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_stand_for_activities() {
        let activities = [
            Activity::Computing,
            Activity::Storage(Duration::ZERO),
            Activity::Storage(Duration::from_secs(700)),
            Activity::WaitingFor(0),
            Activity::WaitingFor(4095),
        ];
        for activity in activities {
            assert_eq!(Activity::from_code(activity.code()), activity);
        }
        assert_eq!(Activity::from_code(Activity::WaitingFor(u64::MAX).code()).code(), STORAGE - 1);
    }

    #[test]
    fn a_process_that_waits_while_it_saves_is_not_the_one_that_is_late() {
        let current = CurrentActivity::new();
        current.begin_storage_use();
        assert_eq!(current.get(), Activity::Storage(Duration::ZERO));
        let waiting = current.wait_for(3);
        assert_eq!(current.get(), Activity::WaitingFor(3));
        drop(waiting);
        assert_eq!(current.get(), Activity::Storage(Duration::ZERO));
        current.end_storage_use();
        assert_eq!(current.get(), Activity::Computing);
    }

    #[test]
    fn a_process_that_waits_for_one_that_saves_says_so() {
        let current = CurrentActivity::new();
        let waiting = current.wait_for(3);
        std::thread::sleep(Duration::from_millis(60));
        current.note_answer(Activity::Storage(Duration::from_millis(50)));
        let Activity::Storage(age) = current.get() else { panic!("{:?}", current.get()) };
        assert!(age >= Duration::from_millis(49), "{age:?}");
        current.note_answer(Activity::WaitingFor(2));
        assert_eq!(current.get(), Activity::WaitingFor(3));
        current.note_answer(Activity::Storage(Duration::ZERO));
        drop(waiting);
        assert_eq!(current.get(), Activity::Computing);
    }
}
