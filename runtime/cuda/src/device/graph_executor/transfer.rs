//! Transfers to and from neighbouring stages, each kind on a stream of its own.

use cudarc::driver::{DriverError, result};
use narrows_runtime::RunError;

use super::executor::GraphExecutor;
use crate::device::timers::TimedInstruction;
use crate::error::CudaError;
use crate::schedule::{P2pKind, P2pOp};

impl GraphExecutor {
    /// Enqueues a transfer on its stream, after the computation before it.
    pub(super) fn enqueue_transfer(&mut self, transfer: &P2pOp) -> Result<(), RunError> {
        let compute = self.compute_stream().clone();
        let GraphExecutor { gpu, resources, p2p_streams, timers, .. } = self;
        let link = p2p_streams[transfer.direction.index()][transfer.kind.index()].as_ref();
        let (Some(link), Some((processes, communicators))) = (link, &resources.peers) else {
            let (call, message) = (transfer.name().into(), "there is no other device".into());
            let recent_activity = vec![];
            return Err(CudaError::Nccl { call, message, recent_activity }.into());
        };
        let check = |result: Result<(), DriverError>| gpu.check(transfer.name(), result);
        if let Some(timers) = timers {
            let category = transfer.category;
            let instruction = TimedInstruction { node: None, category, begins_instr: true };
            check(timers.begin(instruction, &compute))?;
        }
        let arena = &resources.buffers.arena;
        let mut addresses = vec![];
        match &link.send_buffer {
            None => {
                addresses.extend(transfer.operands.iter().map(|range| arena.address(range.start)))
            }
            Some(buffer) => {
                // The previous transfer may still be sending from the buffer.
                check(compute.wait(&link.done))?;
                let mut offset = 0;
                for range in &transfer.operands {
                    let length = range.end - range.start;
                    let (to, from) = (buffer.address(offset), arena.address(range.start));
                    // SAFETY: the buffer has room for the largest transfer.
                    check(unsafe {
                        result::memcpy_dtod_async(to, from, length as usize, compute.cu_stream())
                    })?;
                    addresses.push(to);
                    offset += length;
                }
            }
        }
        check(link.ready.record(&compute))?;
        check(link.stream.wait(&link.ready))?;
        let addresses = addresses.into_iter();
        communicators.enqueue_transfer(transfer, addresses, &link.stream, &**processes)?;
        check(link.done.record(&link.stream))?;
        if transfer.kind == P2pKind::Recv {
            check(compute.wait(&link.done))?;
        }
        if let Some(timers) = timers {
            check(timers.end(&compute))?;
        }
        Ok(())
    }
}
