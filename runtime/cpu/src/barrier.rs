//! Where the devices of a group wait for each other, and learn that one of them failed.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// A device of the run failed: nobody will come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aborted;

/// Set once by the first device that fails, seen by all that wait.
#[derive(Debug, Default)]
pub struct Abort(AtomicBool);

impl Abort {
    /// Tells all that wait.
    pub fn raise(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether some device failed.
    pub fn raised(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// A barrier that devices meet again and again.
#[derive(Debug)]
pub struct Barrier {
    members: usize,
    arrived: AtomicUsize,
    generation: AtomicUsize,
}

impl Barrier {
    /// For so many members.
    pub fn new(members: usize) -> Barrier {
        Barrier { members, arrived: AtomicUsize::new(0), generation: AtomicUsize::new(0) }
    }

    /// Waits for all members. What each wrote before is seen by all after.
    ///
    /// # Errors
    /// When a device failed; the barrier is of no use then.
    pub fn wait(&self, abort: &Abort) -> Result<(), Aborted> {
        let generation = self.generation.load(Ordering::Acquire);
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.members {
            self.arrived.store(0, Ordering::Release);
            self.generation.store(generation.wrapping_add(1), Ordering::Release);
            return Ok(());
        }
        let mut rounds = 0;
        while self.generation.load(Ordering::Acquire) == generation {
            if abort.raised() {
                return Err(Aborted);
            }
            pause(&mut rounds);
        }
        Ok(())
    }
}

/// Waits a little, and longer the longer it has been: devices mostly come at once, but there may
/// be more of them than cores.
pub fn pause(rounds: &mut u32) {
    *rounds += 1;
    match *rounds {
        0..200 => std::hint::spin_loop(),
        200..4000 => std::thread::yield_now(),
        _ => std::thread::sleep(Duration::from_micros(50)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_come_before_any_goes() {
        let (barrier, abort) = (Barrier::new(4), Abort::default());
        let count = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for round in 1..=200 {
                        count.fetch_add(1, Ordering::SeqCst);
                        barrier.wait(&abort).unwrap();
                        assert!(count.load(Ordering::SeqCst) >= 4 * round);
                        barrier.wait(&abort).unwrap();
                    }
                });
            }
        });
    }

    #[test]
    fn who_waits_learns_of_a_failure() {
        let (barrier, abort) = (Barrier::new(2), Abort::default());
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| barrier.wait(&abort));
            abort.raise();
            assert_eq!(waits.join().unwrap(), Err(Aborted));
        });
    }
}
