//! Transfers over the borders between stages, each kind on a stream of its own.

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream, DriverError, result};

use super::GraphExecutor;
use crate::device::gpu::{DeviceMemory, OpenGpu};
use crate::error::CudaError;
use crate::tape::P2pOp;
use narrows_runtime::RunError;

/// One kind of transfer over one border.
pub(super) struct StageLink {
    stream: Arc<CudaStream>,
    /// What is sent is sent from here; what is received is received where it belongs.
    pub copy: Option<DeviceMemory>,
    /// The computation has come to the transfer.
    reached: CudaEvent,
    /// The transfer is over.
    pub over: CudaEvent,
}

impl StageLink {
    /// For what is received, or for what is sent, of which the largest has so many bytes.
    pub fn new(gpu: &OpenGpu, sent_bytes: Option<u64>) -> Result<StageLink, CudaError> {
        let copy = |bytes| DeviceMemory::new(gpu, "copies of what is sent", bytes);
        let event = || gpu.said("an event", gpu.context.new_event(None));
        let copy = sent_bytes.map(copy).transpose()?;
        Ok(StageLink { stream: gpu.stream(true)?, copy, reached: event()?, over: event()? })
    }
}

impl GraphExecutor {
    /// Puts a transfer on its stream, once the computation has come to it.
    pub(super) fn transfer(&mut self, transfer: &P2pOp) -> Result<(), RunError> {
        let compute = self.compute().clone();
        let GraphExecutor { gpu, stage, borders, laps, .. } = self;
        let border = borders[transfer.way()][usize::from(transfer.sends)].as_ref();
        let (Some(border), Some((cluster, communicators))) = (border, &stage.others) else {
            let (call, said) = (transfer.name().into(), "there is no other device".into());
            return Err(CudaError::Nccl { call, said, recent: String::new() }.into());
        };
        let said = |made: Result<(), DriverError>| gpu.said(transfer.name(), made);
        if let Some(laps) = laps {
            said(laps.begin((None, transfer.part), None, &compute))?;
        }
        let arena = &stage.memories.arena;
        let mut addresses = vec![];
        match &border.copy {
            None => addresses.extend(transfer.operands.iter().map(|range| arena.at(range.start))),
            Some(copy) => {
                // The transfer before it may still be sent from there.
                said(compute.wait(&border.over))?;
                let mut offset = 0;
                for range in &transfer.operands {
                    let length = range.end - range.start;
                    let (to, from) = (copy.at(offset), arena.at(range.start));
                    // SAFETY: the copy has room for the largest transfer.
                    said(unsafe {
                        result::memcpy_dtod_async(to, from, length as usize, compute.cu_stream())
                    })?;
                    addresses.push(to);
                    offset += length;
                }
            }
        }
        said(border.reached.record(&compute))?;
        said(border.stream.wait(&border.reached))?;
        communicators.transfer(transfer, addresses.into_iter(), &border.stream, &**cluster)?;
        said(border.over.record(&border.stream))?;
        if !transfer.sends {
            said(compute.wait(&border.over))?;
        }
        if let Some(laps) = laps {
            said(laps.end(&compute))?;
        }
        Ok(())
    }
}
