//! What goes wrong on a GPU, as sentences.

use cudarc::cublaslt::result::CublasError;
use cudarc::driver::DriverError;

use super::compile::CompileError;
use super::launch::UnsupportedInstr;
use super::libraries::CudaLibrary;
use narrows_runtime::{DeviceError, RunError};

/// Why a program does not run on a GPU, or stops there.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CudaError {
    /// A library does not load.
    #[error(
        "GPUs cannot be used: lib{}, {}, does not load (try: {}; `narrows doctor` says what is where)",
        .0.stem(), .0.purpose(), .0.hint()
    )]
    Absent(CudaLibrary),
    /// There is no GPU of this number.
    #[error(
        "process wants GPU {ordinal}, and this machine shows {count} (try: as many processes as GPUs on \
         each machine, or what CUDA_VISIBLE_DEVICES hides)"
    )]
    NoGpu {
        /// Which, counted from 0.
        ordinal: u64,
        /// How many there are.
        count: u64,
    },
    /// The plan is for several GPUs, and one process has one.
    #[error(
        "the plan is for {devices} GPUs, and a process has one (try: `torchrun --nproc-per-node {devices} \
         --no-python narrows run …`, srun or mpirun: see docs/clusters.md)"
    )]
    OneProcess {
        /// Devices of the plan.
        devices: u64,
    },
    /// The program's buffers do not fit.
    #[error(
        "{what} of {wanted} bytes does not fit GPU {ordinal}, of which {free} bytes of {whole} are free \
         (try: a plan with `--memory-limit`, or nothing else on that GPU)"
    )]
    Memory {
        /// What for.
        what: &'static str,
        /// Bytes wanted.
        wanted: u64,
        /// The GPU.
        ordinal: u64,
        /// Bytes that are free.
        free: u64,
        /// Bytes that it has.
        whole: u64,
    },
    /// No kernel does an instruction.
    #[error(transparent)]
    Refused(#[from] UnsupportedInstr),
    /// Kernels do not compile.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// The driver says no.
    #[error("GPU {ordinal}: {call}: {said}{hint}")]
    Driver {
        /// The GPU.
        ordinal: u64,
        /// What was asked for.
        call: String,
        /// What it says.
        said: String,
        /// What may help, after a space; or nothing.
        hint: &'static str,
    },
    /// cuBLASLt has no way to make a product, or failed.
    #[error("cuBLASLt, {product}: {said}")]
    Product {
        /// The product.
        product: String,
        /// What it says.
        said: String,
    },
    /// NCCL failed.
    #[error("NCCL, {call}: {said} (try: NCCL_DEBUG=INFO, for what it says itself){recent}")]
    Nccl {
        /// What was asked for.
        call: String,
        /// What it says.
        said: String,
        /// The last pieces of the step, for who looks for the reason; each on a line of its own.
        recent: String,
    },
    /// Nothing came of a step in time.
    #[error(
        "GPU {ordinal} has come no further in step {step} for {waited_s:.0} s (try: the other processes' \
         output: who waits for whom; or a longer --collective-timeout){recent}"
    )]
    Stalled {
        /// The GPU.
        ordinal: u64,
        /// The step.
        step: u64,
        /// How long was waited.
        waited_s: f64,
        /// What was under way; each on a line of its own.
        recent: String,
    },
}

impl From<CudaError> for RunError {
    fn from(error: CudaError) -> RunError {
        RunError::Device(DeviceError::new(error))
    }
}

impl CudaError {
    /// What a driver's error is.
    pub(super) fn driver(ordinal: u64, call: &str, error: DriverError) -> CudaError {
        use cudarc::driver::sys::CUresult::*;
        let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
        let said = text.unwrap_or_else(|_| format!("error {:?}", error.0));
        let hint = match error.0 {
            CUDA_ERROR_ILLEGAL_ADDRESS
            | CUDA_ERROR_LAUNCH_FAILED
            | CUDA_ERROR_MISALIGNED_ADDRESS => {
                " (a defect of this program: compute-sanitizer names the kernel, with --eager)"
            }
            CUDA_ERROR_ECC_UNCORRECTABLE => " (the GPU's memory is failing: take another GPU)",
            CUDA_ERROR_NO_BINARY_FOR_GPU => {
                " (the kernels were compiled for another GPU, or by a compiler that is newer than the driver)"
            }
            _ => "",
        };
        CudaError::Driver { ordinal, call: call.into(), said, hint }
    }

    pub(super) fn product(product: &str, error: CublasError) -> CudaError {
        use cudarc::cublaslt::sys::cublasStatus_t::*;
        let hint = match error.0 {
            CUBLAS_STATUS_NOT_INITIALIZED | CUBLAS_STATUS_ALLOC_FAILED => {
                " (try: a library that is no newer than the driver, or more free memory on the GPU)"
            }
            _ => "",
        };
        CudaError::Product { product: product.into(), said: format!("{:?}{hint}", error.0) }
    }
}
