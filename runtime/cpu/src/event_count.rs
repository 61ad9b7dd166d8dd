//! Waiting for a change by another thread of the process.

use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Condvar, Mutex, PoisonError};

/// Polls before a thread sleeps: devices on cores of their own usually arrive at the same time. Yielding the core between further
/// polls is slower where devices share cores, since the devices that work then share them with those that poll.
const SPINS: usize = 200;

/// An event count: threads sleep until a condition holds, which others change with atomic operations or locks of their own.
///
/// *No wake-up is lost.* A thread that waits adds itself to `sleepers` and then polls. A thread that notifies has changed the
/// condition and then reads `sleepers`. Both have a sequentially consistent fence in between, so the poll sees the change, or the
/// notifier sees the sleeper. In the second case the notifier takes the lock after the sleeper: the sleeper takes the lock before
/// it adds itself, and releases it only once it sleeps on the condition variable or needs no notification. The notification
/// follows, so a sleeper receives it and polls again, under the lock that makes the change visible.
#[derive(Debug, Default)]
pub(crate) struct EventCount {
    /// Threads that sleep, or poll a last time before they do.
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    notified: Condvar,
}

impl EventCount {
    /// Wakes all waiting threads. Called after each change that can end a wait.
    pub fn notify(&self) {
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.notified.notify_all();
        }
    }

    /// Waits until `poll` returns a value: polls for some microseconds, then sleeps until a notification before each poll.
    pub fn wait_for<T>(&self, mut poll: impl FnMut() -> Option<T>) -> T {
        for _ in 0..SPINS {
            if let Some(value) = poll() {
                return value;
            }
            std::hint::spin_loop();
        }
        self.sleep_until(poll)
    }

    fn sleep_until<T>(&self, mut poll: impl FnMut() -> Option<T>) -> T {
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let value = loop {
            if let Some(value) = poll() {
                break value;
            }
            guard = self.notified.wait(guard).unwrap_or_else(PoisonError::into_inner);
        };
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
        value
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};
    use std::time::Duration;

    use super::*;

    type Wait = fn(&EventCount, &dyn Fn() -> Option<()>);

    /// Passes a turn around threads that wait for it, and returns whether it ended.
    fn turns_end(threads: usize, turns: usize, wait: Wait) -> bool {
        let (event, turn) = (Arc::new(EventCount::default()), Arc::new(AtomicUsize::new(0)));
        let (send, ended) = mpsc::channel();
        for thread in 0..threads {
            let (event, turn, send) = (event.clone(), turn.clone(), send.clone());
            std::thread::spawn(move || {
                for own in (thread..turns).step_by(threads) {
                    wait(&event, &|| (turn.load(Ordering::Acquire) == own).then_some(()));
                    turn.store(own + 1, Ordering::Release);
                    event.notify();
                }
                let _ = send.send(());
            });
        }
        (0..threads).all(|_| ended.recv_timeout(Duration::from_secs(60)).is_ok())
    }

    #[test]
    fn no_wake_up_is_lost() {
        let waits: [Wait; 2] =
            [|event, poll| event.wait_for(poll), |event, poll| event.sleep_until(poll)];
        for wait in waits {
            for (threads, turns) in [(2, 50_000), (3, 10_000), (16, 4_000)] {
                assert!(turns_end(threads, turns, wait), "{threads} threads");
            }
        }
    }
}
