//! Products on a GPU: descriptors made once, algorithms tried once and kept.

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

use super::super::error::CudaError;
use super::super::libraries::CudaLibrary;
use super::super::machine;
use super::super::products::{AlgorithmStore, MatmulAlgorithm, MatmulKey, StoredMatrix, Transpose};
use super::gpu::{DeviceMemory, OpenGpu};

/// Candidates that are tried of a product.
const CANDIDATES: usize = 12;

/// How often each is timed, after once that is not.
const ROUNDS: usize = 4;

/// A reduction scheme of products that are cut along k: partial sums in f32, added in one order.
/// `CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE`; not cutting is always allowed.
const IN_F32: u32 = 2;

/// Products of one GPU.
pub struct CublasLt {
    handle: sys::cublasLtHandle_t,
    plans: HashMap<MatmulKey, MatmulPlan>,
    workspace: DeviceMemory,
}

// SAFETY: a handle may be used by any thread, one at a time; descriptors are plain memory.
unsafe impl Send for CublasLt {}

/// A product, ready but for addresses.
struct MatmulPlan {
    described: MatmulDescriptors,
    algorithm: cublasLtMatmulAlgo_t,
    beta: f32,
}

/// Descriptors, which are freed.
struct MatmulDescriptors {
    product: sys::cublasLtMatmulDesc_t,
    sides: [sys::cublasLtMatrixLayout_t; 3],
}

/// Where the operands of a product begin: A, B, C.
pub type MatmulPointers = [CUdeviceptr; 3];

impl CublasLt {
    /// Opens cuBLASLt.
    ///
    /// # Errors
    /// When it does not load, or `workspace_bytes` do not fit.
    pub fn open(gpu: &OpenGpu, workspace_bytes: u64) -> Result<CublasLt, CudaError> {
        if !machine::loads(CudaLibrary::CublasLt) {
            return Err(CudaError::Absent(CudaLibrary::CublasLt));
        }
        let workspace = DeviceMemory::new(gpu, "memory for products", workspace_bytes)?;
        let handle =
            result::create_handle().map_err(|error| CudaError::product("opening", error))?;
        Ok(CublasLt { handle, plans: HashMap::new(), workspace })
    }

    /// Bytes that products may use besides their operands.
    pub fn workspace_bytes(&self) -> u64 {
        self.workspace.bytes()
    }

    /// Finds the fastest algorithm of every product that `store` has none of that works, on `stream`. What
    /// is at the places must be zeros, and still is then.
    ///
    /// # Errors
    /// When a product cannot be made.
    pub fn find(
        &self,
        gpu: &OpenGpu,
        products: &BTreeMap<MatmulKey, MatmulPointers>,
        store: &mut AlgorithmStore,
        stream: &CudaStream,
    ) -> Result<(), CudaError> {
        for (key, places) in products {
            let described = MatmulDescriptors::new(key).map_err(|error| named(key, error))?;
            let kept = store.get(key);
            if kept.is_some_and(|kept| self.works(&described, key, kept)) {
                continue;
            }
            let rejected = kept.is_some();
            let found = self.fastest(gpu, &described, key, *places, stream)?;
            match rejected {
                true => store.replace(*key, found),
                false => store.insert(*key, found),
            }
        }
        // What a candidate left behind uses the workspace of all.
        gpu.said("looking for algorithms", stream.synchronize())
    }

    /// Prepares products with these algorithms, and makes each once where [`find`](CublasLt::find) would:
    /// what the driver loads when it is first asked for cannot be loaded while a collective waits.
    ///
    /// # Errors
    /// When one has none, or it does not work here.
    pub fn prepare(
        &mut self,
        gpu: &OpenGpu,
        products: &BTreeMap<MatmulKey, MatmulPointers>,
        algorithm: impl Fn(&MatmulKey) -> Option<MatmulAlgorithm>,
    ) -> Result<(), CudaError> {
        let stream = gpu.stream(false)?;
        for (key, places) in products {
            let described = MatmulDescriptors::new(key).map_err(|error| named(key, error))?;
            let kept = algorithm(key).filter(|kept| self.works(&described, key, kept));
            let Some(kept) = kept else {
                let product = title(key);
                let said = "process 0 chose an algorithm that this GPU or this version of cuBLASLt \
                    does not have (try: the same GPUs and libraries for all processes)";
                return Err(CudaError::Product { product, said: said.into() });
            };
            let beta = if key.accumulate { 1.0 } else { 0.0 };
            let algorithm = cublasLtMatmulAlgo_t { data: kept.data };
            self.plans.insert(*key, MatmulPlan { described, algorithm, beta });
            self.start(key, *places, &stream)?;
        }
        gpu.said("trying products", stream.synchronize())
    }

    /// Puts a prepared product on a stream.
    ///
    /// # Errors
    /// When it is not prepared, or cuBLASLt refuses it.
    pub fn start(
        &self,
        key: &MatmulKey,
        places: MatmulPointers,
        stream: &CudaStream,
    ) -> Result<(), CudaError> {
        let Some(plan) = self.plans.get(key) else {
            return Err(CudaError::Product { product: title(key), said: "not prepared".into() });
        };
        self.run(&plan.described, &plan.algorithm, plan.beta, places, stream)
            .map_err(|error| named(key, error))
    }

    fn run(
        &self,
        described: &MatmulDescriptors,
        algorithm: &cublasLtMatmulAlgo_t,
        beta: f32,
        [a, b, c]: MatmulPointers,
        stream: &CudaStream,
    ) -> Result<(), CublasError> {
        let alpha = 1.0_f32;
        let MatmulDescriptors { product, sides } = described;
        // SAFETY: descriptors live, the operands are where the program has them (`bounds`), and the
        // workspace is used by one stream alone.
        unsafe {
            result::matmul(
                self.handle,
                *product,
                ptr::from_ref(&alpha).cast(),
                ptr::from_ref(&beta).cast(),
                a as *const c_void,
                sides[0],
                b as *const c_void,
                sides[1],
                c as *const c_void,
                sides[2],
                c as *mut c_void,
                sides[2],
                algorithm,
                self.workspace.at(0) as *mut c_void,
                self.workspace.bytes() as usize,
                stream.cu_stream().cast(),
            )
        }
    }

    /// Whether an algorithm does a product here, in the memory there is.
    fn works(
        &self,
        described: &MatmulDescriptors,
        key: &MatmulKey,
        kept: &MatmulAlgorithm,
    ) -> bool {
        let algorithm = cublasLtMatmulAlgo_t { data: kept.data };
        let mut found = MaybeUninit::<cublasLtMatmulHeuristicResult_t>::zeroed();
        let MatmulDescriptors { product, sides: [a, b, c] } = described;
        // SAFETY: descriptors live, and the result is valid to write.
        let status = unsafe {
            sys::cublasLtMatmulAlgoCheck(
                self.handle,
                *product,
                *a,
                *b,
                *c,
                *c,
                &raw const algorithm,
                found.as_mut_ptr(),
            )
        };
        // SAFETY: zeros are a value of every field.
        let found = unsafe { found.assume_init() };
        status == cublasStatus_t::CUBLAS_STATUS_SUCCESS
            && found.workspaceSize as u64 <= key.workspace_bytes
    }

    fn fastest(
        &self,
        gpu: &OpenGpu,
        described: &MatmulDescriptors,
        key: &MatmulKey,
        places: MatmulPointers,
        stream: &CudaStream,
    ) -> Result<MatmulAlgorithm, CudaError> {
        let candidates = self.candidates(described, key).map_err(|error| named(key, error))?;
        let beta = if key.accumulate { 1.0 } else { 0.0 };
        let timed = CUevent_flags::CU_EVENT_DEFAULT;
        let events = gpu.context.new_event(Some(timed)).and_then(|begin| {
            let end = gpu.context.new_event(Some(timed))?;
            Ok((begin, end))
        });
        let (begin, end) = gpu.said("events to time products", events)?;
        let mut best: Option<(f32, &cublasLtMatmulHeuristicResult_t)> = None;
        for candidate in &candidates {
            let run = || self.run(described, &candidate.algo, beta, places, stream);
            // One that is refused when it is run is none.
            if run().is_err() {
                continue;
            }
            let time = || -> Result<Option<f32>, DriverError> {
                begin.record(stream)?;
                for _ in 0..ROUNDS {
                    if run().is_err() {
                        return Ok(None);
                    }
                }
                end.record(stream)?;
                begin.elapsed_ms(&end).map(Some)
            };
            let Some(took) = gpu.said(&title(key), time())? else { continue };
            if best.is_none_or(|(least, _)| took < least) {
                best = Some((took, candidate));
            }
        }
        let Some((_, best)) = best else {
            let said = format!("none of {} algorithms runs", candidates.len());
            return Err(CudaError::Product { product: title(key), said });
        };
        Ok(MatmulAlgorithm { data: best.algo.data, workspace_bytes: best.workspaceSize as u64 })
    }

    /// What cuBLASLt would take, the likeliest first.
    fn candidates(
        &self,
        described: &MatmulDescriptors,
        key: &MatmulKey,
    ) -> Result<Vec<cublasLtMatmulHeuristicResult_t>, CublasError> {
        let preference = MatmulPreference(result::create_matmul_pref()?);
        let alignment = |stored: &StoredMatrix| stored.alignment_bytes as u32;
        preference.set(Pref::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, key.workspace_bytes)?;
        preference.set(Pref::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, IN_F32)?;
        let c = alignment(&key.c);
        for (attribute, bytes) in [
            (Pref::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(&key.a)),
            (Pref::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(&key.b)),
            (Pref::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c),
            (Pref::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, c),
        ] {
            preference.set(attribute, bytes)?;
        }
        // SAFETY: zeros are a value of every field.
        let none: cublasLtMatmulHeuristicResult_t = unsafe { MaybeUninit::zeroed().assume_init() };
        let mut found = vec![none; CANDIDATES];
        let mut count = 0;
        let MatmulDescriptors { product, sides: [a, b, c] } = described;
        // SAFETY: descriptors live, and there is room for as many as are asked for.
        unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                *product,
                *a,
                *b,
                *c,
                *c,
                preference.0,
                CANDIDATES as i32,
                found.as_mut_ptr(),
                &raw mut count,
            )
        }
        .result()?;
        found.truncate(usize::try_from(count).unwrap_or(0));
        found.retain(|candidate| candidate.state == cublasStatus_t::CUBLAS_STATUS_SUCCESS);
        match found.is_empty() {
            true => Err(CublasError(cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)),
            false => Ok(found),
        }
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        self.plans.clear();
        // SAFETY: it was created, and is not used afterwards.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

impl MatmulDescriptors {
    fn new(key: &MatmulKey) -> Result<MatmulDescriptors, CublasError> {
        let (compute, scale) =
            (cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType_t::CUDA_R_32F);
        let product = result::create_matmul_desc(compute, scale)?;
        let mut made = MatmulDescriptors { product, sides: [ptr::null_mut(); 3] };
        for (attribute, operation) in [
            (Desc::CUBLASLT_MATMUL_DESC_TRANSA, key.operation_a),
            (Desc::CUBLASLT_MATMUL_DESC_TRANSB, key.operation_b),
        ] {
            let operation = match operation {
                Transpose::N => cublasOperation_t::CUBLAS_OP_N,
                Transpose::T => cublasOperation_t::CUBLAS_OP_T,
            } as i32;
            let (value, size) = (ptr::from_ref(&operation).cast(), size_of::<i32>());
            // SAFETY: the attribute is 32 bits.
            unsafe { result::set_matmul_desc_attribute(product, attribute, value, size) }?;
        }
        for (side, stored) in made.sides.iter_mut().zip([&key.a, &key.b, &key.c]) {
            *side = layout(stored, key.batch)?;
        }
        Ok(made)
    }
}

fn layout(stored: &StoredMatrix, batch: u64) -> Result<sys::cublasLtMatrixLayout_t, CublasError> {
    let dtype = match stored.dtype {
        DType::Bf16 => cudaDataType_t::CUDA_R_16BF,
        _ => cudaDataType_t::CUDA_R_32F,
    };
    let StoredMatrix { rows, columns, leading, batch_stride, .. } = *stored;
    let made = result::create_matrix_layout(dtype, rows, columns, leading as i64)?;
    if batch > 1 {
        let (count, stride) = (batch as i32, batch_stride as i64);
        // SAFETY: the attributes are 32 and 64 bits.
        unsafe {
            let (value, size) = (ptr::from_ref(&count).cast(), size_of::<i32>());
            let attribute = Layout::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT;
            result::set_matrix_layout_attribute(made, attribute, value, size)?;
            let (value, size) = (ptr::from_ref(&stride).cast(), size_of::<i64>());
            let attribute = Layout::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
            result::set_matrix_layout_attribute(made, attribute, value, size)?;
        }
    }
    Ok(made)
}

impl Drop for MatmulDescriptors {
    fn drop(&mut self) {
        // SAFETY: they were created, and are not used afterwards.
        unsafe {
            for side in self.sides.iter().filter(|side| !side.is_null()) {
                let _ = result::destroy_matrix_layout(*side);
            }
            let _ = result::destroy_matmul_desc(self.product);
        }
    }
}

struct MatmulPreference(sys::cublasLtMatmulPreference_t);

impl MatmulPreference {
    fn set<T>(&self, attribute: Pref, value: T) -> Result<(), CublasError> {
        let (value, size) = (ptr::from_ref(&value).cast(), size_of::<T>());
        // SAFETY: callers give attributes values of their size.
        unsafe { result::set_matmul_pref_attribute(self.0, attribute, value, size) }
    }
}

impl Drop for MatmulPreference {
    fn drop(&mut self) {
        // SAFETY: it was created, and is not used afterwards.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}

/// What messages call a product.
fn title(key: &MatmulKey) -> String {
    let MatmulKey { m, n, k, batch, .. } = key;
    let times = if *batch > 1 { format!(", {batch} times") } else { String::new() };
    format!("{m}×{n}×{k}{times}, {} into {}", key.a.dtype.name(), key.c.dtype.name())
}

fn named(key: &MatmulKey, error: CublasError) -> CudaError {
    CudaError::product(&title(key), error)
}
