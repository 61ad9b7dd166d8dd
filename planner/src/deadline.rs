//! Deadlines of searches.

use std::sync::Arc;
#[cfg(test)]
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The time at which a search must end, if any. Clones share one deadline.
#[derive(Clone, Debug, Default)]
pub struct Deadline(Option<Arc<Limit>>);

#[derive(Debug)]
enum Limit {
    Time {
        begin: Instant,
        limit: Duration,
    },
    /// A number of checks: interrupts a search at the same place on every machine.
    #[cfg(test)]
    Checks {
        checked: AtomicU64,
        checks_max: u64,
    },
}

impl Deadline {
    /// No deadline.
    pub fn none() -> Deadline {
        Deadline::default()
    }

    /// A deadline `limit` from now, or none.
    pub(crate) fn after(limit: Option<Duration>) -> Deadline {
        Deadline(limit.map(|limit| Arc::new(Limit::Time { begin: Instant::now(), limit })))
    }

    /// A deadline that passes after `checks_max` checks.
    #[cfg(test)]
    pub(crate) fn after_checks(checks_max: u64) -> Deadline {
        Deadline(Some(Arc::new(Limit::Checks { checked: AtomicU64::new(0), checks_max })))
    }

    /// Whether there is a deadline at all.
    pub(crate) fn exists(&self) -> bool {
        self.0.is_some()
    }

    /// Whether the deadline has passed.
    pub(crate) fn is_over(&self) -> bool {
        self.is_past(1.0)
    }

    /// Whether half of the time has passed.
    pub(crate) fn is_half_over(&self) -> bool {
        self.is_past(0.5)
    }

    fn is_past(&self, share: f64) -> bool {
        match self.0.as_deref() {
            None => false,
            Some(Limit::Time { begin, limit }) => begin.elapsed() >= limit.mul_f64(share),
            #[cfg(test)]
            Some(Limit::Checks { checked, checks_max }) => {
                checked.fetch_add(1, Ordering::Relaxed) as f64 >= share * *checks_max as f64
            }
        }
    }

    /// Time left, for solvers with a clock of their own; `None` without a time limit.
    pub(crate) fn remaining(&self) -> Option<Duration> {
        match self.0.as_deref() {
            Some(Limit::Time { begin, limit }) => Some(limit.saturating_sub(begin.elapsed())),
            _ => None,
        }
    }
}
