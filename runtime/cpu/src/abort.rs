//! Waiting for other devices of a process, which ends when one of them fails.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use narrows_runtime::RunError;
use narrows_runtime::process_group::{ClusterError, ClusterFault};

use crate::event_count::EventCount;

/// Reason why a device stopped before the end of a step.
#[derive(Debug)]
pub(crate) enum StopReason {
    /// Another device failed first.
    Aborted,
    /// This device failed.
    Failed(Box<RunError>),
}

impl From<ClusterError> for StopReason {
    fn from(error: ClusterError) -> StopReason {
        match error.fault {
            ClusterFault::DeviceFailed => StopReason::Aborted,
            _ => StopReason::Failed(Box::new(RunError::Cluster(error))),
        }
    }
}

/// A flag that the first failing device of a process raises, and that ends the waiting of all devices.
#[derive(Debug, Default)]
pub(crate) struct AbortFlag {
    is_raised: AtomicBool,
    events: Mutex<Vec<Arc<EventCount>>>,
}

impl AbortFlag {
    /// Ends the waiting of all devices.
    pub fn raise(&self) {
        self.is_raised.store(true, Ordering::Release);
        self.events().iter().for_each(|event| event.notify());
    }

    /// An event on which devices wait until the flag is raised.
    pub fn event(self: &Arc<Self>) -> Event {
        let count = Arc::<EventCount>::default();
        self.events().push(count.clone());
        Event { count, abort: self.clone() }
    }

    fn events(&self) -> MutexGuard<'_, Vec<Arc<EventCount>>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A change by a device that other devices of the process wait for.
#[derive(Debug)]
pub(crate) struct Event {
    count: Arc<EventCount>,
    abort: Arc<AbortFlag>,
}

impl Event {
    /// Wakes all waiting devices. Called after each change that can end a wait.
    pub fn notify(&self) {
        self.count.notify();
    }

    /// Waits until `poll` returns a value, which [notified](Event::notify) changes decide.
    ///
    /// # Errors
    /// [`ClusterFault::DeviceFailed`] when the abort flag is raised.
    pub fn wait_for<T>(&self, mut poll: impl FnMut() -> Option<T>) -> Result<T, ClusterError> {
        self.count.wait_for(|| match poll() {
            Some(value) => Some(Ok(value)),
            None if self.abort.is_raised.load(Ordering::Acquire) => {
                Some(Err(ClusterFault::DeviceFailed.into()))
            }
            None => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_raised_flag_ends_all_waits() {
        const DEVICES: u32 = 16;
        // The flag is raised before, while and after devices begin to wait.
        for round in 0..200 {
            let abort = Arc::<AbortFlag>::default();
            let (send, ended) = mpsc::channel();
            for pair in 0..DEVICES / 2 {
                let event = Arc::new(abort.event());
                for _ in 0..2 {
                    let (event, send) = (event.clone(), send.clone());
                    std::thread::spawn(move || send.send((pair, event.wait_for(|| None::<()>))));
                }
            }
            std::thread::sleep(Duration::from_micros(10 * (round % 50)));
            abort.raise();
            for _ in 0..DEVICES {
                let (pair, result) = ended.recv_timeout(Duration::from_secs(60)).expect("an end");
                assert_eq!(result, Err(ClusterFault::DeviceFailed.into()), "pair {pair}");
            }
        }
    }
}
