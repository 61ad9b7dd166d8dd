//! The stand-in's device, through cudarc.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{CUdeviceptr, CUresult};
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, DriverError, result};
use cudarc::nvrtc::Ptx;
use narrows_cuda::KernelFamily;
use narrows_cuda::compile::CubinCache;

/// The capability that the stand-in has unless it is told another.
pub const CAPABILITY: (u32, u32) = (9, 0);

pub fn context(ordinal: usize) -> Arc<CudaContext> {
    let context = CudaContext::new(ordinal).unwrap();
    // SAFETY: what is shared between streams is ordered by events here.
    unsafe { context.disable_event_tracking() };
    context
}

pub fn error<T>(result: Result<T, DriverError>) -> CUresult {
    result.err().map_or(CUresult::CUDA_SUCCESS, |error| error.0)
}

/// A kernel of a family, as the backend comes by it.
pub fn kernel(context: &Arc<CudaContext>, family: KernelFamily, name: &str) -> CudaFunction {
    let folder = tempfile::tempdir().unwrap();
    let cubin = CubinCache::open(folder.path()).unwrap().cubin(family, CAPABILITY, &[]).unwrap();
    let module = context.load_module(Ptx::from_binary(cubin.bytes)).unwrap();
    module.load_function(name).unwrap()
}

/// Numbers on the device.
#[derive(Clone, Copy)]
pub struct Numbers {
    pub at: CUdeviceptr,
    pub count: usize,
}

impl Numbers {
    /// Never written.
    pub fn new(count: usize) -> Numbers {
        // SAFETY: the thread has a context.
        Numbers { at: unsafe { result::malloc_sync(count * 4) }.unwrap(), count }
    }

    pub fn of(values: &[f32]) -> Numbers {
        let made = Numbers::new(values.len());
        // SAFETY: there is room for all of them.
        unsafe { result::memcpy_htod_sync(made.at, values) }.unwrap();
        made
    }

    pub fn put(self, values: &[f32], stream: &CudaStream) {
        // SAFETY: the stand-in reads memory of the host at the call, and checks that of the device.
        unsafe { result::memcpy_htod_async(self.at, values, stream.cu_stream()) }.unwrap();
    }

    pub fn copy_to(self, to: Numbers, stream: &CudaStream) {
        // SAFETY: the stand-in checks both places.
        unsafe { result::memcpy_dtod_async(to.at, self.at, self.count * 4, stream.cu_stream()) }
            .unwrap();
    }

    pub fn zero(self, stream: &CudaStream) {
        // SAFETY: the stand-in checks the place.
        unsafe { result::memset_d8_async(self.at, 0, self.count * 4, stream.cu_stream()) }.unwrap();
    }

    /// After all that is queued anywhere.
    pub fn read(self) -> Vec<f32> {
        result::ctx::synchronize().unwrap();
        let mut values = vec![0.0; self.count];
        // SAFETY: there are as many.
        unsafe { result::memcpy_dtoh_sync(&mut values, self.at) }.unwrap();
        values
    }

    pub fn pointer(self) -> *mut c_void {
        self.at as *mut c_void
    }
}

/// sum += x, by a kernel.
pub fn add_into(function: &CudaFunction, x: Numbers, sum: Numbers, stream: &CudaStream) {
    let mut arguments = [x.at, sum.at, sum.count as u64];
    launch(function, ([1, 1, 1], [32, 1, 1], 0), &mut arguments, stream).unwrap();
}

/// A launch of which every argument is 64 bits: grid, block and shared memory, then arguments.
pub fn launch(
    function: &CudaFunction,
    (grid, block, shared): ([u32; 3], [u32; 3], u32),
    arguments: &mut [u64],
    stream: &CudaStream,
) -> Result<(), DriverError> {
    let mut pointers: Vec<*mut c_void> =
        arguments.iter_mut().map(|argument| std::ptr::from_mut(argument).cast()).collect();
    let (grid, block) = (grid.into(), block.into());
    // SAFETY: the arguments are those the kernel takes, and the stand-in checks what they point to.
    unsafe {
        let function = function.cu_function();
        result::launch_kernel(function, grid, block, shared, stream.cu_stream(), &mut pointers)
    }
}

/// Whether it becomes true within half a second.
pub fn comes_true(mut is: impl FnMut() -> bool) -> bool {
    let begun = Instant::now();
    while !is() {
        if begun.elapsed() > Duration::from_millis(500) {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}
