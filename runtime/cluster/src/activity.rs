//! Activity of a process, which it reports to processes that wait for it. One that has waited for its whole timeout asks: a peer
//! that waits for a third process, or uses storage, is not the one that stalls.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
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
    /// The waits of its threads, of which one may communicate while another computes.
    waits: Mutex<Vec<ThreadWait>>,
    storage_uses: AtomicUsize,
}

/// A thread's wait for another process.
struct ThreadWait {
    rank: u64,
    /// The last time that the process, or one further on, is known to have used storage.
    peer_storage: Option<Instant>,
}

impl CurrentActivity {
    /// A process that computes.
    pub fn new() -> CurrentActivity {
        let waits = Mutex::new(Vec::with_capacity(THREADS));
        CurrentActivity { waits, storage_uses: AtomicUsize::new(0) }
    }

    fn waits(&self) -> MutexGuard<'_, Vec<ThreadWait>> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The present activity. A process that computes while it uses storage may be slow for that reason. While one thread waits, the
    /// process counts as waiting: its computation will soon wait for that thread.
    pub fn get(&self) -> Activity {
        let waits = self.waits();
        match waits.last() {
            None if self.storage_uses.load(Ordering::Relaxed) > 0 => {
                Activity::Storage(Duration::ZERO)
            }
            None => Activity::Computing,
            Some(last) => match waits.iter().filter_map(|wait| wait.peer_storage).max() {
                None => Activity::WaitingFor(last.rank),
                Some(time) => Activity::Storage(time.elapsed()),
            },
        }
    }

    /// Starts a wait of a thread for the process of this rank, which ends when the result is dropped.
    pub fn wait_for(&self, rank: u64) -> WaitGuard<'_> {
        self.waits().push(ThreadWait { rank, peer_storage: None });
        WaitGuard { current: self, rank }
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

/// Threads that usually wait at the same time: that of the device, and its communication thread.
const THREADS: usize = 2;

/// Ends a wait when it is dropped.
pub(crate) struct WaitGuard<'a> {
    current: &'a CurrentActivity,
    rank: u64,
}

impl WaitGuard<'_> {
    /// Takes an answer of the process that this one waits for, so that a process which waits for this one hears of it.
    pub fn note_answer(&self, answer: Activity) {
        let peer_storage = match answer {
            Activity::Storage(age) => Instant::now().checked_sub(age),
            _ => None,
        };
        let mut waits = self.current.waits();
        let of_rank = waits.iter_mut().filter(|wait| wait.rank == self.rank);
        of_rank.for_each(|wait| wait.peer_storage = peer_storage);
    }
}

impl Drop for WaitGuard<'_> {
    fn drop(&mut self) {
        let mut waits = self.current.waits();
        // Waits for one process are equal.
        if let Some(index) = waits.iter().position(|wait| wait.rank == self.rank) {
            waits.remove(index);
        }
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

    /// As a process of which one thread communicates while another computes, and then communicates too.
    #[test]
    fn waits_of_two_threads_end_in_any_order() {
        let current = CurrentActivity::new();
        let [first, second] = [3, 5].map(|rank| current.wait_for(rank));
        second.note_answer(Activity::Storage(Duration::ZERO));
        assert!(matches!(current.get(), Activity::Storage(_)));
        drop(second);
        assert_eq!(current.get(), Activity::WaitingFor(3));
        let second = current.wait_for(5);
        drop(first);
        assert_eq!(current.get(), Activity::WaitingFor(5));
        drop(second);
        assert_eq!(current.get(), Activity::Computing);
    }

    #[test]
    fn a_process_that_waits_for_one_that_saves_says_so() {
        let current = CurrentActivity::new();
        let waiting = current.wait_for(3);
        std::thread::sleep(Duration::from_millis(60));
        waiting.note_answer(Activity::Storage(Duration::from_millis(50)));
        let Activity::Storage(age) = current.get() else { panic!("{:?}", current.get()) };
        assert!(age >= Duration::from_millis(49), "{age:?}");
        waiting.note_answer(Activity::WaitingFor(2));
        assert_eq!(current.get(), Activity::WaitingFor(3));
        waiting.note_answer(Activity::Storage(Duration::ZERO));
        drop(waiting);
        assert_eq!(current.get(), Activity::Computing);
    }
}
