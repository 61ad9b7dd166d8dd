//! A reusable barrier for the devices of a group.

use std::sync::atomic::{AtomicUsize, Ordering};

use narrows_runtime::process_group::ClusterError;

use crate::abort::Event;

/// A barrier that a fixed number of devices pass again and again.
#[derive(Debug)]
pub(crate) struct Barrier {
    members: usize,
    arrived: AtomicUsize,
    /// Number of times that all members have arrived.
    generation: AtomicUsize,
    /// An increment of the generation.
    passed: Event,
}

impl Barrier {
    pub fn new(members: usize, passed: Event) -> Barrier {
        let (arrived, generation) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Barrier { members, arrived, generation, passed }
    }

    /// Waits for all members. Writes of each member before the barrier are visible to all after it.
    ///
    /// # Errors
    /// When a device failed. The barrier cannot be used again.
    pub fn wait(&self) -> Result<(), ClusterError> {
        let generation = self.generation.load(Ordering::Acquire);
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.members {
            self.arrived.store(0, Ordering::Release);
            self.generation.store(generation.wrapping_add(1), Ordering::Release);
            self.passed.notify();
            return Ok(());
        }
        self.passed
            .wait_for(|| (self.generation.load(Ordering::Acquire) != generation).then_some(()))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use narrows_runtime::process_group::ClusterFault;

    use super::*;
    use crate::abort::AbortFlag;

    #[test]
    fn no_member_passes_before_all_have_arrived() {
        let barrier = Barrier::new(4, Arc::<AbortFlag>::default().event());
        let count = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for round in 1..=200 {
                        count.fetch_add(1, Ordering::SeqCst);
                        barrier.wait().unwrap();
                        assert!(count.load(Ordering::SeqCst) >= 4 * round);
                        barrier.wait().unwrap();
                    }
                });
            }
        });
    }

    #[test]
    fn a_raised_flag_ends_the_waiting() {
        let abort = Arc::<AbortFlag>::default();
        let barrier = Barrier::new(2, abort.event());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| barrier.wait());
            abort.raise();
            assert_eq!(waiting.join().unwrap(), Err(ClusterFault::DeviceFailed.into()));
        });
    }
}
