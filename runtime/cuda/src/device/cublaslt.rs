//! Matmuls by cuBLASLt: descriptors, and selection of the fastest algorithms.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::mem::{MaybeUninit, size_of};
use std::ptr;

use cudarc::cublas::sys::cublasOperation_t;
use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtMatmulAlgo_t, cublasLtMatmulDescAttributes_t as Desc,
    cublasLtMatmulHeuristicResult_t, cublasLtMatmulPreferenceAttributes_t as Pref,
    cublasLtMatrixLayoutAttribute_t as Layout, cublasStatus_t, cudaDataType_t,
};
use cudarc::driver::sys::{CUdeviceptr, CUevent_flags};
use cudarc::driver::{CudaStream, DriverError};
use narrows_plan::DType;

use super::gpu::{DeviceMemory, OpenGpu};
use crate::discovery;
use crate::error::CudaError;
use crate::libraries::CudaLibrary;
use crate::matmul::{AlgorithmStore, MatmulAlgorithm, MatmulKey, StoredMatrix, Transpose};

/// Maximum number of algorithms that are timed per matmul.
const CANDIDATES_MAX: usize = 12;

/// Timed runs per algorithm, after one warm-up run.
const TIMED_RUNS: usize = 4;

/// Reduction scheme of matmuls that split k, with partial sums in f32 (`CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE`).
/// Algorithms that do not split k are always allowed.
const REDUCE_IN_F32: u32 = 2;

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

/// Descriptors that are destroyed on drop.
struct MatmulDescriptors {
    operation: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
}

/// Addresses of A, B and C.
pub(crate) type MatmulPointers = [CUdeviceptr; 3];

impl CublasLt {
    /// Loads cuBLASLt and allocates a workspace.
    ///
    /// # Errors
    /// When the library does not load, or the workspace does not fit.
    pub fn open(gpu: &OpenGpu, workspace_bytes: u64) -> Result<CublasLt, CudaError> {
        if !discovery::library_loads(CudaLibrary::CublasLt) {
            return Err(CudaError::LibraryMissing(CudaLibrary::CublasLt));
        }
        let workspace = DeviceMemory::new(gpu, "the workspace of matmuls", workspace_bytes)?;
        let handle =
            result::create_handle().map_err(|error| CudaError::matmul("initialisation", error))?;
        Ok(CublasLt { handle, plans: HashMap::new(), workspace })
    }

    /// Size of the workspace.
    pub fn workspace_bytes(&self) -> u64 {
        self.workspace.bytes()
    }

    /// Selects the fastest algorithm of every matmul for which `store` has no supported one, by timing candidates on
    /// `stream`. The memory at the pointers must be zeros, and still is afterwards.
    ///
    /// # Errors
    /// When a matmul is not supported.
    pub fn tune(
        &self,
        gpu: &OpenGpu,
        matmuls: &BTreeMap<MatmulKey, MatmulPointers>,
        store: &mut AlgorithmStore,
        stream: &CudaStream,
    ) -> Result<(), CudaError> {
        for (key, pointers) in matmuls {
            let descriptors =
                MatmulDescriptors::new(key).map_err(|error| matmul_error(key, error))?;
            let stored = store.get(key);
            if stored.is_some_and(|stored| self.is_supported(&descriptors, key, stored)) {
                continue;
            }
            let rejected = stored.is_some();
            let fastest = self.fastest(gpu, &descriptors, key, *pointers, stream)?;
            match rejected {
                true => store.replace(*key, fastest),
                false => store.insert(*key, fastest),
            }
        }
        // Candidates that are still running use the shared workspace.
        gpu.check("selecting algorithms", stream.synchronize())
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
        [a, b, c]: MatmulPointers,
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
                c as *mut c_void,
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

    fn fastest(
        &self,
        gpu: &OpenGpu,
        descriptors: &MatmulDescriptors,
        key: &MatmulKey,
        pointers: MatmulPointers,
        stream: &CudaStream,
    ) -> Result<MatmulAlgorithm, CudaError> {
        let candidates =
            self.candidates(descriptors, key).map_err(|error| matmul_error(key, error))?;
        let beta = if key.accumulate { 1.0 } else { 0.0 };
        let timed = CUevent_flags::CU_EVENT_DEFAULT;
        let events = gpu.context.new_event(Some(timed)).and_then(|begin| {
            let end = gpu.context.new_event(Some(timed))?;
            Ok((begin, end))
        });
        let (begin, end) = gpu.check("events to time matmuls", events)?;
        let mut best: Option<(f32, &cublasLtMatmulHeuristicResult_t)> = None;
        for candidate in &candidates {
            let run = || self.run(descriptors, &candidate.algo, beta, pointers, stream);
            // Skips algorithms that fail when they run.
            if run().is_err() {
                continue;
            }
            let time = || -> Result<Option<f32>, DriverError> {
                begin.record(stream)?;
                for _ in 0..TIMED_RUNS {
                    if run().is_err() {
                        return Ok(None);
                    }
                }
                end.record(stream)?;
                begin.elapsed_ms(&end).map(Some)
            };
            let Some(elapsed_ms) = gpu.check(&describe(key), time())? else { continue };
            if best.is_none_or(|(least, _)| elapsed_ms < least) {
                best = Some((elapsed_ms, candidate));
            }
        }
        let Some((_, best)) = best else {
            let message = format!("none of {} algorithms runs", candidates.len());
            return Err(CudaError::Matmul { matmul: describe(key), message, hint: None });
        };
        Ok(MatmulAlgorithm { data: best.algo.data, workspace_bytes: best.workspaceSize as u64 })
    }

    /// Candidate algorithms, in the order of cuBLASLt's heuristic.
    fn candidates(
        &self,
        descriptors: &MatmulDescriptors,
        key: &MatmulKey,
    ) -> Result<Vec<cublasLtMatmulHeuristicResult_t>, CublasError> {
        let preference = MatmulPreference(result::create_matmul_pref()?);
        let alignment = |stored: &StoredMatrix| stored.alignment_bytes as u32;
        preference.set(Pref::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, key.workspace_bytes)?;
        preference.set(Pref::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, REDUCE_IN_F32)?;
        let c = alignment(&key.c);
        for (attribute, bytes) in [
            (Pref::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(&key.a)),
            (Pref::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(&key.b)),
            (Pref::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c),
            (Pref::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, c),
        ] {
            preference.set(attribute, bytes)?;
        }
        // SAFETY: zero is a valid value of every field.
        let empty: cublasLtMatmulHeuristicResult_t = unsafe { MaybeUninit::zeroed().assume_init() };
        let mut candidates = vec![empty; CANDIDATES_MAX];
        let mut count = 0;
        let MatmulDescriptors { operation, layouts: [a, b, c] } = descriptors;
        // SAFETY: the descriptors are valid, and the array has room for the requested number.
        unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                *operation,
                *a,
                *b,
                *c,
                *c,
                preference.0,
                CANDIDATES_MAX as i32,
                candidates.as_mut_ptr(),
                &raw mut count,
            )
        }
        .result()?;
        candidates.truncate(usize::try_from(count).unwrap_or(0));
        candidates.retain(|candidate| candidate.state == cublasStatus_t::CUBLAS_STATUS_SUCCESS);
        match candidates.is_empty() {
            true => Err(CublasError(cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)),
            false => Ok(candidates),
        }
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        self.plans.clear();
        // SAFETY: the handle is valid, and not used afterwards.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

impl MatmulDescriptors {
    fn new(key: &MatmulKey) -> Result<MatmulDescriptors, CublasError> {
        let (compute, scale) =
            (cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType_t::CUDA_R_32F);
        let operation = result::create_matmul_desc(compute, scale)?;
        let mut descriptors = MatmulDescriptors { operation, layouts: [ptr::null_mut(); 3] };
        for (attribute, transpose) in [
            (Desc::CUBLASLT_MATMUL_DESC_TRANSA, key.operation_a),
            (Desc::CUBLASLT_MATMUL_DESC_TRANSB, key.operation_b),
        ] {
            let transpose = match transpose {
                Transpose::N => cublasOperation_t::CUBLAS_OP_N,
                Transpose::T => cublasOperation_t::CUBLAS_OP_T,
            } as i32;
            let (value, size) = (ptr::from_ref(&transpose).cast(), size_of::<i32>());
            // SAFETY: the attribute has 32 bits.
            unsafe { result::set_matmul_desc_attribute(operation, attribute, value, size) }?;
        }
        for (slot, stored) in descriptors.layouts.iter_mut().zip([&key.a, &key.b, &key.c]) {
            *slot = layout(stored, key.batch)?;
        }
        Ok(descriptors)
    }
}

fn layout(stored: &StoredMatrix, batch: u64) -> Result<sys::cublasLtMatrixLayout_t, CublasError> {
    let dtype = match stored.dtype {
        DType::Bf16 => cudaDataType_t::CUDA_R_16BF,
        _ => cudaDataType_t::CUDA_R_32F,
    };
    let StoredMatrix { rows, columns, leading_dimension, batch_stride, .. } = *stored;
    let layout = result::create_matrix_layout(dtype, rows, columns, leading_dimension as i64)?;
    if batch > 1 {
        let (count, stride) = (batch as i32, batch_stride as i64);
        // SAFETY: the attributes have 32 and 64 bits.
        unsafe {
            let (value, size) = (ptr::from_ref(&count).cast(), size_of::<i32>());
            let attribute = Layout::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT;
            result::set_matrix_layout_attribute(layout, attribute, value, size)?;
            let (value, size) = (ptr::from_ref(&stride).cast(), size_of::<i64>());
            let attribute = Layout::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
            result::set_matrix_layout_attribute(layout, attribute, value, size)?;
        }
    }
    Ok(layout)
}

impl Drop for MatmulDescriptors {
    fn drop(&mut self) {
        // SAFETY: the descriptors are valid, and not used afterwards.
        unsafe {
            for layout in self.layouts.iter().filter(|layout| !layout.is_null()) {
                let _ = result::destroy_matrix_layout(*layout);
            }
            let _ = result::destroy_matmul_desc(self.operation);
        }
    }
}

struct MatmulPreference(sys::cublasLtMatmulPreference_t);

impl MatmulPreference {
    fn set<T>(&self, attribute: Pref, value: T) -> Result<(), CublasError> {
        let (value, size) = (ptr::from_ref(&value).cast(), size_of::<T>());
        // SAFETY: callers pass values of the attribute's type.
        unsafe { result::set_matmul_pref_attribute(self.0, attribute, value, size) }
    }
}

impl Drop for MatmulPreference {
    fn drop(&mut self) {
        // SAFETY: the preference is valid, and not used afterwards.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
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
