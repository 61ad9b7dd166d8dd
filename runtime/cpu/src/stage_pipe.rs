//! Transfers between neighbouring pipeline stages of one process. A send copies its operands and
//! returns at once; a receive waits for the copy.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use narrows_runtime::process_group::{ClusterError, PeerLink};

use crate::abort::Event;

/// A queue of transfers in one direction.
pub(crate) struct StagePipe {
    queue: Mutex<TransferQueue>,
    /// A further pending transfer.
    sent: Event,
}

struct TransferQueue {
    /// Transfers that were sent and not yet received.
    pending: VecDeque<Vec<f32>>,
    /// Buffers for further transfers.
    free: Vec<Vec<f32>>,
    /// Capacity in elements of all buffers, including those that are being filled or read.
    capacity: usize,
}

impl StagePipe {
    /// A pipe with buffers for `transfers` transfers of `elements` elements each.
    pub fn new(transfers: usize, elements: usize, sent: Event) -> StagePipe {
        let free = (0..transfers).map(|_| Vec::with_capacity(elements)).collect();
        let pending = VecDeque::with_capacity(transfers);
        let capacity = transfers * elements;
        StagePipe { queue: Mutex::new(TransferQueue { pending, free, capacity }), sent }
    }

    /// Bytes of all buffers.
    pub fn buffer_bytes(&self) -> u64 {
        4 * self.lock().capacity as u64
    }

    fn lock(&self) -> MutexGuard<'_, TransferQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends operands, one after the other, as one transfer.
    fn send(&self, operands: &[&[f32]]) {
        let mut buffer = self.lock().free.pop().unwrap_or_default();
        buffer.clear();
        let capacity = buffer.capacity();
        operands.iter().for_each(|operand| buffer.extend_from_slice(operand));
        let mut queue = self.lock();
        queue.capacity += buffer.capacity() - capacity;
        queue.pending.push_back(buffer);
        drop(queue);
        self.sent.notify();
    }

    /// Waits for the next transfer and passes its elements to `on_receive`.
    fn receive(&self, on_receive: impl FnOnce(&[f32])) -> Result<(), ClusterError> {
        let buffer = self.sent.wait_for(|| self.lock().pending.pop_front())?;
        on_receive(&buffer);
        self.lock().free.push(buffer);
        Ok(())
    }
}

/// One end of a pipe between two stages of the same process.
pub(crate) struct SharedMemoryLink {
    pub pipe: Arc<StagePipe>,
}

impl PeerLink for SharedMemoryLink {
    fn send(&self, operands: &[&[f32]]) -> Result<(), ClusterError> {
        self.pipe.send(operands);
        Ok(())
    }

    fn receive(&self, on_receive: &mut dyn FnMut(&[f32])) -> Result<(), ClusterError> {
        self.pipe.receive(on_receive)
    }
}
