//! The tokens of a step on their way to a GPU.
//!
//! All that a device sees of a step is copied there once, when the step begins; before each turn its
//! microbatch's ids are copied to where the program has them.

use cudarc::driver::{CudaStream, DriverError, result};
use narrows_plan::program::{Program, Region};

use super::super::error::CudaError;
use super::gpu::{DeviceMemory, OpenGpu, PinnedMemory};
use narrows_runtime::session::{MeshCoordinates, StepRequest, TokenRows};

/// Bytes of a token id.
const ID_BYTES: u64 = 4;

/// Ids of all microbatches.
pub struct TokenInputs {
    host: PinnedMemory,
    device: DeviceMemory,
    buffers: Vec<InputBuffer>,
}

/// A buffer that ids go to, and where those of the first microbatch are.
struct InputBuffer {
    /// Its place in the program's list.
    number: usize,
    /// In the arena, in bytes.
    offset: u64,
    /// Bytes of a microbatch.
    bytes: u64,
    /// In the copies of all microbatches, in bytes.
    first: u64,
}

impl TokenInputs {
    /// For the buffers of a device's stage.
    pub fn new(
        gpu: &OpenGpu,
        program: &Program,
        at: MeshCoordinates,
    ) -> Result<TokenInputs, CudaError> {
        let stage = &program.stages[at.stage as usize];
        let context = &program.context;
        let microbatches = context.workload.microbatches(&context.mesh);
        let mut all = 0;
        let mut buffers = vec![];
        for (number, buffer) in stage.buffers.iter().enumerate() {
            if buffer.region != Region::Input || !["tokens", "targets"].contains(&&*buffer.name) {
                continue;
            }
            let bytes = ID_BYTES * buffer.extent.rows;
            buffers.push(InputBuffer { number, offset: buffer.offset, bytes, first: all });
            all += bytes * microbatches;
        }
        let host = PinnedMemory::new(gpu, all as usize)?;
        let device = DeviceMemory::new(gpu, "a step's tokens", all)?;
        Ok(TokenInputs { host, device, buffers })
    }

    /// Bytes on the GPU.
    pub fn bytes(&self) -> u64 {
        self.device.bytes()
    }

    /// Begins to copy the ids of a step. The step before must be over.
    pub fn load(
        &mut self,
        step: &StepRequest,
        program: &Program,
        at: MeshCoordinates,
        stream: &CudaStream,
    ) -> Result<(), DriverError> {
        let context = &program.context;
        let stage = &program.stages[at.stage as usize];
        let host: &mut [u32] = bytemuck::cast_slice_mut(self.host.bytes_mut());
        for InputBuffer { number, bytes, first, .. } in &self.buffers {
            let buffer = &stage.buffers[*number];
            let Some(ids) = step.input_ids(buffer) else { continue };
            let tokens = TokenRows::of_device(context, &at, buffer.extent.rows);
            let mut to = (first / ID_BYTES) as usize;
            debug_assert_eq!(tokens.sequences * tokens.positions, (bytes / ID_BYTES) as usize);
            for microbatch in 0..context.workload.microbatches(&context.mesh) {
                for row in tokens.id_ranges(context, &at, microbatch) {
                    let count = row.len();
                    host[to..to + count].copy_from_slice(&ids[row]);
                    to += count;
                }
            }
        }
        if self.buffers.is_empty() {
            return Ok(());
        }
        // SAFETY: the memory is pinned, and nothing else is written to it before the step is over.
        unsafe {
            result::memcpy_htod_async(self.device.at(0), self.host.bytes(), stream.cu_stream())
        }
    }

    /// Puts a microbatch's ids where the program has them.
    pub fn place(
        &self,
        microbatch: u64,
        arena: &DeviceMemory,
        stream: &CudaStream,
    ) -> Result<(), DriverError> {
        for InputBuffer { offset, bytes, first, .. } in &self.buffers {
            let from = self.device.at(first + microbatch * bytes);
            // SAFETY: both ranges are inside.
            unsafe {
                result::memcpy_dtod_async(
                    arena.at(*offset),
                    from,
                    *bytes as usize,
                    stream.cu_stream(),
                )
            }?;
        }
        Ok(())
    }
}
