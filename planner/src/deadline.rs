//! When a search must end.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// When a search must end. Its copies are one deadline.
#[derive(Clone, Debug, Default)]
pub struct Deadline(Option<Arc<Limit>>);

#[derive(Debug)]
enum Limit {
    /// So long after the beginning.
    Time { begin: Instant, limit: Duration },
    /// Once it was asked so often.
    Questions { asked: AtomicU64, most: u64 },
}

impl Deadline {
    /// There is none.
    pub fn none() -> Deadline {
        Deadline::default()
    }

    /// So long from now; without a limit, none.
    pub fn after(limit: Option<Duration>) -> Deadline {
        Deadline(limit.map(|limit| Arc::new(Limit::Time { begin: Instant::now(), limit })))
    }

    /// Over once it was asked so often whether it is: interrupts a search at any place, whatever the
    /// machine's speed.
    pub fn after_questions(most: u64) -> Deadline {
        Deadline(Some(Arc::new(Limit::Questions { asked: AtomicU64::new(0), most })))
    }

    /// Whether there is one at all.
    pub fn exists(&self) -> bool {
        self.0.is_some()
    }

    /// Whether there is no time left.
    pub fn is_over(&self) -> bool {
        self.is_past(1.0)
    }

    /// Whether half of the time is over.
    pub fn is_half_over(&self) -> bool {
        self.is_past(0.5)
    }

    fn is_past(&self, share: f64) -> bool {
        match self.0.as_deref() {
            None => false,
            Some(Limit::Time { begin, limit }) => begin.elapsed() >= limit.mul_f64(share),
            Some(Limit::Questions { asked, most }) => {
                asked.fetch_add(1, Ordering::Relaxed) as f64 >= share * *most as f64
            }
        }
    }

    /// The time that is left, for solvers with a clock of their own; `None` where no clock decides.
    pub fn left(&self) -> Option<Duration> {
        match self.0.as_deref() {
            Some(Limit::Time { begin, limit }) => Some(limit.saturating_sub(begin.elapsed())),
            _ => None,
        }
    }
}
