//! Locks of caches.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The value behind a lock. A panic elsewhere cannot leave a map half-changed, so poisoning is ignored.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
