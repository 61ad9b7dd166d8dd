//! Which GPUs a run may have, before anything is planned for them, and which of them a process uses.

use narrows_cluster::ClusterTimeouts;
use narrows_cuda::{
    CudaError, CudaLibrary, GpuOptions, gpu_count, gpus, library_loads, outdated_driver,
};
use narrows_runtime::RunError;

use super::launch::LaunchedProcess;
use crate::calibrate::{cache, gpu};
use crate::errors::{CommandResult, Failure, Problem};
use crate::loader;

/// Where there is nothing to look at: the GPU that most is published of.
const OTHERWISE: &str = "a100-80gb";

/// Brings the libraries of CUDA within reach, and refuses a machine without them or without a GPU.
pub fn admit() -> CommandResult<()> {
    loader::bring_within_reach();
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
    let problem = match gpus() {
        Ok(gpus) if gpus.is_empty() => "this machine shows no GPU".to_owned(),
        Ok(_) if cache::folder().is_none() => {
            "there is neither a home nor a cache folder to keep compiled kernels in".to_owned()
        }
        Ok(_) => return Ok(()),
        Err(why) => format!("NVIDIA's driver does not come up: {why}"),
    };
    let problem = Problem::new("--backend", problem)
        .hint("`narrows doctor` says what is there")
        .hint("--backend cpu");
    Err(Failure::failed(vec![problem]))
}

/// The preset of this machine's first GPU, or the nearest to it.
pub fn profile() -> &'static str {
    gpu::first(None).map_or(OTHERWISE, |gpu| gpu.nearest_preset().0)
}

/// How a process uses its GPU: of those of a node, the one of its number.
pub fn options(launched: Option<&LaunchedProcess>, eager: bool) -> GpuOptions {
    let local = launched.map_or(0, |launched| launched.launch.local_rank);
    // Who shows each process one GPU shows it its own.
    let ordinal = if gpu_count() == Ok(1) { 0 } else { local };
    let folder = cache::folder().unwrap_or_default();
    let (cubin_folder, algorithm_folder) = (folder.join("cubins"), folder.join("algorithms"));
    let timeout =
        launched.map_or(ClusterTimeouts::default(), |launched| launched.deadlines).collective;
    GpuOptions { ordinal, eager, cubin_folder, algorithm_folder, timeout }
}
