//! Access to a fake device through cudarc.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{CUdeviceptr, CUresult};
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, DriverError, result};
use cudarc::nvrtc::Ptx;
use narrows_cuda::{CubinCache, KernelFamily};

/// Default compute capability of fake devices.
pub const CAPABILITY: (u32, u32) = (9, 0);

pub fn context(ordinal: usize) -> Arc<CudaContext> {
    let context = CudaContext::new(ordinal).unwrap();
    // SAFETY: the tests order accesses of several streams with events.
    unsafe { context.disable_event_tracking() };
    context
}

pub fn error<T>(result: Result<T, DriverError>) -> CUresult {
    result.err().map_or(CUresult::CUDA_SUCCESS, |error| error.0)
}

/// A kernel, compiled and loaded as by the backend.
pub fn kernel(context: &Arc<CudaContext>, family: KernelFamily, name: &str) -> CudaFunction {
    let folder = tempfile::tempdir().unwrap();
    let cubin =
        CubinCache::open(folder.path()).unwrap().load_or_compile(family, CAPABILITY, &[]).unwrap();
    let module = context.load_module(Ptx::from_binary(cubin.bytes)).unwrap();
    module.load_function(name).unwrap()
}

/// An array of f32 on the device.
#[derive(Clone, Copy)]
pub struct DeviceArray {
    pub address: CUdeviceptr,
    pub count: usize,
}

impl DeviceArray {
    /// An unwritten array.
    pub fn new(count: usize) -> DeviceArray {
        // SAFETY: the thread has a context.
        DeviceArray { address: unsafe { result::malloc_sync(count * 4) }.unwrap(), count }
    }

    pub fn of(values: &[f32]) -> DeviceArray {
        let array = DeviceArray::new(values.len());
        // SAFETY: the array has this size.
        unsafe { result::memcpy_htod_sync(array.address, values) }.unwrap();
        array
    }

    pub fn upload(self, values: &[f32], stream: &CudaStream) {
        // SAFETY: the fake driver reads host memory during the call, and checks addresses on the device.
        unsafe { result::memcpy_htod_async(self.address, values, stream.cu_stream()) }.unwrap();
    }

    pub fn copy_to(self, to: DeviceArray, stream: &CudaStream) {
        // SAFETY: the fake driver checks addresses.
        unsafe {
            result::memcpy_dtod_async(to.address, self.address, self.count * 4, stream.cu_stream())
        }
        .unwrap();
    }

    pub fn fill_zero(self, stream: &CudaStream) {
        // SAFETY: the fake driver checks addresses.
        unsafe { result::memset_d8_async(self.address, 0, self.count * 4, stream.cu_stream()) }
            .unwrap();
    }

    /// Reads the array after all queued operations.
    pub fn read(self) -> Vec<f32> {
        result::ctx::synchronize().unwrap();
        let mut values = vec![0.0; self.count];
        // SAFETY: the array has this size.
        unsafe { result::memcpy_dtoh_sync(&mut values, self.address) }.unwrap();
        values
    }

    pub fn pointer(self) -> *mut c_void {
        self.address as *mut c_void
    }
}

/// Launches a kernel that computes sum += x.
pub fn add_into(function: &CudaFunction, x: DeviceArray, sum: DeviceArray, stream: &CudaStream) {
    let mut arguments = [x.address, sum.address, sum.count as u64];
    launch(function, ([1, 1, 1], [32, 1, 1], 0), &mut arguments, stream).unwrap();
}

/// Launches a kernel whose arguments all have 64 bits. The shape is grid, block and shared memory.
pub fn launch(
    function: &CudaFunction,
    (grid, block, shared): ([u32; 3], [u32; 3], u32),
    arguments: &mut [u64],
    stream: &CudaStream,
) -> Result<(), DriverError> {
    let mut pointers: Vec<*mut c_void> =
        arguments.iter_mut().map(|argument| std::ptr::from_mut(argument).cast()).collect();
    let (grid, block) = (grid.into(), block.into());
    // SAFETY: the arguments match the kernel, and the fake driver checks addresses.
    unsafe {
        let function = function.cu_function();
        result::launch_kernel(function, grid, block, shared, stream.cu_stream(), &mut pointers)
    }
}

/// Whether a condition becomes true within half a second.
pub fn becomes_true(mut condition: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while !condition() {
        if start.elapsed() > Duration::from_millis(500) {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}
