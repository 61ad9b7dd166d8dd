//! What a machine has for CUDA: which libraries load, and its GPUs.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::ptr;

use cudarc::driver::result::{DriverError, device, init, primary_ctx};
use cudarc::driver::sys::CUdevice_attribute;
use cudarc::{cublas, cublaslt, driver, nccl, nvrtc};
use narrows_plan::Bytes;

use super::libraries::CudaLibrary;

/// The oldest compute capability that kernels are compiled for.
pub const CAPABILITY_MIN: (u32, u32) = (8, 0);

/// A GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuInfo {
    /// Its number on this machine.
    pub ordinal: u32,
    /// What it is called.
    pub name: String,
    /// Compute capability: (9, 0) is sm_90.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Memory.
    pub memory: Bytes,
}

/// Whether a library is there, and what of its functions is asked first is in it: the binding ends the program
/// where one is missing.
macro_rules! is_there {
    ($sys:path $(, $function:literal)*) => {{
        use $sys as sys;
        let functions: &[&str] = &[$($function),*];
        let has = |name: &&str| sys::culib().get::<unsafe extern "C" fn()>(name.as_bytes()).is_ok();
        sys::is_culib_present() && functions.iter().all(has)
    }};
}

/// Whether a library loads, under the names that `cudarc` asks for, and is what it is called.
pub fn loads(library: CudaLibrary) -> bool {
    // SAFETY: loading runs the initialisers of a library of NVIDIA's, as its use would; functions are looked
    // for and not called.
    unsafe {
        match library {
            // The last of them came with CUDA 11.4.
            CudaLibrary::Driver => is_there!(
                driver::sys,
                "cuInit",
                "cuDriverGetVersion",
                "cuStreamBeginCapture_v2",
                "cuGraphInstantiateWithFlags"
            ),
            CudaLibrary::Nvrtc => is_there!(nvrtc::sys, "nvrtcVersion"),
            CudaLibrary::Cublas => is_there!(cublas::sys),
            CudaLibrary::CublasLt => {
                is_there!(cublaslt::sys, "cublasLtGetVersion", "cublasLtMatmul")
            }
            CudaLibrary::Nccl => is_there!(nccl::sys, "ncclGetVersion"),
        }
    }
}

/// The version that a library says it has; `None` when it does not load, or does not say.
pub fn version(library: CudaLibrary) -> Option<String> {
    if !loads(library) {
        return None;
    }
    let mut number: c_int = 0;
    match library {
        CudaLibrary::Driver => Some(of_cuda(driver_version()?)),
        CudaLibrary::Nvrtc => {
            let mut minor: c_int = 0;
            // SAFETY: as above.
            unsafe { nvrtc::sys::nvrtcVersion(&raw mut number, &raw mut minor) }.result().ok()?;
            Some(format!("{number}.{minor}"))
        }
        CudaLibrary::Cublas => None,
        CudaLibrary::CublasLt => {
            // SAFETY: the library is there.
            let number = unsafe { cublaslt::sys::cublasLtGetVersion() };
            Some(format!("{}.{}.{}", number / 10_000, number % 10_000 / 100, number % 100))
        }
        CudaLibrary::Nccl => {
            let number = nccl::result::get_nccl_version().ok()?;
            Some(format!("{}.{}.{}", number / 10_000, number % 10_000 / 100, number % 100))
        }
    }
}

/// The oldest CUDA that a driver may be of: that of the drivers 525.
const DRIVER_MIN: c_int = 12_000;

/// That the driver is too old, where it is: what it does then fails somewhere later, and says something else.
pub fn outdated() -> Option<String> {
    let old = driver_version().filter(|number| *number < DRIVER_MIN)?;
    let (old, least) = (of_cuda(old), of_cuda(DRIVER_MIN));
    Some(format!("NVIDIA's driver is one of CUDA {old}, and this wants one of {least} or newer"))
}

/// The CUDA that the driver is of, as it says it: 12090 is 12.9. `None` when there is none.
fn driver_version() -> Option<c_int> {
    let mut number: c_int = 0;
    if !loads(CudaLibrary::Driver) {
        return None;
    }
    // SAFETY: the library is there, and the number is valid to write.
    unsafe { driver::sys::cuDriverGetVersion(&raw mut number) }.result().ok()?;
    Some(number)
}

fn of_cuda(number: c_int) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

/// The GPUs of this machine. None of them is touched.
///
/// # Errors
/// What the driver says when it does not come up. Without a driver there are none.
pub fn gpus() -> Result<Vec<GpuInfo>, String> {
    (0..count()?).map(|ordinal| gpu(ordinal as c_int).map_err(|error| said(&error))).collect()
}

/// How many there are.
///
/// # Errors
/// As [`gpus`].
pub fn count() -> Result<u32, String> {
    if !loads(CudaLibrary::Driver) {
        return Ok(0);
    }
    let count = init().and_then(|()| device::get_count());
    count.map(|count| count as u32).map_err(|error| said(&error))
}

/// What of a GPU's memory is free; `None` when no context can be made on it. That takes a moment, and some of
/// that memory: for who only looks, not beside a run.
pub fn free_memory(ordinal: u32) -> Option<Bytes> {
    let device = device::get(ordinal as c_int).ok()?;
    // SAFETY: the device is one of the driver's; the context is released as often as it is retained, and
    // nobody's afterwards.
    unsafe {
        let context = primary_ctx::retain(device).ok()?;
        let asked =
            driver::result::ctx::set_current(context).and_then(|()| driver::result::mem_get_info());
        let _ = driver::result::ctx::set_current(ptr::null_mut());
        let _ = primary_ctx::release(device);
        asked.ok().map(|(free, _)| Bytes(free as u64))
    }
}

fn said(error: &DriverError) -> String {
    let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
    text.unwrap_or_else(|_| format!("error {:?}", error.0))
}

fn gpu(ordinal: c_int) -> Result<GpuInfo, DriverError> {
    let device = device::get(ordinal)?;
    // SAFETY: the driver gave this device.
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
