//! Matmuls by cuBLASLt, with the algorithms that `tuning` selects.

mod descriptors;
mod tuning;

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{
    self, cublasLtMatmulAlgo_t, cublasLtMatmulHeuristicResult_t, cublasStatus_t,
};
use cudarc::driver::CudaStream;
use cudarc::driver::sys::CUdeviceptr;

use super::gpu::{DeviceMemory, OpenGpu};
use crate::discovery;
use crate::error::CudaError;
use crate::libraries::CudaLibrary;
use crate::matmul::{MatmulAlgorithm, MatmulKey};

use descriptors::MatmulDescriptors;

/// The cuBLASLt library on one GPU, with prepared matmuls.
pub(crate) struct CublasLt {
    handle: sys::cublasLtHandle_t,
    plans: HashMap<MatmulKey, MatmulPlan>,
    workspace: DeviceMemory,
}

// SAFETY: a handle may be used by any thread, one at a time; descriptors are plain memory.
unsafe impl Send for CublasLt {}

/// A prepared matmul, without addresses.
struct MatmulPlan {
    descriptors: MatmulDescriptors,
    algorithm: cublasLtMatmulAlgo_t,
    beta: f32,
}

/// Addresses of A, B, C and D.
pub(crate) type MatmulPointers = [CUdeviceptr; 4];

impl CublasLt {
    /// Loads cuBLASLt and allocates a workspace.
    ///
    /// # Errors
    /// When the library does not load, or the workspace does not fit.
    pub fn open(gpu: &OpenGpu, workspace_bytes: u64) -> Result<CublasLt, CudaError> {
        if !discovery::library_loads(CudaLibrary::CublasLt) {
            return Err(CudaError::LibraryMissing(CudaLibrary::CublasLt));
        }
        let workspace =
            DeviceMemory::uninitialized(gpu, "the workspace of matmuls", workspace_bytes)?;
        let handle =
            result::create_handle().map_err(|error| CudaError::matmul("initialisation", error))?;
        Ok(CublasLt { handle, plans: HashMap::new(), workspace })
    }

    /// Size of the workspace.
    pub fn workspace_bytes(&self) -> u64 {
        self.workspace.bytes()
    }

    /// Prepares matmuls with these algorithms, and runs each once at its pointers: the driver loads kernels on first
    /// use, which would block while a collective waits.
    ///
    /// # Errors
    /// When a matmul has no algorithm, or its algorithm is not supported here.
    pub fn prepare(
        &mut self,
        gpu: &OpenGpu,
        matmuls: &BTreeMap<MatmulKey, MatmulPointers>,
        algorithm: impl Fn(&MatmulKey) -> Option<MatmulAlgorithm>,
    ) -> Result<(), CudaError> {
        let stream = gpu.stream(false)?;
        for (key, pointers) in matmuls {
            let descriptors =
                MatmulDescriptors::new(key).map_err(|error| matmul_error(key, error))?;
            let stored =
                algorithm(key).filter(|stored| self.is_supported(&descriptors, key, stored));
            let Some(stored) = stored else {
                let message = "another process selected an algorithm that this GPU or this version of \
                    cuBLASLt does not support";
                return Err(CudaError::Matmul {
                    matmul: describe(key),
                    message: message.into(),
                    hint: Some("the same GPUs and libraries for all processes"),
                });
            };
            let beta = if key.accumulate { 1.0 } else { 0.0 };
            let algorithm = cublasLtMatmulAlgo_t { data: stored.data };
            self.plans.insert(*key, MatmulPlan { descriptors, algorithm, beta });
            self.enqueue(key, *pointers, &stream)?;
        }
        gpu.check("preparing matmuls", stream.synchronize())
    }

    /// Enqueues a prepared matmul on a stream.
    ///
    /// # Errors
    /// When it is not prepared, or cuBLASLt fails.
    pub fn enqueue(
        &self,
        key: &MatmulKey,
        pointers: MatmulPointers,
        stream: &CudaStream,
    ) -> Result<(), CudaError> {
        let Some(plan) = self.plans.get(key) else {
            let (matmul, message) = (describe(key), "not prepared".into());
            return Err(CudaError::Matmul { matmul, message, hint: None });
        };
        self.run(&plan.descriptors, &plan.algorithm, plan.beta, pointers, stream)
            .map_err(|error| matmul_error(key, error))
    }

    fn run(
        &self,
        descriptors: &MatmulDescriptors,
        algorithm: &cublasLtMatmulAlgo_t,
        beta: f32,
        [a, b, c, d]: MatmulPointers,
        stream: &CudaStream,
    ) -> Result<(), CublasError> {
        let alpha = 1.0_f32;
        let MatmulDescriptors { operation, layouts } = descriptors;
        // SAFETY: the descriptors are valid, the operands lie in the arena (`bounds_check`), and only one stream uses
        // the workspace.
        unsafe {
            result::matmul(
                self.handle,
                *operation,
                ptr::from_ref(&alpha).cast(),
                ptr::from_ref(&beta).cast(),
                a as *const c_void,
                layouts[0],
                b as *const c_void,
                layouts[1],
                c as *const c_void,
                layouts[2],
                d as *mut c_void,
                layouts[2],
                algorithm,
                self.workspace.address(0) as *mut c_void,
                self.workspace.bytes() as usize,
                stream.cu_stream().cast(),
            )
        }
    }

    /// Whether an algorithm supports a matmul on this GPU, within the workspace.
    fn is_supported(
        &self,
        descriptors: &MatmulDescriptors,
        key: &MatmulKey,
        stored: &MatmulAlgorithm,
    ) -> bool {
        let algorithm = cublasLtMatmulAlgo_t { data: stored.data };
        let mut result = MaybeUninit::<cublasLtMatmulHeuristicResult_t>::zeroed();
        let MatmulDescriptors { operation, layouts: [a, b, c] } = descriptors;
        // SAFETY: the descriptors are valid, and the result is writable.
        let status = unsafe {
            sys::cublasLtMatmulAlgoCheck(
                self.handle,
                *operation,
                *a,
                *b,
                *c,
                *c,
                &raw const algorithm,
                result.as_mut_ptr(),
            )
        };
        // SAFETY: zero is a valid value of every field.
        let result = unsafe { result.assume_init() };
        status == cublasStatus_t::CUBLAS_STATUS_SUCCESS
            && result.workspaceSize as u64 <= key.workspace_bytes
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        self.plans.clear();
        // SAFETY: the handle is valid, and not used afterwards.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

/// Shape and formats of a matmul, for messages.
fn describe(key: &MatmulKey) -> String {
    let MatmulKey { m, n, k, batch, .. } = key;
    let times = if *batch > 1 { format!(", batch {batch}") } else { String::new() };
    format!("{m}×{n}×{k}{times}, {} into {}", key.a.dtype.name(), key.c.dtype.name())
}

fn matmul_error(key: &MatmulKey, error: CublasError) -> CudaError {
    CudaError::matmul(&describe(key), error)
}
