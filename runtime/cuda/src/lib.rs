//! The CUDA backend: executes one device of a program on one GPU.
//!
//! | module | contents |
//! |---|---|
//! | `kernels/` | CUDA C++17 kernels for bf16 and f32, one file per family |
//! | `kernel_source` | the families and their source text |
//! | `launch` | fused ops and attention as kernel launches: kernel, grid, shared memory, arguments |
//! | `matmul` | GEMMs as cublasLtMatmul calls, and the store of their fastest algorithms |
//! | `compile` | compilation by NVRTC, and the cubin cache |
//! | `schedule` | the work of a device in one step: its streams, graph segments and waits |
//! | `device` | the GPU that executes a schedule |
//! | `libraries`, `discovery` | location of the CUDA libraries, which of them load, and the GPUs |
//!
//! Only `device` needs a GPU. Launches are data: a device executes them; in tests a C++ compiler builds the
//! same kernels for the CPU, where the results are compared with the kernels of `narrows-cpu` and a bounds check
//! verifies which bytes each launch accesses.
//!
//! Results depend on shapes alone, not on the device or on scheduling: sums over rows are split into a number
//! of parts that follows from the shape and added in a fixed order, and no kernel uses atomic additions. The exception
//! is attention by cuDNN ([`AttentionKernels`]).

mod compile;
mod device;
mod discovery;
mod error;
mod kernel_source;
mod launch;
mod libraries;
mod matmul;
mod schedule;

pub use compile::{CompileError, CompileUnit, Cubin, CubinCache, CubinOrigin};
pub use device::{AttentionKernels, GpuOptions, attention_workspace_without_gpu, session};
pub use discovery::{
    COMPUTE_CAPABILITY_MIN, GpuInfo, free_gpu_memory, gpu_count, gpus, library_loads,
    library_version, outdated_driver,
};
pub use error::CudaError;
pub use kernel_source::{KERNEL_HEADERS, KernelFamily, KernelHeader, NVRTC_OPTIONS};
pub use launch::{
    Argument, AttentionKey, AttentionTensor, ByteRows, FusedAttention, Launch, LaunchContext,
    Launches, MemoryAccess, MemorySpace, OPTIMIZER_COEFFICIENTS, RingAttention, RingShift,
    RingStep, UnsupportedInstr, kernel_launches, optimizer_coefficients, ring_attention,
    rotary_table,
};
pub use libraries::{
    CudaLibrary, LibraryFile, find_libraries, library_search_folders, link_libraries,
};
pub use matmul::{
    Matmul, MatmulContext, MatmulKey, MatrixAddress, StoredMatrix, Transpose, lower_gemm,
    recommended_workspace,
};
pub use schedule::{
    CollectiveBuffer, DeviceSchedule, GraphNode, GraphSegment, NcclCollective, NodeWork, P2pKind,
    P2pOp, ScheduleItem, SchedulePass, StreamId,
};
