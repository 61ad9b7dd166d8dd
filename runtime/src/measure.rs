//! What kernels take where they are used: steps of a program, timed instruction by instruction.
//!
//! A kernel on its own runs on warm operands and waits for nobody, so whole steps are made. Whatever
//! else a machine does only ever makes an instruction longer, and rarely the same one in every step: of
//! each instruction, on each device, the shortest time over all steps counts. The sum of these is the
//! step without disturbance, which [`InstructionTimings::step_s`] is the mean of over the devices. A collective's time
//! holds what devices wait for each other.
//!
//! On a GPU single launches are timed, and not the graphs that steps are otherwise; how long these take is
//! measured first, by the clock ([`InstructionTimings::whole_step_s`]). Processes make as many steps each, and each of them
//! has the times of all devices in the end.
//!
//! Two kinds of instructions say nothing about their kernels, because most of their time is another
//! stage's: receives, and collectives along the pipeline. They count in the step alone.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use narrows_plan::Kernel;
use narrows_plan::mesh::Axis;
use narrows_plan::program::{Action, Instr, Program};
use serde::{Deserialize, Serialize};

use crate::error::RunError;
use crate::optimizer::Optimizer;
use crate::process_group::agree;
use crate::random::CounterRng;
use crate::report::DeviceId;
use crate::schedule::scheduled_instructions;
use crate::session::{Session, StepInput};

/// How many steps are made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeasurementEffort {
    /// Steps before those that are timed: they touch memory and start threads.
    pub warm_up_steps: usize,
    /// Steps that are timed at least; one, if none.
    pub timed_steps_min: usize,
    /// And at most.
    pub timed_steps_max: usize,
    /// No further step begins after so long.
    pub time_limit: Duration,
}

/// What one kernel took.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelSample {
    /// The kernel.
    pub kernel: Kernel,
    /// Mean over its instructions.
    pub seconds: f64,
    /// Instructions with this kernel, in a step of all devices.
    pub instructions: u64,
}

/// Steps after which all graphs are captured: the first goes launch by launch.
const CAPTURED_AFTER: usize = 2;

/// The shortest times of a program's instructions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct InstructionTimings {
    /// The shortest of the steps that were timed, by the clock; of processes, that of the slowest.
    pub shortest_step_s: f64,
    /// The shortest step by the clock as steps are where no instruction is timed: captured graphs on a GPU. Where
    /// that makes no difference, the same.
    pub whole_step_s: f64,
    /// Bytes allocated for each device's buffers.
    pub allocated_bytes: Vec<u64>,
    /// Seconds by device and instruction, in the [order](crate::schedule::step) of a step.
    instruction_s: Vec<Vec<f64>>,
}

/// Makes steps on tokens drawn at random, and times them. The session's weights must be
/// initialised; they are trained. Processes of one program must call this together.
///
/// # Errors
/// When a step could not be executed, or another process failed.
pub fn time_instructions(
    session: &mut Session,
    effort: MeasurementEffort,
) -> Result<InstructionTimings, RunError> {
    let program = session.program();
    let work = program.context.workload;
    let vocab = program.constants.vocab;
    let stream = CounterRng::new(1, "tokens");
    let count = work.global_batch * work.sequence_length;
    let ids: Vec<u32> = (0..=count).map(|n| (stream.bits(n) % vocab) as u32).collect();
    let input = StepInput { tokens: &ids[..count as usize], targets: &ids[1..] };
    let untimed = match session.recording_changes_execution() {
        true => Some(shortest_step_s(session, CAPTURED_AFTER, effort, input)?),
        false => None,
    };
    session.record_instruction_spans();
    let mut minima: Option<InstructionTimings> = None;
    repeat_steps(session, effort.warm_up_steps, effort, input, |session, seconds| {
        let laps = |device| session.instruction_spans(DeviceId(device)).iter();
        let of_device = |device| laps(device).map(|lap| (lap.end - lap.start).as_secs_f64());
        let laps_s = session.devices().map(|device| of_device(device).collect()).collect();
        let (shortest_step_s, whole_step_s) = (seconds, untimed.unwrap_or(seconds));
        let made = InstructionTimings {
            shortest_step_s,
            whole_step_s,
            allocated_bytes: session.allocated_bytes(),
            instruction_s: laps_s,
        };
        match &mut minima {
            Some(minima) => minima.keep_shortest(&made),
            None => minima = Some(made),
        }
    })?;
    // At least one step was made.
    let minima = minima.ok_or(RunError::DeviceThreads { reason: "no step was made".into() })?;
    match session.cluster() {
        None => Ok(minima),
        Some(cluster) => Ok(agree(&**cluster, minima, InstructionTimings::combine_processes)?),
    }
}

/// The shortest step by the clock.
fn shortest_step_s(
    session: &mut Session,
    least_warm_up: usize,
    effort: MeasurementEffort,
    input: StepInput,
) -> Result<f64, RunError> {
    let mut shortest = f64::INFINITY;
    let warm_up = effort.warm_up_steps.max(least_warm_up);
    repeat_steps(session, warm_up, effort, input, |_, seconds| shortest = shortest.min(seconds))?;
    Ok(shortest)
}

/// Makes steps, as many in every process. `made` is told what each took after the warm-up.
fn repeat_steps(
    session: &mut Session,
    warm_up: usize,
    effort: MeasurementEffort,
    input: StepInput,
    mut made: impl FnMut(&Session, f64),
) -> Result<(), RunError> {
    let optimizer = Optimizer::new(1e-4, 1, 1_000_000);
    for _ in 0..warm_up {
        session.step(&optimizer, input)?;
    }
    let (begun, mut steps) = (Instant::now(), 0);
    let wanted = |steps, begun: Instant| {
        steps < effort.timed_steps_max && begun.elapsed() < effort.time_limit
    };
    while steps < effort.timed_steps_min.max(1) || session.any_process(wanted(steps, begun))? {
        let step = Instant::now();
        session.step(&optimizer, input)?;
        made(session, step.elapsed().as_secs_f64());
        steps += 1;
    }
    Ok(())
}

impl InstructionTimings {
    /// Takes the shorter of both times, of the same program.
    pub fn keep_shortest(&mut self, other: &InstructionTimings) {
        self.shortest_step_s = self.shortest_step_s.min(other.shortest_step_s);
        self.whole_step_s = self.whole_step_s.min(other.whole_step_s);
        let laps =
            self.instruction_s.iter_mut().flatten().zip(other.instruction_s.iter().flatten());
        laps.for_each(|(mine, others)| *mine = mine.min(*others));
    }

    /// What processes measured together, of the devices of each, in their order. A step is over when its last
    /// process is.
    fn combine_processes(all: Vec<InstructionTimings>) -> InstructionTimings {
        let longest = |of: fn(&InstructionTimings) -> f64| all.iter().map(of).fold(0.0, f64::max);
        InstructionTimings {
            shortest_step_s: longest(|one| one.shortest_step_s),
            whole_step_s: longest(|one| one.whole_step_s),
            allocated_bytes: all.iter().flat_map(|one| one.allocated_bytes.clone()).collect(),
            instruction_s: all.iter().flat_map(|one| one.instruction_s.clone()).collect(),
        }
    }

    /// A step without disturbance: all instructions' shortest times, the mean over the devices.
    pub fn undisturbed_step_s(&self) -> f64 {
        self.instruction_s.iter().flatten().sum::<f64>() / self.instruction_s.len().max(1) as f64
    }

    /// What each kernel took, in the order of their first instructions.
    pub fn samples(&self, program: &Program) -> Vec<KernelSample> {
        let mut samples: Vec<KernelSample> = vec![];
        let mut places: HashMap<Kernel, usize> = HashMap::new();
        for (device, laps) in self.instruction_s.iter().enumerate() {
            let stage = DeviceId(device as u64).stage(&program.context.mesh);
            for (moment, seconds) in scheduled_instructions(&program.stages[stage]).zip(laps) {
                if waits_for_another_stage(moment.instr) {
                    continue;
                }
                let kernel = moment.instr.kernel();
                let place = *places.entry(kernel.clone()).or_insert_with(|| {
                    samples.push(KernelSample { kernel, seconds: 0.0, instructions: 0 });
                    samples.len() - 1
                });
                samples[place].seconds += seconds;
                samples[place].instructions += 1;
            }
        }
        for sample in &mut samples {
            sample.seconds /= sample.instructions as f64;
        }
        samples
    }
}

fn waits_for_another_stage(instr: &Instr) -> bool {
    match &instr.action {
        Action::Receive(_) => true,
        Action::Collective(exchange) => exchange.axis == Axis::Pipeline,
        _ => false,
    }
}
