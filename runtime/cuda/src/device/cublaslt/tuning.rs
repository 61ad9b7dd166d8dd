//! Selection of the fastest algorithm of each matmul, by timing what cuBLASLt's heuristic proposes.
//!
//! Every candidate runs once and is timed once; the fastest few are then timed in turns over several rounds, and the
//! least median wins. Turns and medians make a drift of the clocks, or an interruption, the same for all of them. Power,
//! and with it the clocks, depends on the operands: zeros toggle no bits and run faster than any real data.

use std::collections::BTreeMap;
use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{
    self, cublasLtMatmulHeuristicResult_t, cublasLtMatmulPreferenceAttributes_t as Pref,
    cublasStatus_t,
};
use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaEvent, CudaStream, DriverError};

use super::descriptors::{MatmulDescriptors, MatmulPreference};
use super::{CublasLt, MatmulPointers, describe, matmul_error};
use crate::device::gpu::{DeviceMemory, OpenGpu};
use crate::error::CudaError;
use crate::matmul::{AlgorithmStore, MatmulAlgorithm, MatmulKey, StoredMatrix};

/// Maximum number of algorithms that are requested of the heuristic, which seldom has more.
const CANDIDATES_MAX: usize = 48;

/// Algorithms that are timed in rounds.
const FINALISTS: usize = 5;

/// Rounds of the finalists.
const ROUNDS: usize = 5;

/// Runs per measurement.
const TIMED_RUNS: usize = 3;

/// Duration of the matmuls that precede all measurements. An idle GPU takes about 0.1 s to raise its clocks.
const WARM_UP: Duration = Duration::from_millis(200);

/// Reduction scheme of matmuls that split k, with partial sums in f32 (`CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE`).
/// Algorithms that do not split k are always allowed.
const REDUCE_IN_F32: u32 = 2;

/// A proposal of the heuristic.
type Candidate = cublasLtMatmulHeuristicResult_t;

/// A matmul whose algorithm is selected.
struct UntunedMatmul<'a> {
    key: &'a MatmulKey,
    pointers: MatmulPointers,
    descriptors: MatmulDescriptors,
    candidates: Vec<Candidate>,
}

/// Events around timed work on a stream.
struct Stopwatch<'a> {
    begin: CudaEvent,
    end: CudaEvent,
    stream: &'a CudaStream,
}

impl CublasLt {
    /// Selects the fastest algorithm of every matmul for which `store` has no supported one, by timing candidates on
    /// `stream`. The pointers are addresses in `arena`, which must be zeros. It is filled with random numbers for
    /// the measurements, and is zeros again afterwards.
    ///
    /// # Errors
    /// When a matmul is not supported.
    pub fn tune(
        &self,
        gpu: &OpenGpu,
        arena: &DeviceMemory,
        matmuls: &BTreeMap<MatmulKey, MatmulPointers>,
        store: &mut AlgorithmStore,
        stream: &CudaStream,
    ) -> Result<(), CudaError> {
        let mut untuned = vec![];
        for (key, pointers) in matmuls {
            let on_error = |error| matmul_error(key, error);
            let descriptors = MatmulDescriptors::new(key).map_err(on_error)?;
            let stored = store.get(key);
            if stored.is_some_and(|stored| self.is_supported(&descriptors, key, stored)) {
                continue;
            }
            let candidates = self.candidates(&descriptors, key).map_err(on_error)?;
            untuned.push(UntunedMatmul { key, pointers: *pointers, descriptors, candidates });
        }
        let flops = |matmul: &&UntunedMatmul| {
            let MatmulKey { m, n, k, batch, .. } = matmul.key;
            u128::from(m * n) * u128::from(k * batch)
        };
        let Some(largest) = untuned.iter().max_by_key(flops) else { return Ok(()) };
        gpu.check("filling matrices", arena.fill_pseudorandom())?;
        let events = Stopwatch::on(gpu, stream)?;
        self.warm_up(gpu, largest, &events)?;
        for matmul in &untuned {
            let fastest = self.fastest(gpu, matmul, &events)?;
            match store.get(matmul.key) {
                // The stored algorithm is not supported here.
                Some(_) => store.replace(*matmul.key, fastest),
                None => store.insert(*matmul.key, fastest),
            }
        }
        // Candidates that are still running use the shared workspace.
        gpu.check("selecting algorithms", stream.synchronize())?;
        gpu.check("clearing matrices", arena.zero(0..arena.bytes()))
    }

    /// Runs a matmul until the clocks are those of a busy GPU.
    fn warm_up(
        &self,
        gpu: &OpenGpu,
        matmul: &UntunedMatmul,
        stopwatch: &Stopwatch,
    ) -> Result<(), CudaError> {
        let begin = Instant::now();
        let Some(first) = matmul.candidates.first() else { return Ok(()) };
        while begin.elapsed() < WARM_UP {
            // An algorithm that fails is dropped when it is timed.
            if self.time(gpu, matmul, first, stopwatch)?.is_none() {
                return Ok(());
            }
        }
        Ok(())
    }

    fn fastest(
        &self,
        gpu: &OpenGpu,
        matmul: &UntunedMatmul,
        stopwatch: &Stopwatch,
    ) -> Result<MatmulAlgorithm, CudaError> {
        let mut finalists = vec![];
        for candidate in &matmul.candidates {
            // The first run loads the kernel.
            let runs = self.run_candidate(matmul, candidate, stopwatch.stream).is_ok();
            if runs && let Some(first) = self.time(gpu, matmul, candidate, stopwatch)? {
                finalists.push((candidate, vec![first]));
            }
        }
        finalists.sort_by(|(_, left), (_, right)| left[0].total_cmp(&right[0]));
        finalists.truncate(FINALISTS);
        // The measurement that selected the finalists is not one of those that rank them.
        if finalists.len() > 1 {
            finalists.iter_mut().for_each(|(_, times)| times.clear());
            for _ in 0..ROUNDS {
                for (candidate, times) in &mut finalists {
                    let time = self.time(gpu, matmul, candidate, stopwatch)?;
                    times.push(time.unwrap_or(f32::INFINITY));
                }
            }
        }
        let median = |times: &[f32]| {
            let mut sorted = times.to_vec();
            sorted.sort_by(f32::total_cmp);
            sorted[sorted.len() / 2]
        };
        let fastest = finalists.iter().min_by(|(_, a), (_, b)| median(a).total_cmp(&median(b)));
        let Some((fastest, _)) = fastest else {
            let message = format!("none of {} algorithms runs", matmul.candidates.len());
            return Err(CudaError::Matmul { matmul: describe(matmul.key), message, hint: None });
        };
        let workspace_bytes = fastest.workspaceSize as u64;
        Ok(MatmulAlgorithm { data: fastest.algo.data, workspace_bytes })
    }

    fn run_candidate(
        &self,
        matmul: &UntunedMatmul,
        candidate: &Candidate,
        stream: &CudaStream,
    ) -> Result<(), CublasError> {
        let beta = if matmul.key.accumulate { 1.0 } else { 0.0 };
        self.run(&matmul.descriptors, &candidate.algo, beta, matmul.pointers, stream)
    }

    /// Milliseconds that a few runs of a candidate take; `None` if one fails.
    fn time(
        &self,
        gpu: &OpenGpu,
        matmul: &UntunedMatmul,
        candidate: &Candidate,
        stopwatch: &Stopwatch,
    ) -> Result<Option<f32>, CudaError> {
        let runs = || {
            (0..TIMED_RUNS).all(|_| self.run_candidate(matmul, candidate, stopwatch.stream).is_ok())
        };
        gpu.check(&describe(matmul.key), stopwatch.milliseconds(runs))
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

impl Stopwatch<'_> {
    fn on<'a>(gpu: &OpenGpu, stream: &'a CudaStream) -> Result<Stopwatch<'a>, CudaError> {
        let timed = Some(CUevent_flags::CU_EVENT_DEFAULT);
        let event = || gpu.check("events to time matmuls", gpu.context.new_event(timed));
        Ok(Stopwatch { begin: event()?, end: event()?, stream })
    }

    /// Milliseconds that the enqueued work takes; `None` if enqueuing it fails.
    fn milliseconds(&self, enqueue: impl Fn() -> bool) -> Result<Option<f32>, DriverError> {
        self.begin.record(self.stream)?;
        if !enqueue() {
            return Ok(None);
        }
        self.end.record(self.stream)?;
        self.begin.elapsed_ms(&self.end).map(Some)
    }
}
