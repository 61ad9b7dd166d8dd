//! A GPU, and memory on it.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::sys::{CUdevice_attribute, CUdeviceptr};
use cudarc::driver::{CudaContext, CudaStream, DriverError, result};

use super::super::error::CudaError;
use super::super::libraries::CudaLibrary;
use super::super::machine;

/// A GPU that this process uses.
pub struct OpenGpu {
    /// Its number among those this process sees.
    pub ordinal: u64,
    /// Its context.
    pub context: Arc<CudaContext>,
    /// What it is called.
    pub name: String,
    /// Compute capability: (9, 0) is sm_90.
    pub capability: (u32, u32),
    /// The most dynamic shared memory that a kernel may be allowed, in bytes.
    pub shared_bytes_max: u32,
    /// Set when what was started on it may never end: then nothing is waited for, and nothing given back.
    pub lost: Arc<AtomicBool>,
}

impl OpenGpu {
    /// Opens a GPU.
    ///
    /// # Errors
    /// When the driver does not load or come up, or there is no such GPU.
    pub fn open(ordinal: u64) -> Result<OpenGpu, CudaError> {
        if !machine::loads(CudaLibrary::Driver) {
            return Err(CudaError::Absent(CudaLibrary::Driver));
        }
        let opened =
            |call: &'static str| move |error: DriverError| CudaError::driver(ordinal, call, error);
        result::init().map_err(opened("starting the driver"))?;
        let count = result::device::get_count().map_err(opened("counting GPUs"))? as u64;
        if ordinal >= count {
            return Err(CudaError::NoGpu { ordinal, count });
        }
        let context = CudaContext::new(ordinal as usize).map_err(opened("opening it"))?;
        // SAFETY: what lives on the device is ordered by this program's own events.
        unsafe { context.disable_event_tracking() };
        let name = context.name().map_err(opened("its name"))?;
        let (major, minor) = context.compute_capability().map_err(opened("its capability"))?;
        let shared = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        let shared = context.attribute(shared).map_err(opened("its shared memory"))?;
        Ok(OpenGpu {
            ordinal,
            context,
            name,
            capability: (major as u32, minor as u32),
            shared_bytes_max: shared as u32,
            lost: Arc::default(),
        })
    }

    /// Says what was asked for where the driver refuses it.
    pub fn said<T>(&self, call: &str, made: Result<T, DriverError>) -> Result<T, CudaError> {
        made.map_err(|error| CudaError::driver(self.ordinal, call, error))
    }

    /// A stream of its own; of two, the urgent one goes first where both could.
    pub fn stream(&self, urgent: bool) -> Result<Arc<CudaStream>, CudaError> {
        // Lower numbers go first; what is out of range is the nearest.
        let made = self.context.new_stream_with_priority(if urgent { -1 } else { 0 });
        self.said("a stream", made)
    }
}

/// Memory of a GPU, zeroed when it is made.
pub struct DeviceMemory {
    context: Arc<CudaContext>,
    lost: Arc<AtomicBool>,
    pointer: CUdeviceptr,
    bytes: u64,
}

impl DeviceMemory {
    /// Allocates; `what` is what messages call it.
    pub fn new(gpu: &OpenGpu, what: &'static str, bytes: u64) -> Result<DeviceMemory, CudaError> {
        gpu.said("its context", gpu.context.bind_to_thread())?;
        // Nothing is allocated for nothing, and every pointer must be one.
        let size = usize::try_from(bytes.max(1)).unwrap_or(usize::MAX);
        // SAFETY: the context is bound, and the memory is written before it is read.
        let pointer = unsafe { result::malloc_sync(size) }.map_err(|error| {
            let out = cudarc::driver::sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY;
            match (error.0 == out, gpu.context.mem_get_info()) {
                (true, Ok((free, whole))) => CudaError::Memory {
                    what,
                    wanted: bytes,
                    ordinal: gpu.ordinal,
                    free: free as u64,
                    whole: whole as u64,
                },
                _ => CudaError::driver(gpu.ordinal, what, error),
            }
        })?;
        let (context, lost) = (gpu.context.clone(), gpu.lost.clone());
        let memory = DeviceMemory { context, lost, pointer, bytes };
        gpu.said(what, memory.clear(0..bytes))?;
        Ok(memory)
    }

    /// The address of a byte of it.
    pub fn at(&self, offset: u64) -> CUdeviceptr {
        self.pointer + offset
    }

    /// Bytes of it.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    fn check(&self, range: &Range<u64>, length: usize) {
        let inside = range.start <= range.end && range.end <= self.bytes;
        assert!(inside && range.end - range.start == length as u64, "a range that is not there");
    }

    /// Copies out, when all streams have come to an end.
    pub fn read(&self, range: Range<u64>, into: &mut [u8]) -> Result<(), DriverError> {
        self.check(&range, into.len());
        if into.is_empty() {
            return Ok(());
        }
        self.context.bind_to_thread()?;
        self.context.synchronize()?;
        // SAFETY: the range is inside, and nothing runs.
        unsafe { result::memcpy_dtoh_sync(into, self.at(range.start)) }
    }

    /// Copies in, when all streams have come to an end.
    pub fn write(&self, range: Range<u64>, from: &[u8]) -> Result<(), DriverError> {
        self.check(&range, from.len());
        if from.is_empty() {
            return Ok(());
        }
        self.context.bind_to_thread()?;
        self.context.synchronize()?;
        // SAFETY: as above.
        unsafe { result::memcpy_htod_sync(self.at(range.start), from) }
    }

    /// Zeroes a part, when all streams have come to an end.
    pub fn clear(&self, range: Range<u64>) -> Result<(), DriverError> {
        self.check(&range, (range.end - range.start) as usize);
        self.context.bind_to_thread()?;
        self.context.synchronize()?;
        let length = (range.end - range.start) as usize;
        if length == 0 {
            return Ok(());
        }
        // SAFETY: as above.
        unsafe { result::memset_d8_sync(self.at(range.start), 0, length) }?;
        // Setting does not wait, and our streams would not wait for it.
        self.context.synchronize()
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.lost.load(Ordering::Relaxed) {
            return;
        }
        // What still runs may use it; after an error of the device nothing can be done.
        let _ = self.context.synchronize();
        // SAFETY: it was allocated there, and nothing runs.
        let _ = unsafe { result::free_sync(self.pointer) };
    }
}

/// Memory of the processor that a GPU copies to and from while the program goes on.
pub struct PinnedMemory {
    context: Arc<CudaContext>,
    lost: Arc<AtomicBool>,
    pointer: *mut c_void,
    bytes: usize,
}

// SAFETY: it is plain memory, and whoever holds it holds it alone.
unsafe impl Send for PinnedMemory {}

impl PinnedMemory {
    /// Allocates zeroed memory.
    pub fn new(gpu: &OpenGpu, bytes: usize) -> Result<PinnedMemory, CudaError> {
        gpu.said("its context", gpu.context.bind_to_thread())?;
        // SAFETY: the context is bound.
        let pointer = unsafe { result::malloc_host(bytes.max(1), 0) };
        let pointer = gpu.said("memory for copies", pointer)?;
        // SAFETY: it is as long.
        unsafe { pointer.cast::<u8>().write_bytes(0, bytes.max(1)) };
        let (context, lost) = (gpu.context.clone(), gpu.lost.clone());
        Ok(PinnedMemory { context, lost, pointer, bytes })
    }

    /// What is in it. No copy may be under way.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: it is as long, and initialised.
        unsafe { std::slice::from_raw_parts(self.pointer.cast(), self.bytes) }
    }

    /// The same, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and it is held alone.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.cast(), self.bytes) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if self.lost.load(Ordering::Relaxed) {
            return;
        }
        let _ = self.context.synchronize();
        // SAFETY: it was allocated there, and nothing runs.
        let _ = unsafe { result::free_host(self.pointer) };
    }
}
