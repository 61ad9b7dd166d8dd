//! A non-blocking NCCL communicator.

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::time::{Duration, Instant};
use std::{ptr, thread};

use cudarc::nccl::result::{self, NcclError, NcclStatus};
use cudarc::nccl::sys::{self, ncclResult_t};

use crate::error::CudaError;
use narrows_runtime::RunError;
use narrows_runtime::process_group::ProcessGroup;

/// The first version that can split communicators.
pub(super) const NCCL_VERSION_MIN: c_int = 21_800;

/// Interval at which the state of NCCL is polled.
const POLL_INTERVAL: Duration = Duration::from_micros(200);

/// Initial time in which the state is polled without pauses.
const SPIN_TIME: Duration = Duration::from_micros(500);

/// The operation of creating the communicator of all processes, in messages.
pub(super) const JOINING: &str = "joining the other processes";

const SHARED_GPU_HINT: &str = "; it rejects two processes on one GPU: LOCAL_RANK and CUDA_VISIBLE_DEVICES select the GPU of a \
    process, and processes can share a GPU if each has its own NCCL_HOSTID (docs/clusters.md)";

/// A communicator, aborted on drop.
pub(super) struct NcclCommunicator {
    pub raw: sys::ncclComm_t,
    /// Name in messages.
    pub title: String,
}

// SAFETY: NCCL allows a communicator to be used by one thread at a time.
unsafe impl Send for NcclCommunicator {}

/// `ncclConfig_t` as of NCCL 2.18: later ones take it by its size.
#[repr(C)]
pub(super) struct NcclConfig {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl NcclConfig {
    pub fn new(blocks_max: c_int) -> NcclConfig {
        let undefined = c_int::MIN;
        NcclConfig {
            size: size_of::<NcclConfig>(),
            magic: 0xcafe_beef,
            version: NCCL_VERSION_MIN as c_uint,
            blocking: 0,
            cga_cluster_size: undefined,
            min_ctas: undefined,
            max_ctas: blocks_max,
            net_name: ptr::null(),
            split_share: undefined,
        }
    }
}

/// Limits of a wait for NCCL: failures of other processes, and a timeout.
pub(super) struct WaitContext<'a> {
    pub processes: &'a dyn ProcessGroup,
    pub timeout: Duration,
}

impl NcclCommunicator {
    pub fn async_state(&self) -> Result<NcclStatus, NcclError> {
        let mut state = ncclResult_t::ncclSuccess;
        // SAFETY: the communicator is valid, and the state is writable.
        unsafe { sys::ncclCommGetAsyncError(self.raw, &raw mut state) }.result()?;
        state.result()
    }

    /// Waits until NCCL has completed `call`.
    pub fn wait_until_ready(&self, call: &str, wait_context: &WaitContext) -> Result<(), RunError> {
        let started = Instant::now();
        loop {
            match self.async_state() {
                Ok(NcclStatus::InProgress) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(self.error(call, error).into()),
            }
            // Usually NCCL only needs a moment to enqueue an operation.
            if started.elapsed() < SPIN_TIME {
                thread::yield_now();
                continue;
            }
            if let Some(failure) = wait_context.processes.failure(call) {
                return Err(failure.into());
            }
            if started.elapsed() > wait_context.timeout {
                let waited = started.elapsed().as_secs_f64();
                let message = format!("the other processes did not join within {waited:.0} s");
                return Err(nccl_error(&format!("{call}, {}", self.title), message).into());
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    pub fn error(&self, call: &str, error: NcclError) -> CudaError {
        // SAFETY: NCCL returns a string that is valid until the next error.
        let last = unsafe {
            let text = sys::ncclGetLastError(self.raw);
            (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        };
        let detail = last.filter(|text| !text.is_empty()).map(|text| format!(": {text}"));
        let message =
            format!("{}{}{}", error_text(&error), detail.unwrap_or_default(), hint(call, &error));
        nccl_error(&format!("{call}, {}", self.title), message)
    }
}

impl Drop for NcclCommunicator {
    fn drop(&mut self) {
        // Destroying instead would wait for other processes, which may have failed. At the end of a run no operation
        // is in flight.
        // SAFETY: the communicator is valid, and not used afterwards.
        let _ = unsafe { result::comm_abort(self.raw) };
    }
}

pub(super) fn error_text(error: &NcclError) -> String {
    // SAFETY: NCCL returns a static string for any value.
    let text = unsafe { sys::ncclGetErrorString(error.0) };
    match text.is_null() {
        true => format!("{:?}", error.0),
        // SAFETY: the pointer is a C string.
        false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
    }
}

pub(super) fn call_error(call: &str, error: NcclError) -> CudaError {
    nccl_error(call, format!("{}{}", error_text(&error), hint(call, &error)))
}

/// Advice that follows NCCL's message.
fn hint(call: &str, error: &NcclError) -> &'static str {
    match error.0 {
        // NCCL reports this for two ranks on one GPU.
        ncclResult_t::ncclInvalidUsage if call == JOINING => SHARED_GPU_HINT,
        _ => "",
    }
}

pub(super) fn nccl_error(call: &str, message: String) -> CudaError {
    CudaError::Nccl { call: call.into(), message, recent_activity: vec![] }
}
