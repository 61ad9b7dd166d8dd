//! Errors of the CUDA backend.

use cudarc::cublaslt::result::CublasError;
use cudarc::driver::DriverError;

use super::compile::CompileError;
use super::launch::UnsupportedInstr;
use super::libraries::CudaLibrary;
use narrows_plan::Bytes;
use narrows_runtime::{DeviceError, RunError};

/// Error of the CUDA backend.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CudaError {
    /// A library does not load.
    #[error(
        "GPUs cannot be used: lib{}, {}, does not load", .0.file_stem(), .0.purpose()
    )]
    LibraryMissing(CudaLibrary),
    /// The GPU does not exist.
    #[error("GPU {ordinal} does not exist: this machine shows {count}")]
    NoGpu {
        /// Index of the GPU, counted from 0.
        ordinal: u64,
        /// GPUs that the process sees.
        count: u64,
    },
    /// A plan for several GPUs was started as one process.
    #[error("the plan needs {devices} GPUs, and each process drives one")]
    OneGpuPerProcess {
        /// Devices of the plan.
        devices: u64,
    },
    /// An allocation does not fit.
    #[error(
        "{purpose} of {requested} does not fit on GPU {ordinal}, which has {free} of {total} free"
    )]
    OutOfMemory {
        /// Purpose of the memory.
        purpose: &'static str,
        /// Size of the allocation.
        requested: Bytes,
        /// The GPU.
        ordinal: u64,
        /// Free memory.
        free: Bytes,
        /// Memory of the GPU.
        total: Bytes,
    },
    /// No kernel implements an instruction.
    #[error(transparent)]
    Unsupported(#[from] UnsupportedInstr),
    /// Kernels do not compile.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// The driver returned an error.
    #[error("GPU {ordinal}: {call}: {message}")]
    Driver {
        /// The GPU.
        ordinal: u64,
        /// The operation that failed.
        call: String,
        /// The driver's message.
        message: String,
        /// Advice for the user.
        hint: Option<&'static str>,
    },
    /// cuBLASLt does not support a matmul, or failed.
    #[error("cuBLASLt, {matmul}: {message}")]
    Matmul {
        /// Shape and formats of the matmul.
        matmul: String,
        /// The library's message.
        message: String,
        /// Advice for the user.
        hint: Option<&'static str>,
    },
    /// cuDNN failed.
    #[error("cuDNN, attention {attention}: {message}")]
    Attention {
        /// Shape of the attention.
        attention: String,
        /// The library's message.
        message: String,
    },
    /// NCCL failed.
    #[error("NCCL, {call}: {message}{}", on_own_lines(recent_activity))]
    Nccl {
        /// The operation that failed.
        call: String,
        /// NCCL's message.
        message: String,
        /// The last items of the step.
        recent_activity: Vec<String>,
    },
    /// A step made no progress before the timeout.
    #[error(
        "GPU {ordinal} has made no progress in step {step} for {waited_s:.0} s{}",
        on_own_lines(recent_activity)
    )]
    Stalled {
        /// The GPU.
        ordinal: u64,
        /// The step.
        step: u64,
        /// Seconds since the last progress.
        waited_s: f64,
        /// Whether instructions are launched one by one, so that the last collectives are known.
        eager: bool,
        /// The last items of the step.
        recent_activity: Vec<String>,
    },
}

impl From<CudaError> for RunError {
    fn from(error: CudaError) -> RunError {
        let hint = error.hint();
        RunError::Device(DeviceError::new(error, hint))
    }
}

impl CudaError {
    /// Advice for the user.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            CudaError::LibraryMissing(library) => {
                let install = library.install_hint();
                return Some(format!("{install}; `narrows doctor` lists what is installed"));
            }
            CudaError::OneGpuPerProcess { devices } => {
                return Some(format!(
                    "`torchrun --nproc-per-node {devices} --no-python narrows run …`, srun or mpirun: \
                     see docs/clusters.md"
                ));
            }
            CudaError::Unsupported(error) => Some(error.hint()),
            CudaError::Compile(error) => error.hint(),
            CudaError::NoGpu { .. } => {
                Some("one process for each GPU of the machine, or another CUDA_VISIBLE_DEVICES")
            }
            CudaError::OutOfMemory { .. } => {
                Some("a plan with `--memory-limit`, or stop other programs on that GPU")
            }
            CudaError::Driver { hint, .. } | CudaError::Matmul { hint, .. } => *hint,
            CudaError::Attention { .. } => Some(
                "--deterministic, for Narrows' own kernels of attention; or another version of cuDNN",
            ),
            CudaError::Nccl { .. } => Some("NCCL_DEBUG=INFO, for NCCL's own log"),
            CudaError::Stalled { eager: true, .. } => Some(
                "the output of the other processes shows which of them is late; or a longer \
                 --collective-timeout",
            ),
            CudaError::Stalled { eager: false, .. } => Some(
                "the output of the other processes shows which of them is late; or a longer \
                 --collective-timeout; or --eager, to see single collectives",
            ),
        };
        hint.map(str::to_owned)
    }

    /// Describes an error of the driver in the operation `call`.
    pub(super) fn driver(ordinal: u64, call: &str, error: DriverError) -> CudaError {
        use cudarc::driver::sys::CUresult::*;
        let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
        let message = text.unwrap_or_else(|_| format!("error {:?}", error.0));
        let hint = match error.0 {
            CUDA_ERROR_ILLEGAL_ADDRESS
            | CUDA_ERROR_LAUNCH_FAILED
            | CUDA_ERROR_MISALIGNED_ADDRESS => Some(
                "this is a bug of this program: compute-sanitizer finds the kernel, with --eager",
            ),
            CUDA_ERROR_ECC_UNCORRECTABLE => Some("another GPU: the memory of this one is failing"),
            CUDA_ERROR_NO_BINARY_FOR_GPU => {
                Some("a newer driver: the kernels are for another GPU, or of a newer compiler")
            }
            _ => None,
        };
        CudaError::Driver { ordinal, call: call.into(), message, hint }
    }

    /// Describes an error of cuBLASLt.
    pub(super) fn matmul(matmul: &str, error: CublasError) -> CudaError {
        use cudarc::cublaslt::sys::cublasStatus_t::*;
        let hint = match error.0 {
            CUBLAS_STATUS_NOT_INITIALIZED | CUBLAS_STATUS_ALLOC_FAILED => {
                Some("a library no newer than the driver, or more free memory on the GPU")
            }
            _ => None,
        };
        CudaError::Matmul { matmul: matmul.into(), message: format!("{:?}", error.0), hint }
    }
}

fn on_own_lines(activity: &[String]) -> String {
    activity.iter().map(|line| format!("\n  {line}")).collect()
}
