//! Discovery of the CUDA libraries that load, and of the machine's GPUs.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::ptr;

use cudarc::driver::result::{DriverError, device, init, primary_ctx};
use cudarc::driver::sys::CUdevice_attribute;
use cudarc::{cublaslt, cudnn, driver, nccl, nvrtc};
use narrows_plan::Bytes;

use super::libraries::CudaLibrary;

/// The lowest compute capability that kernels are compiled for.
pub const COMPUTE_CAPABILITY_MIN: (u32, u32) = (8, 0);

/// Properties of a GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuInfo {
    /// Index among the GPUs of the machine.
    pub ordinal: u32,
    /// Name that the driver reports.
    pub name: String,
    /// Compute capability: (9, 0) is sm_90.
    pub capability: (u32, u32),
    /// Number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// Size of the memory.
    pub memory: Bytes,
}

/// Whether a library loads and exports these functions. The binding panics on a missing function, so those
/// called first are probed.
macro_rules! exports {
    ($sys:path $(, $function:literal)*) => {{
        use $sys as sys;
        let functions: &[&str] = &[$($function),*];
        let has = |name: &&str| sys::culib().get::<unsafe extern "C" fn()>(name.as_bytes()).is_ok();
        sys::is_culib_present() && functions.iter().all(has)
    }};
}

/// Whether a library loads under the names that `cudarc` uses, and exports the functions it should.
pub fn library_loads(library: CudaLibrary) -> bool {
    // SAFETY: loading runs the initialisers of an NVIDIA library, as using it would. Functions are looked up
    // and not called.
    unsafe {
        match library {
            // The newest of these functions appeared in CUDA 11.4.
            CudaLibrary::Driver => exports!(
                driver::sys,
                "cuInit",
                "cuDriverGetVersion",
                "cuStreamBeginCapture_v2",
                "cuGraphInstantiateWithFlags"
            ),
            CudaLibrary::Nvrtc => exports!(nvrtc::sys, "nvrtcVersion"),
            CudaLibrary::CublasLt => {
                exports!(cublaslt::sys, "cublasLtGetVersion", "cublasLtMatmul")
            }
            // Of cuDNN 9, which has the last of them.
            CudaLibrary::Cudnn => exports!(
                cudnn::sys,
                "cudnnGetVersion",
                "cudnnBackendExecute",
                "cudnnGetLastErrorString"
            ),
            CudaLibrary::Nccl => exports!(nccl::sys, "ncclGetVersion"),
        }
    }
}

/// Version that a library reports; `None` when it does not load or has no version function.
pub fn library_version(library: CudaLibrary) -> Option<String> {
    if !library_loads(library) {
        return None;
    }
    let mut number: c_int = 0;
    match library {
        CudaLibrary::Driver => Some(format_cuda_version(driver_cuda_version()?)),
        CudaLibrary::Nvrtc => {
            let mut minor: c_int = 0;
            // SAFETY: as above.
            unsafe { nvrtc::sys::nvrtcVersion(&raw mut number, &raw mut minor) }.result().ok()?;
            Some(format!("{number}.{minor}"))
        }
        CudaLibrary::CublasLt => {
            // SAFETY: the library is loaded.
            let number = unsafe { cublaslt::sys::cublasLtGetVersion() };
            Some(format!("{}.{}.{}", number / 10_000, number % 10_000 / 100, number % 100))
        }
        CudaLibrary::Cudnn => Some(cudnn_version(cudnn::result::get_version())),
        CudaLibrary::Nccl => {
            let number = nccl::result::get_nccl_version().ok()?;
            Some(format!("{}.{}.{}", number / 10_000, number % 10_000 / 100, number % 100))
        }
    }
}

/// A version in cuDNN's encoding since its major version 9: 90,600 is 9.6.0.
pub(crate) fn cudnn_version(number: usize) -> String {
    format!("{}.{}.{}", number / 10_000, number % 10_000 / 100, number % 100)
}

/// The oldest CUDA version that the driver may support: that of the 525 drivers.
const DRIVER_CUDA_MIN: c_int = 12_000;

/// Describes the driver's version if it is too old. Such a driver fails later, with unrelated messages.
pub fn outdated_driver() -> Option<String> {
    let version = driver_cuda_version().filter(|version| *version < DRIVER_CUDA_MIN)?;
    let [version, minimum] = [version, DRIVER_CUDA_MIN].map(format_cuda_version);
    Some(format!(
        "NVIDIA's driver supports CUDA {version}, and Narrows needs a driver for {minimum} or newer"
    ))
}

/// CUDA version of the driver in its own encoding: 12090 is 12.9. `None` without a driver.
fn driver_cuda_version() -> Option<c_int> {
    let mut number: c_int = 0;
    if !library_loads(CudaLibrary::Driver) {
        return None;
    }
    // SAFETY: the library is loaded, and the integer is writable.
    unsafe { driver::sys::cuDriverGetVersion(&raw mut number) }.result().ok()?;
    Some(number)
}

fn format_cuda_version(number: c_int) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

/// The GPUs of this machine; none without a driver. No context is created.
///
/// # Errors
/// The driver's message when it does not initialise.
pub fn gpus() -> Result<Vec<GpuInfo>, String> {
    (0..gpu_count()?)
        .map(|ordinal| gpu_info(ordinal as c_int).map_err(|error| describe_error(&error)))
        .collect()
}

/// Number of GPUs of this machine.
///
/// # Errors
/// As [`gpus`].
pub fn gpu_count() -> Result<u32, String> {
    if !library_loads(CudaLibrary::Driver) {
        return Ok(0);
    }
    let count = init().and_then(|()| device::get_count());
    count.map(|count| count as u32).map_err(|error| describe_error(&error))
}

/// Free memory of a GPU; `None` when no context can be created on it. Creating one takes time and some of the
/// memory, so this is for diagnostics and not for use during a run.
pub fn free_gpu_memory(ordinal: u32) -> Option<Bytes> {
    let device = device::get(ordinal as c_int).ok()?;
    // SAFETY: the driver returned this device. The context is released as often as it is retained, and is not
    // current afterwards.
    unsafe {
        let context = primary_ctx::retain(device).ok()?;
        let info =
            driver::result::ctx::set_current(context).and_then(|()| driver::result::mem_get_info());
        let _ = driver::result::ctx::set_current(ptr::null_mut());
        let _ = primary_ctx::release(device);
        info.ok().map(|(free, _)| Bytes(free as u64))
    }
}

fn describe_error(error: &DriverError) -> String {
    let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
    text.unwrap_or_else(|_| format!("error {:?}", error.0))
}

fn gpu_info(ordinal: c_int) -> Result<GpuInfo, DriverError> {
    let device = device::get(ordinal)?;
    // SAFETY: the driver returned this device.
    let attribute = |attribute| unsafe { device::get_attribute(device, attribute) };
    let capability = (
        attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    );
    let multiprocessors = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    // SAFETY: as above.
    let memory = unsafe { device::total_mem(device) }?;
    Ok(GpuInfo {
        ordinal: ordinal as u32,
        name: device::get_name(device)?,
        capability: (capability.0 as u32, capability.1 as u32),
        multiprocessors: multiprocessors as u32,
        memory: Bytes(memory as u64),
    })
}
