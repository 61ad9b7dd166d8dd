//! Transfers between stages: a send copies what it sends and goes on, a receive waits for it.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::barrier::{Abort, Aborted, pause};

/// One direction between two neighbouring stages.
pub struct Pipe {
    held: Mutex<PipeQueue>,
}

struct PipeQueue {
    /// Sent and not yet received.
    pending: VecDeque<Vec<f32>>,
    /// To be sent with.
    free: Vec<Vec<f32>>,
    /// Numbers that there is room for, in both and in what is just being filled or emptied.
    numbers: usize,
}

impl Pipe {
    /// With room for `transfers` of `numbers` each before anything is allocated.
    pub fn new(transfers: usize, numbers: usize) -> Pipe {
        let free = (0..transfers).map(|_| Vec::with_capacity(numbers)).collect();
        let pending = VecDeque::with_capacity(transfers);
        Pipe { held: Mutex::new(PipeQueue { pending, free, numbers: transfers * numbers }) }
    }

    /// Bytes of the copies it keeps.
    pub fn bytes(&self) -> u64 {
        4 * self.lock().numbers as u64
    }

    fn lock(&self) -> MutexGuard<'_, PipeQueue> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends these, one after the other.
    pub fn send<'a>(&self, operands: impl Iterator<Item = &'a [f32]>) {
        let mut buffer = self.lock().free.pop().unwrap_or_default();
        buffer.clear();
        let room = buffer.capacity();
        operands.for_each(|operand| buffer.extend_from_slice(operand));
        let mut held = self.lock();
        held.numbers += buffer.capacity() - room;
        held.pending.push_back(buffer);
    }

    /// Waits for the next transfer, and passes it to `take`.
    ///
    /// # Errors
    /// When another device failed.
    pub fn receive(&self, abort: &Abort, take: impl FnOnce(&[f32])) -> Result<(), Aborted> {
        let mut rounds = 0;
        let buffer = loop {
            if let Some(buffer) = self.lock().pending.pop_front() {
                break buffer;
            }
            if abort.raised() {
                return Err(Aborted);
            }
            pause(&mut rounds);
        };
        take(&buffer);
        self.lock().free.push(buffer);
        Ok(())
    }
}
