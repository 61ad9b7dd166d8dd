//! Runs a program against the clock of a price list.
//!
//! Each device has one stream here: a stage's turns follow each other, a forward pass waits for the
//! previous stage's and a backward pass for the next stage's. With one stage the step time is
//!
//! ```text
//! m·(forward + backward) + step
//! ```
//! the sum over all instructions: the same sum the solver minimised.

use narrows_plan::check::CheckedProgram;
use narrows_plan::kernel::PassKind;
use narrows_plan::mesh::Axis;
use narrows_plan::program::{Action, Instr, Phase, StageProgram, Turn};
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
pub struct Span {
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
    pub spans: Vec<Span>,
}

/// Times of one stage's passes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StageTime {
    /// Forward pass of a microbatch, transfers included.
    pub forward: Seconds,
    /// Backward pass of a microbatch, transfers included.
    pub backward: Seconds,
    /// Once a step.
    pub step: Seconds,
}

/// Simulates a program that was proven. `price` must be the list for the program's mesh.
pub fn simulate(program: &CheckedProgram, price: KernelPrice) -> Timeline {
    let program = program.program();
    let stages: Vec<Costs> = program.stages.iter().map(|s| Costs::new(s, price)).collect();
    let times: Vec<StageTime> = stages.iter().map(|costs| costs.time).collect();
    let microbatches = program.context.workload.microbatches(&program.context.mesh);
    let schedules: Vec<_> = program.stages.iter().map(|s| s.schedule.as_slice()).collect();
    let (step_time, spans) = run_schedule(&times, &schedules);
    let mut breakdown = Breakdown::default();
    for costs in &stages {
        let busy = costs.time.forward + costs.time.backward;
        let busy = busy * microbatches as f64 + costs.time.step;
        breakdown.add(&costs.parts(microbatches), 1.0 / stages.len() as f64);
        breakdown.bubble += (step_time - busy).0.max(0.0) / stages.len() as f64;
    }
    Timeline { step_time, breakdown, spans }
}

/// Plays the stages' schedules. Returns the step time and every pass.
pub fn run_schedule(times: &[StageTime], schedules: &[&[Turn]]) -> (Seconds, Vec<Span>) {
    let mut spans = vec![];
    let step_time = play(times, schedules, |span| spans.push(span));
    (step_time, spans)
}

/// The same for the step time alone.
pub fn schedule_time(times: &[StageTime], schedules: &[&[Turn]]) -> Seconds {
    play(times, schedules, |_| {})
}

fn play(times: &[StageTime], schedules: &[&[Turn]], mut each: impl FnMut(Span)) -> Seconds {
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
                each(Span { stage, phase, microbatch, begin: Seconds(begin), end: Seconds(end) });
            }
        }
        if !progressed {
            break;
        }
    }
    let mut step_time = 0.0_f64;
    for stage in 0..stages {
        let begin = Seconds(clock[stage]);
        let end = begin + times[stage].step;
        each(Span { stage, phase: Phase::Step, microbatch: 0, begin, end });
        step_time = step_time.max(end.0);
    }
    Seconds(step_time)
}

/// A stage's kernels, priced and sorted.
struct Costs {
    time: StageTime,
    /// Per phase: forward, backward, step.
    kinds: [Breakdown; 3],
}

impl Costs {
    fn new(stage: &StageProgram, price: KernelPrice) -> Costs {
        let mut kinds = [Breakdown::default(); 3];
        let mut totals = [Seconds(0.0); 3];
        let phases = [&stage.forward, &stage.backward, &stage.step];
        for (index, list) in phases.into_iter().enumerate() {
            for instr in list {
                let time = price(&instr.kernel());
                totals[index] += time;
                *kinds[index].part(instr) += time.0;
            }
        }
        let [forward, backward, step] = totals;
        Costs { time: StageTime { forward, backward, step }, kinds }
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
            (Kernel::Pass(pass), _) if pass.kind == PassKind::Optimizer => &mut self.optimizer,
            (Kernel::Pass(_), _) => &mut self.elementwise,
            (Kernel::Transfer(_), _) => &mut self.other,
            // The square sum's collectives belong to the optimizer.
            (Kernel::Collective(_), Action::Collective(e)) if e.axis == Axis::Pipeline => {
                &mut self.optimizer
            }
            (Kernel::Collective(_), _) => &mut self.collective_exposed,
        }
    }
}
