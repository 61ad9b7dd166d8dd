//! One of NCCL's communicators, which never blocks.

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::ptr;
use std::thread;
use std::time::{Duration, Instant};

use cudarc::nccl::result::{self, NcclError, NcclStatus};
use cudarc::nccl::sys::{self, ncclResult_t};

use super::super::error::CudaError;
use narrows_runtime::RunError;
use narrows_runtime::process_group::ProcessGroup;

/// Older NCCL cannot split communicators.
pub(super) const VERSION_MIN: c_int = 21_800;

/// How often NCCL is asked whether others have come.
const ASKED_EVERY: Duration = Duration::from_micros(200);

/// How long it is asked without a pause first.
const SPUN_FOR: Duration = Duration::from_micros(500);

/// What is asked of NCCL when processes meet.
pub(super) const MEETING: &str = "meeting the others";

const SHARED: &str = "; it refuses two processes on one GPU: LOCAL_RANK and CUDA_VISIBLE_DEVICES say which GPU a process \
    has, and several share one where each is told an NCCL_HOSTID of its own (docs/clusters.md)";

/// A communicator. It is aborted where it ends before it was given back.
pub(super) struct NcclCommunicator {
    pub raw: sys::ncclComm_t,
    /// What messages call it.
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
            version: VERSION_MIN as c_uint,
            blocking: 0,
            cga_cluster_size: undefined,
            min_ctas: undefined,
            max_ctas: blocks_max,
            net_name: ptr::null(),
            split_share: undefined,
        }
    }
}

/// What is looked at while NCCL is waited for.
pub(super) struct WaitContext<'a> {
    pub cluster: &'a dyn ProcessGroup,
    pub deadline: Duration,
}

impl NcclCommunicator {
    pub fn state(&self) -> Result<NcclStatus, NcclError> {
        let mut state = ncclResult_t::ncclSuccess;
        // SAFETY: the communicator lives, and the state is valid to write.
        unsafe { sys::ncclCommGetAsyncError(self.raw, &raw mut state) }.result()?;
        state.result()
    }

    /// Waits until NCCL has done what it was asked for.
    pub fn settle(&self, call: &str, watch: &WaitContext) -> Result<(), RunError> {
        let begun = Instant::now();
        loop {
            match self.state() {
                Ok(NcclStatus::InProgress) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(self.failed(call, error).into()),
            }
            // Mostly NCCL only takes a moment to put something on a stream.
            if begun.elapsed() < SPUN_FOR {
                thread::yield_now();
                continue;
            }
            if let Some(gone) = watch.cluster.failure(call) {
                return Err(gone.into());
            }
            if begun.elapsed() > watch.deadline {
                let waited = begun.elapsed().as_secs_f64();
                let said = format!("the other devices did not come within {waited:.0} s");
                return Err(nccl(&format!("{call}, {}", self.title), said).into());
            }
            thread::sleep(ASKED_EVERY);
        }
    }

    pub fn failed(&self, call: &str, error: NcclError) -> CudaError {
        // SAFETY: NCCL gives a text that lives until the next error.
        let last = unsafe {
            let text = sys::ncclGetLastError(self.raw);
            (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        };
        let more = last.filter(|text| !text.is_empty()).map(|text| format!(": {text}"));
        let said = format!("{}{}{}", named(&error), more.unwrap_or_default(), hint(call, &error));
        nccl(&format!("{call}, {}", self.title), said)
    }
}

impl Drop for NcclCommunicator {
    fn drop(&mut self) {
        // Destroying would wait for others, who may be gone; when a run ends, nothing is under way.
        // SAFETY: it lives, and is not used afterwards.
        let _ = unsafe { result::comm_abort(self.raw) };
    }
}

pub(super) fn named(error: &NcclError) -> String {
    // SAFETY: NCCL gives a text that lives for ever, whatever the number.
    let text = unsafe { sys::ncclGetErrorString(error.0) };
    match text.is_null() {
        true => format!("{:?}", error.0),
        // SAFETY: it is a text.
        false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
    }
}

pub(super) fn failed(call: &str, error: NcclError) -> CudaError {
    nccl(call, format!("{}{}", named(&error), hint(call, &error)))
}

/// What may help, after what NCCL says.
fn hint(call: &str, error: &NcclError) -> &'static str {
    match error.0 {
        // Where it sees two ranks on one GPU.
        ncclResult_t::ncclInvalidUsage if call == MEETING => SHARED,
        _ => "",
    }
}

pub(super) fn nccl(call: &str, said: String) -> CudaError {
    CudaError::Nccl { call: call.into(), said, recent: String::new() }
}
