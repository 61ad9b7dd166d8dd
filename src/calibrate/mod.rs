//! Measures a machine by running plans on it, and compares predictions with their step times.
//!
//! Every plan runs once in each of several rounds, so that other load of the machine affects all plans equally. The
//! shortest time of every instruction counts ([`narrows_runtime::time_instructions`]). [`gpu`] is specific to GPUs.

pub mod benchmarks;
pub mod bf16;
pub mod cache;
pub mod compare;
pub mod gpu;
pub mod kept_profile;
pub mod machine;

use indexmap::IndexMap;
use narrows_cost_model::profile::{MeasuredPoint, Repeatability};
use narrows_plan::{CheckedProgram, Kernel};
use narrows_planner::search;
use narrows_runtime::session::Session;
use narrows_runtime::{InstructionTimings, KernelSample, MeasurementEffort, time_instructions};

use crate::errors::{CommandResult, Failure};
use benchmarks::Benchmark;

/// Largest undisturbed share of a step in a profile. The share exceeds 1 on GPUs where the instructions, each timed alone,
/// take longer than the step of captured graphs.
const UNDISTURBED_MAX: f64 = 1.1;

/// A benchmark with its plan and its measurements.
pub struct PlannedBenchmark {
    /// The benchmark.
    pub benchmark: Benchmark,
    /// The program of its plan.
    pub program: CheckedProgram,
    /// The times of each round.
    pub rounds: Vec<InstructionTimings>,
}

/// Number of measurements of every benchmark.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeasurementRounds {
    /// Number of rounds.
    pub rounds: usize,
    /// Steps of each plan in a round.
    pub effort: MeasurementEffort,
}

impl PlannedBenchmark {
    /// Plans a benchmark; `None` if no plan satisfies its restrictions.
    pub fn plan(benchmark: Benchmark) -> Option<PlannedBenchmark> {
        let program = search(&benchmark.request).best?.program;
        Some(PlannedBenchmark { benchmark, program, rounds: vec![] })
    }

    /// Opens a session on the CPU, whose devices share `threads` threads.
    ///
    /// # Errors
    /// A program that cannot be executed on the CPU.
    pub fn cpu_session(&self, threads: u64) -> CommandResult<Session> {
        let per_device = (threads / self.benchmark.request.devices).max(1) as usize;
        let model = &self.benchmark.request.model;
        let session = narrows_cpu::session(model, self.program.clone(), per_device);
        session.map_err(|error| Failure::execution(&error))
    }

    /// Runs the plan for one round.
    ///
    /// # Errors
    /// A step that cannot be executed.
    pub fn run_round(
        &mut self,
        mut session: Session,
        effort: MeasurementEffort,
    ) -> CommandResult<()> {
        let failure = |error| Failure::execution(&error);
        session.initialise_for_measurement(&self.benchmark.request.model).map_err(failure)?;
        self.rounds.push(time_instructions(&mut session, effort).map_err(failure)?);
        Ok(())
    }

    /// The shortest time of every instruction over all rounds.
    pub fn shortest(&self) -> Option<InstructionTimings> {
        let mut shortest = self.rounds.first()?.clone();
        self.rounds.iter().for_each(|round| shortest.keep_shortest(round));
        Some(shortest)
    }
}

/// Runs all benchmarks in rounds, each in a session that `open` returns. `on_run` is called before each run, `on_round`
/// after each round but the last, with the number of finished rounds.
///
/// # Errors
/// A step that cannot be executed.
pub fn run_rounds(
    benchmarks: &mut [PlannedBenchmark],
    rounds: MeasurementRounds,
    mut open: impl FnMut(&PlannedBenchmark) -> CommandResult<Session>,
    mut on_run: impl FnMut(&PlannedBenchmark),
    mut on_round: impl FnMut(&[PlannedBenchmark], usize),
) -> CommandResult<()> {
    for round in 0..rounds.rounds {
        if round > 0 {
            on_round(benchmarks, round);
        }
        for benchmark in &mut *benchmarks {
            on_run(benchmark);
            let session = open(benchmark)?;
            benchmark.run_round(session, rounds.effort)?;
        }
    }
    Ok(())
}

/// Times of one kernel, summed over all plans.
#[derive(Default)]
struct KernelSum {
    seconds: f64,
    instructions: f64,
    /// Sum of the times in the fastest round of each plan.
    fastest: f64,
    /// Sum of the times in the slowest round of each plan.
    slowest: f64,
}

/// Whether the devices that ran together share the resources of one machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceSharing {
    /// Groups of threads of one CPU: a kernel takes longer the more devices run.
    Shared,
    /// GPUs: only collectives and transfers depend on the number of devices.
    Separate,
}

impl DeviceSharing {
    /// The number of devices that the time of a kernel depends on.
    fn devices_of(self, kernel: &Kernel, devices: u64) -> u64 {
        match (self, kernel) {
            (DeviceSharing::Shared, _) | (_, Kernel::Collective(_) | Kernel::Transfer(_)) => {
                devices
            }
            (DeviceSharing::Separate, _) => 1,
        }
    }
}

/// Measured kernels: means over their instructions in all plans, in the order of their first occurrence.
pub fn measured_points<'a>(
    benchmarks: impl IntoIterator<Item = &'a PlannedBenchmark>,
    sharing: DeviceSharing,
) -> Vec<MeasuredPoint> {
    let mut sums: IndexMap<(Kernel, u64), KernelSum> = IndexMap::new();
    for planned in benchmarks {
        let devices = planned.benchmark.request.devices;
        let Some(shortest) = planned.shortest() else { continue };
        let program = planned.program.program();
        let rounds: Vec<Vec<KernelSample>> =
            planned.rounds.iter().map(|round| round.samples(program)).collect();
        for (index, sample) in shortest.samples(program).into_iter().enumerate() {
            let weight = sample.instructions as f64;
            let devices = sharing.devices_of(&sample.kernel, devices);
            let sum = sums.entry((sample.kernel, devices)).or_default();
            sum.seconds += sample.seconds * weight;
            sum.instructions += weight;
            let times = rounds.iter().map(|round| round[index].seconds);
            sum.fastest += times.clone().fold(f64::INFINITY, f64::min) * weight;
            sum.slowest += times.fold(0.0, f64::max) * weight;
        }
    }
    let points = sums.into_iter().filter_map(|((kernel, devices), sum)| {
        let time_s = sum.seconds / sum.instructions;
        let spread = (sum.slowest / sum.fastest.max(1e-12) - 1.0).clamp(0.0, 1e6);
        (time_s > 1e-10).then_some(MeasuredPoint { kernel, devices, time_s, spread })
    });
    points.collect()
}

/// The repeatability of the measurements.
pub fn repeatability(benchmarks: &[PlannedBenchmark], points: &[MeasuredPoint]) -> Repeatability {
    let undisturbed_share = |timings: InstructionTimings| {
        (timings.undisturbed_step_s() / timings.whole_step_s).clamp(0.0, UNDISTURBED_MAX)
    };
    let timings = benchmarks.iter().filter_map(PlannedBenchmark::shortest);
    let mut shares: Vec<f64> = timings.map(undisturbed_share).collect();
    shares.sort_by(f64::total_cmp);
    let undisturbed = shares.get(shares.len() / 2).copied().unwrap_or(1.0);
    let rounds = benchmarks.iter().map(|planned| planned.rounds.len()).min().unwrap_or(1);
    Repeatability::from_points(points, rounds.try_into().unwrap_or(u32::MAX), undisturbed)
}
