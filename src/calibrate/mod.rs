//! Measures a machine by running plans on it, and holds predictions against it.
//!
//! Every plan is run in each of several rounds, so that whatever else the machine does meets all of them
//! alike. Of every instruction the shortest time counts, for kernels as for steps
//! ([`narrows_runtime::time_instructions`]). GPUs are in [`gpu`]; all else is of either.

pub mod cache;
pub mod compare;
pub mod gpu;
pub mod machine;
pub mod works;

use indexmap::IndexMap;
use narrows_cost_model::profile::{MeasuredPoint, Repeatability};
use narrows_plan::{CheckedProgram, Kernel};
use narrows_planner::search;
use narrows_runtime::session::Session;
use narrows_runtime::{InstructionTimings, KernelSample, MeasurementEffort, time_instructions};

use crate::errors::{CommandResult, Failure};
use works::Benchmark;

/// On GPUs the instructions of a step, each timed alone, may take longer than the step of graphs. Then nothing
/// disturbed it, and that is all there is to say: the most that profiles allow.
const UNDISTURBED_MAX: f64 = 1.1;

/// A plan that is run in rounds.
pub struct PlannedBenchmark {
    /// What was asked.
    pub work: Benchmark,
    /// Its program.
    pub program: CheckedProgram,
    /// What each round took.
    pub rounds: Vec<InstructionTimings>,
}

/// How often everything is run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeasurementRounds {
    /// How many rounds.
    pub rounds: usize,
    /// Steps of each plan in a round.
    pub effort: MeasurementEffort,
}

impl PlannedBenchmark {
    /// Plans the work. `None` when its restrictions leave no plan.
    pub fn plan(work: Benchmark) -> Option<PlannedBenchmark> {
        let program = search(&work.request).best?.program;
        Some(PlannedBenchmark { work, program, rounds: vec![] })
    }

    /// Its devices on processors, which share so many threads.
    ///
    /// # Errors
    /// When it cannot be executed there.
    pub fn on_processors(&self, threads: u64) -> CommandResult<Session> {
        let each = (threads / self.work.request.devices).max(1) as usize;
        let session = narrows_cpu::session(&self.work.request.model, self.program.clone(), each);
        session.map_err(|error| Failure::execution(&error))
    }

    /// Runs it for a round.
    ///
    /// # Errors
    /// When it cannot be executed.
    pub fn round(&mut self, mut session: Session, effort: MeasurementEffort) -> CommandResult<()> {
        let failure = |error| Failure::execution(&error);
        session.initialise(&self.work.request.model, 1).map_err(failure)?;
        self.rounds.push(time_instructions(&mut session, effort).map_err(failure)?);
        Ok(())
    }

    /// The shortest of all rounds, instruction by instruction.
    pub fn best(&self) -> Option<InstructionTimings> {
        let mut best = self.rounds.first()?.clone();
        self.rounds.iter().for_each(|round| best.keep_shortest(round));
        Some(best)
    }
}

/// Runs all of them in rounds, each in a session that `open` makes. `watch` is told before each run.
///
/// # Errors
/// When one cannot be executed.
pub fn run(
    subjects: &mut [PlannedBenchmark],
    rounds: MeasurementRounds,
    mut open: impl FnMut(&PlannedBenchmark) -> CommandResult<Session>,
    mut watch: impl FnMut(&PlannedBenchmark),
) -> CommandResult<()> {
    for _ in 0..rounds.rounds {
        for subject in &mut *subjects {
            watch(subject);
            let session = open(subject)?;
            subject.round(session, rounds.effort)?;
        }
    }
    Ok(())
}

/// What one kernel took in all plans together.
#[derive(Default)]
struct KernelSum {
    seconds: f64,
    instructions: f64,
    /// The least of each plan's rounds, and the most.
    least: f64,
    most: f64,
}

/// What devices are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceSharing {
    /// They share a machine: what one computes takes longer the more there are.
    Shared,
    /// Each is one for itself.
    Whole,
}

impl DeviceSharing {
    /// How many devices a kernel's time depends on, of those there were.
    fn of(self, kernel: &Kernel, devices: u64) -> u64 {
        match (self, kernel) {
            (DeviceSharing::Shared, _) | (_, Kernel::Collective(_) | Kernel::Transfer(_)) => {
                devices
            }
            (DeviceSharing::Whole, _) => 1,
        }
    }
}

/// What kernels took: means over their instructions in all plans, in the order in which they first occur.
pub fn points<'a>(
    subjects: impl IntoIterator<Item = &'a PlannedBenchmark>,
    together: DeviceSharing,
) -> Vec<MeasuredPoint> {
    let mut sums: IndexMap<(Kernel, u64), KernelSum> = IndexMap::new();
    for subject in subjects {
        let devices = subject.work.request.devices;
        let Some(best) = subject.best() else { continue };
        let program = subject.program.program();
        let rounds: Vec<Vec<KernelSample>> =
            subject.rounds.iter().map(|round| round.samples(program)).collect();
        for (index, sample) in best.samples(program).into_iter().enumerate() {
            let weight = sample.instructions as f64;
            let devices = together.of(&sample.kernel, devices);
            let sum = sums.entry((sample.kernel, devices)).or_default();
            sum.seconds += sample.seconds * weight;
            sum.instructions += weight;
            let all = rounds.iter().map(|round| round[index].seconds);
            sum.least += all.clone().fold(f64::INFINITY, f64::min) * weight;
            sum.most += all.fold(0.0, f64::max) * weight;
        }
    }
    let made = sums.into_iter().filter_map(|((kernel, devices), sum)| {
        let time_s = sum.seconds / sum.instructions;
        let spread = (sum.most / sum.least.max(1e-12) - 1.0).clamp(0.0, 1e6);
        (time_s > 1e-10).then_some(MeasuredPoint { kernel, devices, time_s, spread })
    });
    made.collect()
}

/// How well what was measured repeats.
pub fn repeatability(subjects: &[PlannedBenchmark], points: &[MeasuredPoint]) -> Repeatability {
    let shares = subjects.iter().filter_map(PlannedBenchmark::best);
    let share = |best: InstructionTimings| {
        (best.undisturbed_step_s() / best.whole_step_s).clamp(0.0, UNDISTURBED_MAX)
    };
    let mut shares: Vec<f64> = shares.map(share).collect();
    shares.sort_by(f64::total_cmp);
    let undisturbed = shares.get(shares.len() / 2).copied().unwrap_or(1.0);
    let rounds = subjects.iter().map(|subject| subject.rounds.len()).min().unwrap_or(1);
    Repeatability::from_points(points, rounds.try_into().unwrap_or(u32::MAX), undisturbed)
}
