//! Kernel times measured in place: steps of a program, timed instruction by instruction.
//!
//! A kernel in isolation runs on warm operands and waits for no other device, so whole steps are timed.
//! Other activity of a machine only ever lengthens an instruction, and rarely the same one in every
//! step: of each instruction on each device, the shortest time over all steps counts. The sum of these
//! is the time of an undisturbed step, and [`InstructionTimings::undisturbed_step_s`] its mean over
//! the devices. The time of a collective includes the wait for its other members.
//!
//! On a GPU each launch is timed, instead of the captured graphs of normal steps; the wall-clock time
//! of normal steps is measured first ([`InstructionTimings::whole_step_s`]). All processes of a run
//! execute the same number of steps, and each receives the times of all devices.
//!
//! Two kinds of instructions are no samples of their kernels, because they mostly wait for another
//! stage: receives, and collectives along the pipeline. They count in the step time alone.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use narrows_plan::program::{Action, Instr, Program};
use narrows_plan::{Axis, Kernel};
use serde::{Deserialize, Serialize};

use crate::error::RunError;
use crate::instruction_order::scheduled_instructions;
use crate::optimizer::Optimizer;
use crate::process_group::gather_and_broadcast;
use crate::random::CounterRng;
use crate::report::DeviceId;
use crate::session::{Session, StepInput};

/// Number of steps that are measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeasurementEffort {
    /// Untimed steps at the start, which touch memory and start threads.
    pub warm_up_steps: usize,
    /// Minimum number of timed steps; at least one is executed.
    pub timed_steps_min: usize,
    /// Maximum number of timed steps.
    pub timed_steps_max: usize,
    /// Beyond the minimum, no further step starts after this time.
    pub time_limit: Duration,
}

/// Measured time of one kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelSample {
    /// The kernel.
    pub kernel: Kernel,
    /// Mean time over the instructions that launch the kernel.
    pub seconds: f64,
    /// Number of these instructions, in a step of all devices.
    pub instructions: u64,
}

/// Steps after which all graphs are captured; the first step launches every kernel by itself.
const GRAPH_CAPTURE_STEPS: usize = 2;

/// Shortest times of a program's instructions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct InstructionTimings {
    /// Wall-clock time of the shortest step with instruction timing; of several processes, that of the
    /// slowest.
    pub shortest_step_s: f64,
    /// Wall-clock time of the shortest step without instruction timing, which on a GPU runs captured
    /// graphs; equal to `shortest_step_s` where timing does not change the execution.
    pub whole_step_s: f64,
    /// Bytes allocated for each device's buffers.
    #[serde(rename = "allocated")]
    pub allocated_bytes: Vec<u64>,
    /// Seconds by device and instruction, in the order of
    /// [`scheduled_instructions`](crate::scheduled_instructions).
    #[serde(rename = "laps_s")]
    instruction_s: Vec<Vec<f64>>,
}

/// Runs steps on random tokens and times their instructions. The session's weights must be
/// initialised; they are trained. All processes of a run must call this function.
///
/// # Errors
/// When a step cannot be executed, or another process fails.
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
    let untimed_step_s = match session.recording_changes_execution() {
        true => Some(shortest_step_s(session, GRAPH_CAPTURE_STEPS, effort, input)?),
        false => None,
    };
    session.record_instruction_spans();
    let mut shortest: Option<InstructionTimings> = None;
    repeat_steps(session, effort.warm_up_steps, effort, input, |session, step_s| {
        let device_times = |device| -> Vec<f64> {
            let spans = session.instruction_spans(DeviceId(device)).iter();
            spans.map(|span| (span.end - span.start).as_secs_f64()).collect()
        };
        let timings = InstructionTimings {
            shortest_step_s: step_s,
            whole_step_s: untimed_step_s.unwrap_or(step_s),
            allocated_bytes: session.allocated_bytes(),
            instruction_s: session.devices().map(device_times).collect(),
        };
        match &mut shortest {
            Some(shortest) => shortest.keep_shortest(&timings),
            None => shortest = Some(timings),
        }
    })?;
    let shortest = shortest.unwrap_or_else(|| unreachable!("at least one step is timed"));
    match session.process_group() {
        None => Ok(shortest),
        Some(group) => {
            Ok(gather_and_broadcast(&**group, shortest, InstructionTimings::combine_processes)?)
        }
    }
}

/// Wall-clock time of the shortest step.
fn shortest_step_s(
    session: &mut Session,
    warm_up_steps_min: usize,
    effort: MeasurementEffort,
    input: StepInput,
) -> Result<f64, RunError> {
    let mut shortest = f64::INFINITY;
    let warm_up_steps = effort.warm_up_steps.max(warm_up_steps_min);
    repeat_steps(session, warm_up_steps, effort, input, |_, step_s| {
        shortest = shortest.min(step_s);
    })?;
    Ok(shortest)
}

/// Runs steps, the same number in every process. `on_step` is called with the time of each step after
/// the warm-up.
fn repeat_steps(
    session: &mut Session,
    warm_up_steps: usize,
    effort: MeasurementEffort,
    input: StepInput,
    mut on_step: impl FnMut(&Session, f64),
) -> Result<(), RunError> {
    let optimizer = Optimizer::new(1e-4, 1, 1_000_000);
    for _ in 0..warm_up_steps {
        session.step(&optimizer, input)?;
    }
    let (start, mut steps) = (Instant::now(), 0);
    let has_time = |steps| steps < effort.timed_steps_max && start.elapsed() < effort.time_limit;
    while steps < effort.timed_steps_min.max(1) || session.any_rank(has_time(steps))? {
        let step_start = Instant::now();
        session.step(&optimizer, input)?;
        on_step(session, step_start.elapsed().as_secs_f64());
        steps += 1;
    }
    Ok(())
}

impl InstructionTimings {
    /// Keeps the shorter of both times of every instruction, of two measurements of one program.
    pub fn keep_shortest(&mut self, other: &InstructionTimings) {
        self.shortest_step_s = self.shortest_step_s.min(other.shortest_step_s);
        self.whole_step_s = self.whole_step_s.min(other.whole_step_s);
        let other_times = other.instruction_s.iter().flatten();
        let pairs = self.instruction_s.iter_mut().flatten().zip(other_times);
        pairs.for_each(|(own, other)| *own = own.min(*other));
    }

    /// Concatenates the devices of all processes, in rank order. A step ends when its last process
    /// does.
    fn combine_processes(processes: Vec<InstructionTimings>) -> InstructionTimings {
        let longest =
            |time: fn(&InstructionTimings) -> f64| processes.iter().map(time).fold(0.0, f64::max);
        InstructionTimings {
            shortest_step_s: longest(|process| process.shortest_step_s),
            whole_step_s: longest(|process| process.whole_step_s),
            allocated_bytes: processes.iter().flat_map(|p| p.allocated_bytes.clone()).collect(),
            instruction_s: processes.iter().flat_map(|p| p.instruction_s.clone()).collect(),
        }
    }

    /// Time of a step without disturbance: the sum of the shortest times of all instructions, as the
    /// mean over the devices.
    pub fn undisturbed_step_s(&self) -> f64 {
        self.instruction_s.iter().flatten().sum::<f64>() / self.instruction_s.len().max(1) as f64
    }

    /// Times of all kernels, in the order of their first instructions.
    pub fn samples(&self, program: &Program) -> Vec<KernelSample> {
        let mut samples: Vec<KernelSample> = vec![];
        let mut indices: HashMap<Kernel, usize> = HashMap::new();
        for (device, instruction_s) in self.instruction_s.iter().enumerate() {
            let stage = DeviceId(device as u64).stage(&program.context.mesh);
            let scheduled = scheduled_instructions(&program.stages[stage]);
            for (scheduled, seconds) in scheduled.zip(instruction_s) {
                if waits_for_another_stage(scheduled.instr) {
                    continue;
                }
                let kernel = scheduled.instr.kernel();
                let index = *indices.entry(kernel.clone()).or_insert_with(|| {
                    samples.push(KernelSample { kernel, seconds: 0.0, instructions: 0 });
                    samples.len() - 1
                });
                samples[index].seconds += seconds;
                samples[index].instructions += 1;
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
        Action::Collective(collective) => collective.axis == Axis::Pipeline,
        _ => false,
    }
}
