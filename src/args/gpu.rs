//! Which GPUs a run may have, before anything is planned for them.

use narrows_runtime::RunError;
use narrows_runtime::cuda::libraries::Library;
use narrows_runtime::cuda::{CudaError, machine};

use crate::calibrate::cache;
use crate::errors::{Failure, Outcome, Problem};
use crate::loader;

/// Presets by what the names of their GPUs say: all of these parts.
const PRESETS: [(&[&str], &str); 4] = [
    (&["NVIDIA H200"], "h200-sxm"),
    (&["NVIDIA H100"], "h100-sxm"),
    (&["A100", "40GB"], "a100-40gb"),
    (&["A100"], "a100-80gb"),
];

/// Where there is nothing to look at: the GPU that most is published of.
const OTHERWISE: &str = "a100-80gb";

/// Brings the libraries of CUDA within reach, and refuses a machine without them or without a GPU.
pub fn admit() -> Outcome<()> {
    loader::bring_within_reach();
    for library in [Library::Driver, Library::Nvrtc, Library::CublasLt] {
        if !machine::loads(library) {
            return Err(Failure::execution(&RunError::from(CudaError::Absent(library))));
        }
    }
    let problem = match machine::gpus() {
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

/// The preset of this machine's first GPU.
pub fn profile() -> &'static str {
    let gpus = machine::gpus().unwrap_or_default();
    let name = gpus.first().map_or("", |gpu| gpu.name.as_str());
    let preset = PRESETS.iter().find(|(parts, _)| parts.iter().all(|part| name.contains(part)));
    preset.map_or(OTHERWISE, |(_, preset)| preset)
}
