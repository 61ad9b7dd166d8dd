//! Deadlines of searches.

use std::sync::Arc;
#[cfg(test)]
use std::sync::atomic::AtomicU64;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The time at which a search must end, if any, and a flag that ends it earlier. Clones share one deadline.
#[derive(Clone, Debug, Default)]
pub struct Deadline {
    limit: Option<Arc<Limit>>,
    stop: Option<Arc<AtomicBool>>,
}

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
        let limit = limit.map(|limit| Arc::new(Limit::Time { begin: Instant::now(), limit }));
        Deadline { limit, stop: None }
    }

    /// The deadline, which passes earlier if `stop` is set.
    pub(crate) fn or_stopped(self, stop: Arc<AtomicBool>) -> Deadline {
        Deadline { stop: Some(stop), ..self }
    }

    /// A deadline that passes after `checks_max` checks.
    #[cfg(test)]
    pub(crate) fn after_checks(checks_max: u64) -> Deadline {
        let limit = Arc::new(Limit::Checks { checked: AtomicU64::new(0), checks_max });
        Deadline { limit: Some(limit), stop: None }
    }

    /// Whether there is a limit, so that a first plan is needed early.
    pub(crate) fn exists(&self) -> bool {
        self.limit.is_some()
    }

    /// Whether the flag that ends the search is set.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.as_ref().is_some_and(|stop| stop.load(Ordering::Relaxed))
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
        match self.limit.as_deref() {
            _ if self.is_stopped() => true,
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
        match self.limit.as_deref() {
            _ if self.is_stopped() => Some(Duration::ZERO),
            Some(Limit::Time { begin, limit }) => Some(limit.saturating_sub(begin.elapsed())),
            _ => None,
        }
    }
}
