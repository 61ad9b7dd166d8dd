//! The stream and buffer of one kind of transfer to or from a neighbouring stage.

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream};

use crate::device::gpu::{DeviceMemory, OpenGpu};
use crate::error::CudaError;

/// Resources for sends, or for receives, in one direction.
pub(super) struct P2pStream {
    /// Stream of the transfers.
    pub stream: Arc<CudaStream>,
    /// Copy of the operands of a send. Receives write to the arena directly.
    pub send_buffer: Option<DeviceMemory>,
    /// Recorded when the computation reaches the transfer.
    pub ready: CudaEvent,
    /// Recorded when the transfer has ended.
    pub done: CudaEvent,
}

impl P2pStream {
    /// For sends of at most `send_bytes`, or for receives.
    pub fn new(gpu: &OpenGpu, send_bytes: Option<u64>) -> Result<P2pStream, CudaError> {
        let buffer = |bytes| DeviceMemory::new(gpu, "the send buffer", bytes);
        let event = || gpu.check("an event", gpu.context.new_event(None));
        let send_buffer = send_bytes.map(buffer).transpose()?;
        Ok(P2pStream { stream: gpu.stream(true)?, send_buffer, ready: event()?, done: event()? })
    }
}
