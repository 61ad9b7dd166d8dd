//! Errors of the CUDA backend.

use cudarc::cublaslt::result::CublasError;
use cudarc::driver::DriverError;

use super::compile::CompileError;
use super::launch::UnsupportedInstr;
use super::libraries::CudaLibrary;
use narrows_runtime::{DeviceError, RunError};

/// Why a program cannot run on a GPU, or stopped there.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CudaError {
    /// A library does not load.
    #[error(
        "GPUs cannot be used: lib{}, {}, does not load (try: {}; `narrows doctor` lists what is installed)",
        .0.file_stem(), .0.purpose(), .0.install_hint()
    )]
    LibraryMissing(CudaLibrary),
    /// The GPU does not exist.
    #[error(
        "GPU {ordinal} does not exist: this machine shows {count} (try: one process for each GPU of the \
         machine, or another CUDA_VISIBLE_DEVICES)"
    )]
    NoGpu {
        /// Index of the GPU, counted from 0.
        ordinal: u64,
        /// GPUs that the process sees.
        count: u64,
    },
    /// A plan for several GPUs was started as one process.
    #[error(
        "the plan needs {devices} GPUs, and each process drives one (try: `torchrun --nproc-per-node \
         {devices} --no-python narrows run …`, srun or mpirun: see docs/clusters.md)"
    )]
    OneGpuPerProcess {
        /// Devices of the plan.
        devices: u64,
    },
    /// An allocation does not fit.
    #[error(
        "{purpose} of {requested_bytes} bytes does not fit on GPU {ordinal}, which has {free_bytes} of \
         {total_bytes} bytes free (try: a plan with `--memory-limit`, or stop other programs on that GPU)"
    )]
    OutOfMemory {
        /// Purpose of the memory.
        purpose: &'static str,
        /// Size of the allocation.
        requested_bytes: u64,
        /// The GPU.
        ordinal: u64,
        /// Free memory.
        free_bytes: u64,
        /// Memory of the GPU.
        total_bytes: u64,
    },
    /// No kernel implements an instruction.
    #[error(transparent)]
    Unsupported(#[from] UnsupportedInstr),
    /// Kernels do not compile.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// The driver returned an error.
    #[error("GPU {ordinal}: {call}: {message}{hint}")]
    Driver {
        /// The GPU.
        ordinal: u64,
        /// The operation that failed.
        call: String,
        /// The driver's message.
        message: String,
        /// Advice with a leading space, or empty.
        hint: &'static str,
    },
    /// cuBLASLt does not support a matmul, or failed.
    #[error("cuBLASLt, {matmul}: {message}")]
    Matmul {
        /// Shape and formats of the matmul.
        matmul: String,
        /// The library's message.
        message: String,
    },
    /// NCCL failed.
    #[error("NCCL, {call}: {message} (try: NCCL_DEBUG=INFO, for NCCL's own log){recent_activity}")]
    Nccl {
        /// The operation that failed.
        call: String,
        /// NCCL's message.
        message: String,
        /// The last items of the step, each on a line of its own.
        recent_activity: String,
    },
    /// A step made no progress before the timeout.
    #[error(
        "GPU {ordinal} has made no progress in step {step} for {waited_s:.0} s (try: the output of the \
         other processes shows which of them is late; or a longer --collective-timeout){recent_activity}"
    )]
    Stalled {
        /// The GPU.
        ordinal: u64,
        /// The step.
        step: u64,
        /// Seconds since the last progress.
        waited_s: f64,
        /// The last items of the step, each on a line of its own.
        recent_activity: String,
    },
}

impl From<CudaError> for RunError {
    fn from(error: CudaError) -> RunError {
        RunError::Device(DeviceError::new(error))
    }
}

impl CudaError {
    /// Describes an error of the driver in the operation `call`.
    pub(super) fn driver(ordinal: u64, call: &str, error: DriverError) -> CudaError {
        use cudarc::driver::sys::CUresult::*;
        let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
        let message = text.unwrap_or_else(|_| format!("error {:?}", error.0));
        let hint = match error.0 {
            CUDA_ERROR_ILLEGAL_ADDRESS
            | CUDA_ERROR_LAUNCH_FAILED
            | CUDA_ERROR_MISALIGNED_ADDRESS => {
                " (a bug of this program: compute-sanitizer finds the kernel, with --eager)"
            }
            CUDA_ERROR_ECC_UNCORRECTABLE => " (the GPU's memory is failing: use another GPU)",
            CUDA_ERROR_NO_BINARY_FOR_GPU => {
                " (the kernels were compiled for another GPU, or by a compiler newer than the driver)"
            }
            _ => "",
        };
        CudaError::Driver { ordinal, call: call.into(), message, hint }
    }

    /// Describes an error of cuBLASLt.
    pub(super) fn matmul(matmul: &str, error: CublasError) -> CudaError {
        use cudarc::cublaslt::sys::cublasStatus_t::*;
        let hint = match error.0 {
            CUBLAS_STATUS_NOT_INITIALIZED | CUBLAS_STATUS_ALLOC_FAILED => {
                " (try: a library no newer than the driver, or more free memory on the GPU)"
            }
            _ => "",
        };
        CudaError::Matmul { matmul: matmul.into(), message: format!("{:?}{hint}", error.0) }
    }
}
