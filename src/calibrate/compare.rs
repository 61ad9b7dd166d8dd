//! The closed loop of `calibrate --compare`.

use narrows_calibration::validation::{ClosedLoop, MeasuredPlan, closed_loop};
use narrows_cost_model::Profile;
use narrows_runtime::DeviceId;

use super::{PlannedBenchmark, machine};

/// Compares the predictions of a profile with measured plans. `source` is for the provenance of the step error.
pub fn compare(profile: &Profile, benchmarks: &[PlannedBenchmark], source: &str) -> ClosedLoop {
    let measured: Vec<MeasuredPlan> = benchmarks.iter().filter_map(measured_plan).collect();
    closed_loop(profile, &measured, source, &machine::today())
}

/// The measurements of a plan; `None` without a round.
fn measured_plan(planned: &PlannedBenchmark) -> Option<MeasuredPlan<'_>> {
    let shortest = planned.shortest()?;
    let program = planned.program.program();
    let mesh = program.context.mesh;
    let arena = |device: usize| program.stages[DeviceId(device as u64).stage(&mesh)].arena.0;
    let mut allocated = shortest.allocated_bytes.iter().enumerate();
    let rounds = planned.rounds.iter().map(|round| round.whole_step_s);
    let fastest = rounds.clone().fold(f64::INFINITY, f64::min);
    Some(MeasuredPlan {
        name: planned.benchmark.name.clone(),
        task: planned.benchmark.task.clone(),
        widths_measured: planned.benchmark.widths_measured,
        program: &planned.program,
        step_time_s: shortest.whole_step_s,
        min_instruction_sum_s: shortest.undisturbed_step_s(),
        spread: rounds.fold(0.0, f64::max) / fastest - 1.0,
        memory_exact: allocated.all(|(device, bytes)| *bytes == arena(device)),
    })
}
