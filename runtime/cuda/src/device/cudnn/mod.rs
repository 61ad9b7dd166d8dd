//! Attention by cuDNN, where the library is found and has a plan for it.
//!
//! The library of Python packages is one of CUDA's by file name only: no header or toolkit is needed. Plans are built
//! once per [`AttentionKey`], when a session opens; executions are enqueued on the compute stream, and captured as any
//! other kernel.

mod attention_graph;
mod descriptor;
mod graph;
mod plan;

use std::collections::BTreeMap;
use std::ptr;

use cudarc::cudnn::sys;
use cudarc::driver::CudaStream;

use super::gpu::{DeviceMemory, OpenGpu};
use crate::discovery;
use crate::error::CudaError;
use crate::launch::{AttentionKey, FusedAttention};
use crate::libraries::CudaLibrary;

use descriptor::{CudnnError, check};
use plan::{AttentionPlan, Target};

pub(crate) use plan::AttentionPointers;

/// The oldest version of cuDNN whose backward engines clear the sums of their query gradients themselves.
const VERSION_MIN: usize = 90_600;

/// The first version of another major release, whose functions may differ.
const VERSION_END: usize = 100_000;

/// The cuDNN library on one GPU, with plans.
pub(crate) struct Cudnn {
    handle: sys::cudnnHandle_t,
    plans: BTreeMap<AttentionKey, AttentionPlan>,
    workspace: DeviceMemory,
}

// SAFETY: a handle may be used by any thread, one at a time; descriptors are plain memory.
unsafe impl Send for Cudnn {}

impl Cudnn {
    /// Loads cuDNN and builds plans for these attentions; `None` without any. `note` receives a line where the library is
    /// not used, or refuses some of them.
    ///
    /// # Errors
    /// When the workspace does not fit.
    pub fn open(
        gpu: &OpenGpu,
        keys: impl IntoIterator<Item = AttentionKey>,
        note: &mut dyn FnMut(&str),
    ) -> Result<Option<Cudnn>, CudaError> {
        let keys: Vec<AttentionKey> = keys.into_iter().collect();
        if keys.is_empty() {
            return Ok(None);
        }
        let handle = match usable_version().and_then(|()| create_handle()) {
            Ok(handle) => handle,
            Err(reason) => {
                note(&format!("attention runs on Narrows' own kernels, not cuDNN's: {reason}"));
                return Ok(None);
            }
        };
        let (mut plans, mut refusals) = (BTreeMap::new(), BTreeMap::new());
        for key in keys {
            match AttentionPlan::new(Target::Handle(handle), &key) {
                Ok(plan) => drop(plans.insert(key, plan)),
                Err(refusal) => drop(refusals.insert(key, refusal)),
            }
        }
        if let Some((key, refusal)) = refusals.first_key_value() {
            let count = refusals.len();
            note(&format!(
                "{count} of {} attentions run on Narrows' own kernels, since cuDNN refuses them: {}: {refusal}",
                count + plans.len(),
                describe(key)
            ));
        }
        let bytes = plans.values().map(|plan| plan.workspace_bytes).max().unwrap_or(0);
        let workspace = DeviceMemory::uninitialized(gpu, "the workspace of attention", bytes)?;
        Ok(Some(Cudnn { handle, plans, workspace }))
    }

    /// Size of the workspace.
    pub fn workspace_bytes(&self) -> u64 {
        self.workspace.bytes()
    }

    /// The pointers of an attention in an arena; `None` where it has no plan.
    ///
    /// # Errors
    /// When cuDNN refuses them.
    pub fn prepare(
        &self,
        fused: &FusedAttention,
        arena: &DeviceMemory,
    ) -> Result<Option<AttentionPointers>, CudaError> {
        let Some(plan) = self.plans.get(&fused.key) else { return Ok(None) };
        let operands = fused.operands.iter();
        let operands = operands.map(|(tensor, offset)| (*tensor as i64, arena.address(*offset)));
        let pointers = plan.pointers(operands, self.workspace.address(0));
        pointers.map(Some).map_err(|error| attention_error(&fused.key, error))
    }

    /// Enqueues a prepared attention on a stream.
    ///
    /// # Errors
    /// When cuDNN fails.
    pub fn enqueue(
        &self,
        key: &AttentionKey,
        pointers: &AttentionPointers,
        stream: &CudaStream,
    ) -> Result<(), CudaError> {
        let enqueue = || {
            // SAFETY: the handle and the stream are valid.
            let status = unsafe { sys::cudnnSetStream(self.handle, stream.cu_stream().cast()) };
            check("cudnnSetStream", status)?;
            match self.plans.get(key) {
                Some(plan) => plan.execute(self.handle, pointers),
                None => Err(CudnnError {
                    call: "executing attention".into(),
                    message: "not prepared".into(),
                }),
            }
        };
        enqueue().map_err(|error| attention_error(key, error))
    }
}

impl Drop for Cudnn {
    fn drop(&mut self) {
        self.plans.clear();
        // SAFETY: the handle is valid, and not used afterwards.
        let _ = unsafe { sys::cudnnDestroy(self.handle) };
    }
}

/// The reason why the library cannot be used, if there is one.
fn usable_version() -> Result<(), String> {
    if !discovery::library_loads(CudaLibrary::Cudnn) {
        let hint = CudaLibrary::Cudnn.install_hint();
        return Err(format!("libcudnn does not load ({hint})"));
    }
    // SAFETY: the library is loaded.
    let version = unsafe { sys::cudnnGetVersion() };
    match (VERSION_MIN..VERSION_END).contains(&version) {
        true => Ok(()),
        false => Err(format!(
            "this is cuDNN {}, and versions from {} are used, before {}",
            discovery::cudnn_version(version),
            discovery::cudnn_version(VERSION_MIN),
            discovery::cudnn_version(VERSION_END)
        )),
    }
}

fn create_handle() -> Result<sys::cudnnHandle_t, String> {
    let mut handle = ptr::null_mut();
    // SAFETY: the library is loaded, and the pointer is writable.
    let status = unsafe { sys::cudnnCreate(&raw mut handle) };
    check("cudnnCreate", status).map_err(|error| error.to_string())?;
    Ok(handle)
}

/// Workspace in bytes of the plan of an attention for a GPU that need not be there. `properties` is its description as a
/// JSON object in cuDNN's own form.
///
/// # Errors
/// When cuDNN has no plan, or is too old to plan without a GPU.
pub fn attention_workspace_without_gpu(
    properties: &str,
    key: &AttentionKey,
) -> Result<u64, String> {
    usable_version()?;
    plan::workspace_without_device(properties, key).map_err(|error| error.to_string())
}

/// Shape of an attention, for messages.
fn describe(key: &AttentionKey) -> String {
    let AttentionKey { sequences, length, heads, kv_heads, head_dim, .. } = key;
    let direction = if key.is_backward { "backward" } else { "forward" };
    format!("{direction}, {sequences}×{length}, {heads} heads of {head_dim}, {kv_heads} KV heads")
}

fn attention_error(key: &AttentionKey, error: CudnnError) -> CudaError {
    CudaError::Attention { attention: describe(key), message: error.to_string() }
}
