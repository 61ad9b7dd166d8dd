//! A GPU, its memory, and pinned host memory.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::sys::{CUdevice_attribute, CUdeviceptr};
use cudarc::driver::{CudaContext, CudaStream, DriverError, result};
use half::bf16;
use narrows_plan::Bytes;
use narrows_plan::random::SplitMix64;

use crate::discovery;
use crate::error::CudaError;
use crate::libraries::CudaLibrary;

/// Pseudo-random numbers after which they repeat: 1 MiB of them.
const RANDOM_NUMBERS: usize = 1 << 19;

/// A GPU with a context.
pub(crate) struct OpenGpu {
    /// Index among the GPUs that the process sees.
    pub ordinal: u64,
    /// Primary context.
    pub context: Arc<CudaContext>,
    /// Name that the driver reports.
    pub name: String,
    /// Compute capability: (9, 0) is sm_90.
    pub capability: (u32, u32),
    /// Maximum dynamic shared memory per block that a kernel can opt in to, in bytes.
    pub shared_bytes_max: u32,
    /// Number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// Set when work on the GPU may never end: then nothing is waited for and no memory is freed.
    pub abandoned: Arc<AtomicBool>,
}

impl OpenGpu {
    /// Opens a GPU.
    ///
    /// # Errors
    /// When the driver does not load or initialise, or the GPU does not exist.
    pub fn open(ordinal: u64) -> Result<OpenGpu, CudaError> {
        if !discovery::library_loads(CudaLibrary::Driver) {
            return Err(CudaError::LibraryMissing(CudaLibrary::Driver));
        }
        let driver_error =
            |call: &'static str| move |error: DriverError| CudaError::driver(ordinal, call, error);
        result::init().map_err(driver_error("initialising the driver"))?;
        let count = result::device::get_count().map_err(driver_error("counting GPUs"))? as u64;
        if ordinal >= count {
            return Err(CudaError::NoGpu { ordinal, count });
        }
        let context =
            CudaContext::new(ordinal as usize).map_err(driver_error("creating a context"))?;
        // SAFETY: this program orders all accesses with its own events.
        unsafe { context.disable_event_tracking() };
        let name = context.name().map_err(driver_error("its name"))?;
        let (major, minor) =
            context.compute_capability().map_err(driver_error("its compute capability"))?;
        use CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as SHARED_BYTES_MAX,
            CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as MULTIPROCESSORS,
        };
        let attribute = |attribute, what| context.attribute(attribute).map_err(driver_error(what));
        let shared = attribute(SHARED_BYTES_MAX, "its shared memory")?;
        let multiprocessors = attribute(MULTIPROCESSORS, "its number of multiprocessors")?;
        Ok(OpenGpu {
            ordinal,
            context,
            name,
            capability: (major as u32, minor as u32),
            shared_bytes_max: shared as u32,
            multiprocessors: multiprocessors as u32,
            abandoned: Arc::default(),
        })
    }

    /// Converts an error of the driver in the operation `call`.
    pub fn check<T>(&self, call: &str, result: Result<T, DriverError>) -> Result<T, CudaError> {
        result.map_err(|error| CudaError::driver(self.ordinal, call, error))
    }

    /// Creates a stream, with a higher priority than others if `high_priority`.
    pub fn stream(&self, high_priority: bool) -> Result<Arc<CudaStream>, CudaError> {
        // Lower values are higher priorities; the driver clamps them to its range.
        let stream = self.context.new_stream_with_priority(if high_priority { -1 } else { 0 });
        self.check("a stream", stream)
    }
}

/// Memory of a GPU.
pub(crate) struct DeviceMemory {
    context: Arc<CudaContext>,
    abandoned: Arc<AtomicBool>,
    pointer: CUdeviceptr,
    bytes: u64,
}

impl DeviceMemory {
    /// Allocates memory and zeroes it; messages name its `purpose`.
    pub fn new(
        gpu: &OpenGpu,
        purpose: &'static str,
        bytes: u64,
    ) -> Result<DeviceMemory, CudaError> {
        let memory = DeviceMemory::uninitialized(gpu, purpose, bytes)?;
        gpu.check(purpose, memory.zero(0..bytes))?;
        Ok(memory)
    }

    /// Allocates memory whose contents are undefined; messages name its `purpose`.
    pub fn uninitialized(
        gpu: &OpenGpu,
        purpose: &'static str,
        bytes: u64,
    ) -> Result<DeviceMemory, CudaError> {
        gpu.check("its context", gpu.context.bind_to_thread())?;
        // An allocation of 0 bytes would have no valid pointer.
        let size = usize::try_from(bytes.max(1)).unwrap_or(usize::MAX);
        // SAFETY: the context is bound.
        let pointer = unsafe { result::malloc_sync(size) }.map_err(|error| {
            let out_of_memory = cudarc::driver::sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY;
            match (error.0 == out_of_memory, gpu.context.mem_get_info()) {
                (true, Ok((free, whole))) => CudaError::OutOfMemory {
                    purpose,
                    requested: Bytes(bytes),
                    ordinal: gpu.ordinal,
                    free: Bytes(free as u64),
                    total: Bytes(whole as u64),
                },
                _ => CudaError::driver(gpu.ordinal, purpose, error),
            }
        })?;
        let (context, lost) = (gpu.context.clone(), gpu.abandoned.clone());
        Ok(DeviceMemory { context, abandoned: lost, pointer, bytes })
    }

    /// Address of the byte at an offset.
    pub fn address(&self, offset: u64) -> CUdeviceptr {
        self.pointer + offset
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    fn assert_range(&self, range: &Range<u64>, length: usize) {
        let inside = range.start <= range.end && range.end <= self.bytes;
        assert!(
            inside && range.end - range.start == length as u64,
            "the range {range:?} is not {length} bytes within {}",
            self.bytes
        );
    }

    /// Copies a range to the host after all streams have finished.
    pub fn read(&self, range: Range<u64>, into: &mut [u8]) -> Result<(), DriverError> {
        self.assert_range(&range, into.len());
        if into.is_empty() {
            return Ok(());
        }
        self.context.bind_to_thread()?;
        self.context.synchronize()?;
        // SAFETY: the range is in bounds, and nothing runs.
        unsafe { result::memcpy_dtoh_sync(into, self.address(range.start)) }
    }

    /// Copies a range from the host after all streams have finished.
    pub fn write(&self, range: Range<u64>, from: &[u8]) -> Result<(), DriverError> {
        self.assert_range(&range, from.len());
        if from.is_empty() {
            return Ok(());
        }
        self.context.bind_to_thread()?;
        self.context.synchronize()?;
        // SAFETY: as above.
        unsafe { result::memcpy_htod_sync(self.address(range.start), from) }
    }

    /// Zeroes a range after all streams have finished.
    pub fn zero(&self, range: Range<u64>) -> Result<(), DriverError> {
        self.assert_range(&range, (range.end - range.start) as usize);
        self.context.bind_to_thread()?;
        self.context.synchronize()?;
        let length = (range.end - range.start) as usize;
        if length == 0 {
            return Ok(());
        }
        // SAFETY: as above.
        unsafe { result::memset_d8_sync(self.address(range.start), 0, length) }?;
        // cuMemset is asynchronous, and non-blocking streams do not wait for it.
        self.context.synchronize()
    }
}

impl DeviceMemory {
    /// Fills the memory with pseudo-random numbers that are between −1 and 1 both as bf16 and as f32, after all streams
    /// have finished.
    pub fn fill_pseudorandom(&self) -> Result<(), DriverError> {
        let mut random = SplitMix64::new(1);
        let mut number = || bf16::from_f64(2.0 * random.uniform() - 1.0).to_bits();
        let numbers: Vec<u16> = (0..RANDOM_NUMBERS).map(|_| number()).collect();
        let pattern: &[u8] = bytemuck::cast_slice(&numbers);
        let mut filled = self.bytes.min(pattern.len() as u64);
        self.write(0..filled, &pattern[..filled as usize])?;
        while filled < self.bytes {
            let piece = filled.min(self.bytes - filled);
            // SAFETY: both ranges are in bounds and do not overlap, and nothing else runs.
            unsafe {
                result::memcpy_dtod_sync(self.address(filled), self.address(0), piece as usize)
            }?;
            filled += piece;
        }
        // Copies within the device are asynchronous, and non-blocking streams do not wait for them.
        self.context.synchronize()
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.abandoned.load(Ordering::Relaxed) {
            return;
        }
        // Running work may use the memory. An error of the device is ignored: nothing can be done about it.
        let _ = self.context.synchronize();
        // SAFETY: the memory was allocated in `new`, and nothing runs.
        let _ = unsafe { result::free_sync(self.pointer) };
    }
}

/// Page-locked host memory, for asynchronous copies.
pub(crate) struct PinnedMemory {
    context: Arc<CudaContext>,
    abandoned: Arc<AtomicBool>,
    pointer: *mut c_void,
    bytes: usize,
}

// SAFETY: this is plain memory with a unique owner.
unsafe impl Send for PinnedMemory {}

impl PinnedMemory {
    /// Allocates zeroed memory.
    pub fn new(gpu: &OpenGpu, bytes: usize) -> Result<PinnedMemory, CudaError> {
        gpu.check("its context", gpu.context.bind_to_thread())?;
        // SAFETY: the context is bound.
        let pointer = unsafe { result::malloc_host(bytes.max(1), 0) };
        let pointer = gpu.check("pinned host memory", pointer)?;
        // SAFETY: the allocation has this size.
        unsafe { pointer.cast::<u8>().write_bytes(0, bytes.max(1)) };
        let (context, lost) = (gpu.context.clone(), gpu.abandoned.clone());
        Ok(PinnedMemory { context, abandoned: lost, pointer, bytes })
    }

    /// Contents. No copy may be in flight.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the allocation has this size and is initialised.
        unsafe { std::slice::from_raw_parts(self.pointer.cast(), self.bytes) }
    }

    /// Mutable contents. No copy may be in flight.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow is unique.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.cast(), self.bytes) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if self.abandoned.load(Ordering::Relaxed) {
            return;
        }
        let _ = self.context.synchronize();
        // SAFETY: the memory was allocated in `new`, and nothing runs.
        let _ = unsafe { result::free_host(self.pointer) };
    }
}
