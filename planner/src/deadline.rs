//! When a search must end.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// When a search must end. Clones share one deadline.
#[derive(Clone, Debug, Default)]
pub struct Deadline(Option<Arc<Limit>>);

#[derive(Debug)]
enum Limit {
    /// A duration after the beginning.
    Time { begin: Instant, limit: Duration },
    /// A number of checks, for tests that interrupt a search at any place whatever the machine's speed.
    Checks { checked: AtomicU64, checks_max: u64 },
}

impl Deadline {
    /// No deadline.
    pub fn none() -> Deadline {
        Deadline::default()
    }

    /// A deadline `limit` from now, or none.
    pub fn after(limit: Option<Duration>) -> Deadline {
        Deadline(limit.map(|limit| Arc::new(Limit::Time { begin: Instant::now(), limit })))
    }

    /// A deadline that passes once it has been checked `checks_max` times: interrupts a search at any
    /// place, whatever the machine's speed.
    pub fn after_checks(checks_max: u64) -> Deadline {
        Deadline(Some(Arc::new(Limit::Checks { checked: AtomicU64::new(0), checks_max })))
    }

    /// Whether there is a deadline at all.
    pub fn exists(&self) -> bool {
        self.0.is_some()
    }

    /// Whether the deadline has passed.
    pub fn is_over(&self) -> bool {
        self.is_past(1.0)
    }

    /// Whether half of the time has passed.
    pub fn is_half_over(&self) -> bool {
        self.is_past(0.5)
    }

    fn is_past(&self, share: f64) -> bool {
        match self.0.as_deref() {
            None => false,
            Some(Limit::Time { begin, limit }) => begin.elapsed() >= limit.mul_f64(share),
            Some(Limit::Checks { checked, checks_max }) => {
                checked.fetch_add(1, Ordering::Relaxed) as f64 >= share * *checks_max as f64
            }
        }
    }

    /// Time left, for solvers with a clock of their own; `None` where no clock decides.
    pub fn remaining(&self) -> Option<Duration> {
        match self.0.as_deref() {
            Some(Limit::Time { begin, limit }) => Some(limit.saturating_sub(begin.elapsed())),
            _ => None,
        }
    }
}
