//! Waiting for other devices of a process, which ends when one of them fails.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use narrows_runtime::RunError;
use narrows_runtime::process_group::{ClusterError, ClusterFault};

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

/// A flag that the first failing device of a process raises, and that all waiting devices poll.
#[derive(Debug, Default)]
pub(crate) struct AbortFlag(AtomicBool);

impl AbortFlag {
    /// Ends the waiting of all devices.
    pub fn raise(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Polls until `poll` returns a value.
    ///
    /// # Errors
    /// [`ClusterFault::DeviceFailed`] when the flag is raised.
    pub fn wait_for<T>(&self, mut poll: impl FnMut() -> Option<T>) -> Result<T, ClusterError> {
        let mut rounds = 0;
        loop {
            if let Some(value) = poll() {
                return Ok(value);
            }
            if self.0.load(Ordering::Acquire) {
                return Err(ClusterFault::DeviceFailed.into());
            }
            back_off(&mut rounds);
        }
    }
}

/// Spins, then yields, then sleeps: devices usually arrive at the same time, but there can be more
/// devices than cores.
fn back_off(rounds: &mut u32) {
    *rounds += 1;
    match *rounds {
        0..200 => std::hint::spin_loop(),
        200..4000 => std::thread::yield_now(),
        _ => std::thread::sleep(Duration::from_micros(50)),
    }
}
