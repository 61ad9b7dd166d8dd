//! Runs a program against the clock of a price list.
//!
//! Each device has one stream here: a stage's turns follow each other, a forward pass waits for the
//! previous stage's and a backward pass for the next stage's. In the step phase stages meet wherever an
//! instruction is a collective over the pipeline axis: nobody updates a weight before the norm of all
//! stages' gradients is known. A meeting begins when the last of its stages has come. With one stage the
//! step time is
//!
//! ```text
//! m·(forward + backward) + step
//! ```
//! the sum over all instructions: the same sum the solver minimised.

use narrows_plan::check::CheckedProgram;
use narrows_plan::kernel::FusedKind;
use narrows_plan::mesh::{Axis, DeviceGroup, Mesh};
use narrows_plan::program::{Action, Instr, MicrobatchPass, Phase, StageProgram};
use narrows_plan::{Kernel, Seconds};
use serde::Serialize;

use crate::segment::KernelPrice;

/// What the time of a step is spent on. The parts add up to the step time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Breakdown {
    /// Products.
    pub gemm: f64,
    /// Attention.
    pub attention: f64,
    /// Fused passes.
    pub elementwise: f64,
    /// Collectives that nothing hides.
    pub collective_exposed: f64,
    /// Waiting for other stages.
    pub bubble: f64,
    /// Gradient norm and AdamW.
    pub optimizer: f64,
    /// Transfers between stages.
    pub other: f64,
}

/// One pass of a stage in the simulated step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PassSpan {
    /// The stage.
    pub stage: usize,
    /// Forward, backward or step.
    pub phase: Phase,
    /// The microbatch; 0 for the step phase.
    pub microbatch: u64,
    /// When it begins.
    pub begin: Seconds,
    /// When it ends.
    pub end: Seconds,
}

/// A predicted step.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// From the first forward pass to the last update.
    pub step_time: Seconds,
    /// Averages over the stages; they add up to the step time.
    pub breakdown: Breakdown,
    /// Every pass of every stage.
    pub spans: Vec<PassSpan>,
    /// Every stage's part in every meeting, in the order of its step phase.
    pub meetings: Vec<StageSync>,
}

/// Times of one stage's passes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StageTime {
    /// Forward pass of a microbatch, transfers included.
    pub forward: Seconds,
    /// Backward pass of a microbatch, transfers included.
    pub backward: Seconds,
    /// Once a step, in order.
    pub step: Vec<StepPart>,
}

/// A part of a stage's step phase.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StepPart {
    /// Waits for no other stage.
    Alone(Seconds),
    /// A collective with other stages: its time once all of them are there.
    Together(SyncedStages, Seconds),
}

/// The stages that meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SyncedStages {
    first: usize,
    apart: usize,
    size: usize,
}

/// A stage's part in a meeting.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StageSync {
    /// The stage.
    pub stage: usize,
    /// When it came.
    pub arrival: Seconds,
    /// When all of them were there and had done it.
    pub end: Seconds,
}

/// A step that was played.
#[derive(Clone, Debug, PartialEq)]
pub struct SimulatedStep {
    /// From the first forward pass to the last update.
    pub time: Seconds,
    /// Every pass of every stage.
    pub spans: Vec<PassSpan>,
    /// Every stage's part in every meeting, in the order of its step phase.
    pub meetings: Vec<StageSync>,
}

impl SyncedStages {
    /// All of so many stages.
    pub fn all(stages: usize) -> SyncedStages {
        SyncedStages { first: 0, apart: 1, size: stages }
    }

    /// The first and the last of so many stages.
    pub fn ends(stages: usize) -> SyncedStages {
        SyncedStages { first: 0, apart: stages - 1, size: 2 }
    }

    /// The stages that meet `stage` in a collective, whose group is counted in devices.
    fn of(stage: usize, group: &DeviceGroup, mesh: &Mesh) -> SyncedStages {
        let apart = (group.stride / mesh.group(Axis::Pipeline).stride) as usize;
        let size = group.size as usize;
        let before = stage / apart % size;
        SyncedStages { first: stage - before * apart, apart, size }
    }

    fn stages(self) -> impl Iterator<Item = usize> {
        (0..self.size).map(move |at| self.first + at * self.apart)
    }
}

impl StepPart {
    /// How long it takes, waiting aside.
    pub fn time(&self) -> Seconds {
        match self {
            StepPart::Alone(time) | StepPart::Together(_, time) => *time,
        }
    }
}

/// The group of stages that an instruction waits for, if it is a collective among stages.
pub fn meeting(instr: &Instr) -> Option<&DeviceGroup> {
    match &instr.action {
        Action::Collective(exchange) if exchange.axis == Axis::Pipeline => Some(&exchange.group),
        _ => None,
    }
}

/// Simulates a program that was proven. `price` must be the list for the program's mesh.
pub fn simulate(program: &CheckedProgram, price: KernelPrice) -> Timeline {
    let program = program.program();
    let mesh = &program.context.mesh;
    let numbered = program.stages.iter().enumerate();
    let stages: Vec<StageKernels> =
        numbered.map(|(number, stage)| StageKernels::new(number, stage, mesh, price)).collect();
    let times: Vec<StageTime> = stages.iter().map(|costs| costs.time.clone()).collect();
    let microbatches = program.context.workload.microbatches(&program.context.mesh);
    let schedules: Vec<_> = program.stages.iter().map(|s| s.schedule.as_slice()).collect();
    let SimulatedStep { time: step_time, spans, meetings } = run_schedule(&times, &schedules);
    let mut breakdown = Breakdown::default();
    for costs in &stages {
        let busy = costs.time.forward + costs.time.backward;
        let step: Seconds = costs.time.step.iter().map(StepPart::time).sum();
        let busy = busy * microbatches as f64 + step;
        breakdown.add(&costs.parts(microbatches), 1.0 / stages.len() as f64);
        breakdown.bubble += (step_time - busy).0.max(0.0) / stages.len() as f64;
    }
    Timeline { step_time, breakdown, spans, meetings }
}

/// Plays the stages' schedules, and then their step phases.
pub fn run_schedule(times: &[StageTime], schedules: &[&[MicrobatchPass]]) -> SimulatedStep {
    let (mut spans, mut meetings) = (vec![], vec![]);
    let time = play(times, schedules, |span| spans.push(span), |met| meetings.push(met));
    SimulatedStep { time, spans, meetings }
}

/// The same for the step time alone.
pub fn schedule_time(times: &[StageTime], schedules: &[&[MicrobatchPass]]) -> Seconds {
    play(times, schedules, |_| {}, |_| {})
}

fn play(
    times: &[StageTime],
    schedules: &[&[MicrobatchPass]],
    mut each: impl FnMut(PassSpan),
    met: impl FnMut(StageSync),
) -> Seconds {
    let stages = times.len();
    let passes = schedules.first().map_or(0, |turns| turns.len());
    // When each pass was done, by stage, direction and microbatch; negative while it is not.
    let mut done = vec![[vec![-1.0_f64; passes], vec![-1.0_f64; passes]]; stages];
    let direction = |phase: Phase| usize::from(phase == Phase::Backward);
    let mut clock = vec![0.0_f64; stages];
    let mut next = vec![0_usize; stages];
    loop {
        let mut progressed = false;
        for stage in 0..stages {
            while let Some(turn) = schedules[stage].get(next[stage]) {
                let needs = match turn.phase {
                    Phase::Forward if stage > 0 => Some(stage - 1),
                    Phase::Backward if stage + 1 < stages => Some(stage + 1),
                    _ => None,
                };
                let ready = match needs {
                    None => 0.0,
                    Some(other) => {
                        let at = done[other][direction(turn.phase)][turn.microbatch as usize];
                        if at < 0.0 {
                            break;
                        }
                        at
                    }
                };
                let begin = clock[stage].max(ready);
                let length = match turn.phase {
                    Phase::Forward => times[stage].forward,
                    _ => times[stage].backward,
                };
                let end = begin + length.0;
                done[stage][direction(turn.phase)][turn.microbatch as usize] = end;
                clock[stage] = end;
                next[stage] += 1;
                progressed = true;
                let (phase, microbatch) = (turn.phase, turn.microbatch);
                each(PassSpan {
                    stage,
                    phase,
                    microbatch,
                    begin: Seconds(begin),
                    end: Seconds(end),
                });
            }
        }
        if !progressed {
            break;
        }
    }
    let begun = clock.clone();
    run_steps(times, &mut clock, met);
    for (stage, (begin, end)) in begun.into_iter().zip(&clock).enumerate() {
        let (begin, end) = (Seconds(begin), Seconds(*end));
        each(PassSpan { stage, phase: Phase::Step, microbatch: 0, begin, end });
    }
    Seconds(clock.into_iter().fold(0.0, f64::max))
}

/// Plays the step phases from each stage's clock on. A checked program's stages meet in one order.
fn run_steps(times: &[StageTime], clock: &mut [f64], mut met: impl FnMut(StageSync)) {
    let mut next = vec![0_usize; times.len()];
    let mut progressed = true;
    while std::mem::take(&mut progressed) {
        for stage in 0..times.len() {
            while let Some(StepPart::Alone(time)) = times[stage].step.get(next[stage]) {
                clock[stage] += time.0;
                next[stage] += 1;
                progressed = true;
            }
        }
        for stage in 0..times.len() {
            let part = |stage: usize| times[stage].step.get(next[stage]);
            let Some(StepPart::Together(members, _)) = part(stage) else { continue };
            let here = |stage: usize| match part(stage) {
                Some(StepPart::Together(theirs, time)) if theirs == members => Some(time.0),
                _ => None,
            };
            let lengths: Option<Vec<f64>> = members.stages().map(here).collect();
            let Some(lengths) = lengths else { continue };
            let begin = members.stages().map(|stage| clock[stage]).fold(0.0, f64::max);
            let end = begin + lengths.into_iter().fold(0.0, f64::max);
            for stage in members.stages() {
                met(StageSync { stage, arrival: Seconds(clock[stage]), end: Seconds(end) });
                clock[stage] = end;
                next[stage] += 1;
            }
            progressed = true;
        }
    }
    debug_assert!(times.iter().zip(&next).all(|(time, next)| *next == time.step.len()));
}

/// A stage's kernels, priced and sorted.
struct StageKernels {
    time: StageTime,
    /// Per phase: forward, backward, step.
    kinds: [Breakdown; 3],
}

impl StageKernels {
    fn new(number: usize, stage: &StageProgram, mesh: &Mesh, price: KernelPrice) -> StageKernels {
        let mut kinds = [Breakdown::default(); 3];
        let mut totals = [Seconds(0.0); 2];
        let (mut step, mut alone) = (vec![], Seconds(0.0));
        let phases = [&stage.forward, &stage.backward, &stage.step];
        for (index, list) in phases.into_iter().enumerate() {
            for instr in list {
                let time = price(&instr.kernel());
                *kinds[index].part(instr) += time.0;
                match (totals.get_mut(index), meeting(instr)) {
                    (Some(total), _) => *total += time,
                    (None, None) => alone += time,
                    (None, Some(group)) => {
                        step.push(StepPart::Alone(std::mem::take(&mut alone)));
                        let members = SyncedStages::of(number, group, mesh);
                        step.push(StepPart::Together(members, time));
                    }
                }
            }
        }
        step.push(StepPart::Alone(alone));
        let [forward, backward] = totals;
        StageKernels { time: StageTime { forward, backward, step }, kinds }
    }

    fn parts(&self, microbatches: u64) -> Breakdown {
        let mut parts = Breakdown::default();
        parts.add(&self.kinds[0], microbatches as f64);
        parts.add(&self.kinds[1], microbatches as f64);
        parts.add(&self.kinds[2], 1.0);
        parts
    }
}

impl Breakdown {
    /// All parts.
    pub fn total(&self) -> f64 {
        self.gemm
            + self.attention
            + self.elementwise
            + self.collective_exposed
            + self.bubble
            + self.optimizer
            + self.other
    }

    /// Every part so many times as long.
    pub fn times(&self, factor: f64) -> Breakdown {
        let mut all = Breakdown::default();
        all.add(self, factor);
        all
    }

    fn add(&mut self, other: &Breakdown, times: f64) {
        self.gemm += other.gemm * times;
        self.attention += other.attention * times;
        self.elementwise += other.elementwise * times;
        self.collective_exposed += other.collective_exposed * times;
        self.bubble += other.bubble * times;
        self.optimizer += other.optimizer * times;
        self.other += other.other * times;
    }

    fn part(&mut self, instr: &Instr) -> &mut f64 {
        match (instr.kernel(), &instr.action) {
            (Kernel::Gemm(_), _) => &mut self.gemm,
            (Kernel::Attention(_), _) => &mut self.attention,
            (Kernel::Fused(pass), _) if pass.kind == FusedKind::Optimizer => &mut self.optimizer,
            (Kernel::Fused(_), _) => &mut self.elementwise,
            (Kernel::Transfer(_), _) => &mut self.other,
            // The square sum's collectives belong to the optimizer.
            (Kernel::Collective(_), Action::Collective(e)) if e.axis == Axis::Pipeline => {
                &mut self.optimizer
            }
            (Kernel::Collective(_), _) => &mut self.collective_exposed,
        }
    }
}
