//! Transfer of a step's token ids to a GPU.
//!
//! The ids of all microbatches of a device are uploaded once, when the step begins. Before each pass, the ids of its
//! microbatch are copied to the program's buffers.

use cudarc::driver::{CudaStream, DriverError, result};
use narrows_plan::program::{BufferId, Program};

use super::gpu::{DeviceMemory, OpenGpu, PinnedMemory};
use crate::error::CudaError;
use narrows_runtime::session::{MeshCoordinates, StepRequest, TokenRows};

/// Size of a token id.
const ID_BYTES: u64 = 4;

/// Token ids of all microbatches of a step, on the host and on the GPU.
pub(crate) struct TokenInputs {
    host: PinnedMemory,
    device: DeviceMemory,
    buffers: Vec<InputBuffer>,
}

/// A buffer of the program that receives token ids.
struct InputBuffer {
    id: BufferId,
    /// Offset in the arena, in bytes.
    offset: u64,
    /// The microbatch that it is for, counted from the first of a pass.
    microbatch: u64,
    /// Bytes per microbatch.
    bytes: u64,
    /// Offset of the first pass in the staging memory, in bytes.
    staging_offset: u64,
}

impl TokenInputs {
    /// Allocates staging memory for the token buffers of a stage.
    pub fn new(
        gpu: &OpenGpu,
        program: &Program,
        coordinates: MeshCoordinates,
    ) -> Result<TokenInputs, CudaError> {
        let stage = &program.stages[coordinates.stage as usize];
        let context = &program.context;
        let mut total = 0;
        let mut buffers = vec![];
        for (id, microbatch) in stage.inputs() {
            let buffer = stage.buffer(id);
            let bytes = ID_BYTES * buffer.extent.rows;
            let (offset, staging_offset) = (buffer.offset, total);
            buffers.push(InputBuffer { id, offset, microbatch, bytes, staging_offset });
            total += bytes * context.passes();
        }
        let host = PinnedMemory::new(gpu, total as usize)?;
        let device = DeviceMemory::new(gpu, "the token ids of a step", total)?;
        Ok(TokenInputs { host, device, buffers })
    }

    /// Size of the staging memory on the GPU.
    pub fn bytes(&self) -> u64 {
        self.device.bytes()
    }

    /// Enqueues the upload of a step's ids. The previous step must have ended.
    pub fn upload(
        &mut self,
        step: &StepRequest,
        program: &Program,
        coordinates: MeshCoordinates,
        stream: &CudaStream,
    ) -> Result<(), DriverError> {
        let context = &program.context;
        let stage = &program.stages[coordinates.stage as usize];
        let host: &mut [u32] = bytemuck::cast_slice_mut(self.host.bytes_mut());
        for InputBuffer { id, microbatch, bytes, staging_offset, .. } in &self.buffers {
            let buffer = stage.buffer(*id);
            let Some(ids) = step.input_ids(buffer) else { continue };
            let tokens = TokenRows::of_device(context, &coordinates, buffer.extent.rows);
            let mut to = (staging_offset / ID_BYTES) as usize;
            debug_assert_eq!(
                tokens.sequences * tokens.positions.count,
                (bytes / ID_BYTES) as usize
            );
            for pass in 0..context.passes() {
                let microbatch = pass * context.pass_microbatches() + microbatch;
                for row in tokens.id_ranges(context, &coordinates, microbatch) {
                    let count = row.len();
                    host[to..to + count].copy_from_slice(&ids[row]);
                    to += count;
                }
            }
        }
        if self.buffers.is_empty() {
            return Ok(());
        }
        // SAFETY: the host memory is pinned, and not written before the step has ended.
        unsafe {
            result::memcpy_htod_async(self.device.address(0), self.host.bytes(), stream.cu_stream())
        }
    }

    /// Enqueues the copy of the ids of a pass, by its microbatch or pair of them, to the program's buffers.
    pub fn copy_microbatch(
        &self,
        microbatch: u64,
        arena: &DeviceMemory,
        stream: &CudaStream,
    ) -> Result<(), DriverError> {
        for InputBuffer { offset, bytes, staging_offset, .. } in &self.buffers {
            let from = self.device.address(staging_offset + microbatch * bytes);
            // SAFETY: both ranges are in bounds.
            unsafe {
                result::memcpy_dtod_async(
                    arena.address(*offset),
                    from,
                    *bytes as usize,
                    stream.cu_stream(),
                )
            }?;
        }
        Ok(())
    }
}
