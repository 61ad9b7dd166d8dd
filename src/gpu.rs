//! The GPUs of this machine: their availability, their description, and the assignment of one to each process.

use narrows_calibration::fit::GpuModel;
use narrows_cluster::ClusterTimeouts;
use narrows_cuda::{
    AttentionKernels, CudaError, CudaLibrary, GpuOptions, gpu_count, gpus, library_loads,
    library_version, outdated_driver,
};
use narrows_runtime::RunError;

use crate::cache_dir::cache_dir;
use crate::cluster::LaunchedProcess;
use crate::cuda_loader;
use crate::errors::{CommandResult, Failure, Problem};

/// The preset for a machine without GPUs: the hardware of most published measurements.
const FALLBACK_PRESET: &str = "a100-80gb";

/// Makes the CUDA libraries loadable, and fails on a machine without them or without a GPU.
pub fn require_cuda() -> CommandResult<()> {
    cuda_loader::make_libraries_loadable();
    for library in [CudaLibrary::Driver, CudaLibrary::Nvrtc, CudaLibrary::CublasLt] {
        if !library_loads(library) {
            return Err(Failure::execution(&RunError::from(CudaError::LibraryMissing(library))));
        }
    }
    if let Some(outdated) = outdated_driver() {
        let problem = Problem::new("--backend", outdated)
            .hint(CudaLibrary::Driver.install_hint())
            .hint("--backend cpu");
        return Err(Failure::failed(vec![problem]));
    }
    let message = match gpus() {
        Ok(gpus) if gpus.is_empty() => "this machine has no GPU".to_owned(),
        Ok(_) if cache_dir().is_none() => {
            "compiled kernels need a cache folder, and neither XDG_CACHE_HOME nor HOME is set"
                .to_owned()
        }
        Ok(_) => return Ok(()),
        Err(error) => format!("the NVIDIA driver does not initialise: {error}"),
    };
    let problem = Problem::new("--backend", message)
        .hint("`narrows doctor` reports what is missing")
        .hint("--backend cpu");
    Err(Failure::failed(vec![problem]))
}

/// Name of this machine's first GPU with the versions of its driver and libraries, which identify a measurement; `None`
/// without a GPU.
pub fn description() -> Option<String> {
    let gpu = gpus().ok()?.into_iter().next()?;
    let version = |library: CudaLibrary, name: &str| {
        format!("{name} {}", library_version(library).unwrap_or_else(|| "unknown".into()))
    };
    let mut parts = vec![
        gpu.name,
        version(CudaLibrary::Driver, "driver for CUDA"),
        version(CudaLibrary::CublasLt, "cuBLASLt"),
    ];
    for (library, name) in [(CudaLibrary::Cudnn, "cuDNN"), (CudaLibrary::Nccl, "NCCL")] {
        if library_loads(library) {
            parts.push(version(library, name));
        }
    }
    Some(parts.join(", "))
}

/// The model of this machine's first GPU.
pub fn first(process: Option<&LaunchedProcess>) -> Option<GpuModel> {
    let gpus = gpus().ok()?;
    let visible = u32::try_from(gpus.len()).unwrap_or(u32::MAX);
    let local_processes = process.map_or(1, |process| process.launch.local_world_size);
    let gpu = gpus.into_iter().next()?;
    Some(GpuModel {
        name: gpu.name,
        capability: gpu.capability,
        multiprocessors: gpu.multiprocessors,
        memory: gpu.memory,
        // A launcher may make a single GPU visible to each process.
        devices_per_node: visible.max(u32::try_from(local_processes).unwrap_or(u32::MAX)),
    })
}

/// The hardware preset for runs on this machine's first GPU.
pub fn preset_for_runs() -> &'static str {
    first(None).map_or(FALLBACK_PRESET, |gpu| gpu.preset_for_runs())
}

/// Options of the session of a process on the GPU of its rank within the node, with graphs and the fastest kernels.
pub fn session_options(process: Option<&LaunchedProcess>) -> GpuOptions {
    let local_rank = process.map_or(0, |process| process.launch.local_rank);
    // If a launcher makes a single GPU visible to a process, its ordinal is 0.
    let ordinal = if gpu_count() == Ok(1) { 0 } else { local_rank };
    let folder = cache_dir().unwrap_or_default();
    let (cubin_folder, algorithm_folder) = (folder.join("cubins"), folder.join("algorithms"));
    let timeout = process.map_or(ClusterTimeouts::DEFAULT, |process| process.timeouts).collective;
    GpuOptions {
        ordinal,
        eager: false,
        attention: AttentionKernels::Fastest,
        cubin_folder,
        algorithm_folder,
        timeout,
    }
}
