//! The rate of GEMMs on a CPU whose operands are rounded to bf16, over that in f32.

use narrows_cpu::CpuOptions;
use narrows_cpu::kernels::supports_bf16;
use narrows_plan::Kernel;
use narrows_runtime::{GemmDtype, InstructionTimings, MeasurementEffort, time_instructions};

use super::PlannedBenchmark;
use crate::errors::{CommandResult, Failure};

/// Rounds, in each of which both formats run.
const ROUNDS: usize = 2;

/// The geometric mean over the GEMMs of a benchmark on one device with `threads` threads, each by its shortest time. `None` where the
/// processor does not multiply bf16.
///
/// # Errors
/// A step that cannot be executed.
pub fn bf16_rate_ratio(
    benchmark: &PlannedBenchmark,
    threads: u64,
    effort: MeasurementEffort,
) -> CommandResult<Option<f64>> {
    if !supports_bf16() {
        return Ok(None);
    }
    let model = &benchmark.benchmark.request.model;
    let round = |gemm_dtype| {
        let options = CpuOptions { gemm_dtype, ..CpuOptions::new(threads as usize) };
        let mut session = options.open(model, benchmark.program.clone(), None)?;
        session.initialise_for_measurement(model)?;
        time_instructions(&mut session, effort)
    };
    let mut shortest: Option<[InstructionTimings; 2]> = None;
    for _ in 0..ROUNDS {
        let [exact, rounded] = [GemmDtype::F32, GemmDtype::Bf16].map(round);
        let failure = |error| Failure::execution(&error);
        let timings = [exact.map_err(failure)?, rounded.map_err(failure)?];
        match &mut shortest {
            None => shortest = Some(timings),
            Some(shortest) => {
                shortest.iter_mut().zip(&timings).for_each(|(own, other)| own.keep_shortest(other));
            }
        }
    }
    let Some(shortest) = shortest else { return Ok(None) };
    let [exact, rounded] = shortest.map(|timings| timings.samples(benchmark.program.program()));
    let gemms = exact.iter().zip(&rounded);
    let gemms = gemms.filter(|(exact, _)| matches!(exact.kernel, Kernel::Gemm(_)));
    let logs: Vec<f64> =
        gemms.map(|(exact, rounded)| (exact.seconds / rounded.seconds).ln()).collect();
    let mean = (logs.iter().sum::<f64>() / logs.len() as f64).exp();
    Ok(Some(mean).filter(|ratio| ratio.is_finite()))
}
