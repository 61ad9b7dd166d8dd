//! Simulates a step of a program from the times of its kernels.
//!
//! Each device has one stream: the passes of a stage follow each other, a forward pass waits for that of the previous
//! stage and a backward pass for that of the next stage. In the step phase, stages synchronize wherever an instruction
//! is a collective over the pipeline axis: no weight is updated before the norm of all stages' gradients is known. A
//! synchronization begins when the last of its stages arrives. With one stage and without gradient buckets the step time
//! is
//!
//! ```text
//! m·(forward + backward) + step
//! ```
//! the sum over all instructions, which is the sum that the solver minimised. Gradient buckets run on a stream of
//! their own beside the last backward pass, and the step phase begins when both have ended.

use narrows_plan::program::{Action, GradientBucket, Instr, MicrobatchPass, Phase, StageProgram};
use narrows_plan::{Axis, CheckedProgram, DeviceGroup, Mesh, Seconds};

use crate::breakdown::Breakdown;
use crate::overlap::{BucketTime, OverlapSlowdown, OverlappedBackward};
use crate::price::KernelPrice;

/// Relative rounding of sums of times.
const ROUNDING: f64 = 1e-12;

/// One pass of a stage in the simulated step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PassSpan {
    /// The stage.
    pub stage: usize,
    /// Forward, backward or step.
    pub phase: Phase,
    /// The microbatch; 0 for the step phase.
    pub microbatch: u64,
    /// Begin of the pass.
    pub begin: Seconds,
    /// End of the pass.
    pub end: Seconds,
}

/// A predicted step.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// From the first forward pass to the last update.
    pub step_time: Seconds,
    /// Averages over the stages, which add up to the step time.
    pub breakdown: Breakdown,
    /// Every pass of every stage.
    pub spans: Vec<PassSpan>,
    /// Every synchronization of every stage, in the order of the step phase.
    pub stage_syncs: Vec<StageSync>,
    /// The reductions of every gradient bucket that runs beside a backward pass.
    pub buckets: Vec<BucketSpan>,
}

/// The reductions of a gradient bucket in the simulated step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BucketSpan {
    /// The stage.
    pub stage: usize,
    /// Index of the bucket in its stage.
    pub bucket: usize,
    /// Begin of its first reduction.
    pub begin: Seconds,
    /// End of its last reduction.
    pub end: Seconds,
}

/// Times of one stage's passes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StageTime {
    /// Forward pass of a microbatch, transfers included.
    pub forward: Seconds,
    /// Backward pass of a microbatch, transfers included.
    pub backward: Seconds,
    /// Parts of the step phase, in order.
    pub step_phase: Vec<StepPart>,
    /// Reductions beside the last backward pass, in order, with what the streams cost each other.
    pub overlap: Option<StageOverlap>,
}

/// Gradient reductions beside the last backward pass of a stage.
#[derive(Clone, Debug, PartialEq)]
pub struct StageOverlap {
    /// Time of each bucket, in order.
    pub buckets: Vec<BucketTime>,
    /// The slowdown of the two streams.
    pub slowdown: OverlapSlowdown,
}

/// A part of a stage's step phase, between or during synchronizations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StepPart {
    /// Work of the stage alone.
    Local(Seconds),
    /// A collective with other stages: its time from the arrival of the last one.
    Synchronized(SyncedStages, Seconds),
}

/// The stages of a synchronization: `size` of them at distance `stride`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SyncedStages {
    first: usize,
    stride: usize,
    size: usize,
}

/// A synchronization of one stage.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StageSync {
    /// The stage.
    pub stage: usize,
    /// Arrival of the stage.
    pub arrival: Seconds,
    /// End of the collective, equal for all of its stages.
    pub end: Seconds,
}

/// A simulated step.
#[derive(Clone, Debug, PartialEq)]
pub struct SimulatedStep {
    /// From the first forward pass to the last update.
    pub time: Seconds,
    /// Every pass of every stage.
    pub spans: Vec<PassSpan>,
    /// Every synchronization of every stage, in the order of the step phase.
    pub stage_syncs: Vec<StageSync>,
    /// The reductions of every gradient bucket that runs beside a backward pass.
    pub buckets: Vec<BucketSpan>,
}

impl StageTime {
    fn overlapped_backward(&self) -> Option<OverlappedBackward> {
        let StageOverlap { buckets, slowdown } = self.overlap.as_ref()?;
        Some(OverlappedBackward::new(self.backward, buckets, *slowdown))
    }
}

impl SyncedStages {
    /// All stages of a pipeline.
    pub fn all(stages: usize) -> SyncedStages {
        SyncedStages { first: 0, stride: 1, size: stages }
    }

    /// The first and the last stage of a pipeline.
    pub fn first_and_last(stages: usize) -> SyncedStages {
        SyncedStages { first: 0, stride: stages - 1, size: 2 }
    }

    /// The stages of a collective that `stage` takes part in; strides of `group` are in devices.
    fn containing(stage: usize, group: &DeviceGroup, mesh: &Mesh) -> SyncedStages {
        let stride = (group.stride / mesh.group(Axis::Pipeline).stride) as usize;
        let size = group.size as usize;
        let before = stage / stride % size;
        SyncedStages { first: stage - before * stride, stride, size }
    }

    fn stages(self) -> impl Iterator<Item = usize> {
        (0..self.size).map(move |at| self.first + at * self.stride)
    }
}

impl StepPart {
    /// Time of the part without waiting.
    pub fn time(&self) -> Seconds {
        match self {
            StepPart::Local(time) | StepPart::Synchronized(_, time) => *time,
        }
    }
}

/// The device group of an instruction that synchronizes stages: a collective over the pipeline axis.
pub fn stage_sync_group(instr: &Instr) -> Option<&DeviceGroup> {
    match &instr.action {
        Action::Collective(collective) if collective.axis == Axis::Pipeline => {
            Some(&collective.group)
        }
        _ => None,
    }
}

/// Simulates a checked program. `price` must be for the program's mesh; without `overlap`, gradient buckets run after
/// the backward pass.
pub fn simulate(
    program: &CheckedProgram,
    price: KernelPrice,
    overlap: Option<OverlapSlowdown>,
) -> Timeline {
    let program = program.program();
    let mesh = &program.context.mesh;
    let indexed = program.stages.iter().enumerate();
    let stages: Vec<StageKernels> = indexed
        .map(|(index, stage)| StageKernels::new(index, stage, mesh, (price, overlap)))
        .collect();
    let times: Vec<StageTime> = stages.iter().map(|costs| costs.time.clone()).collect();
    let microbatches = program.context.workload.microbatches(&program.context.mesh);
    let schedules: Vec<_> = program.stages.iter().map(|s| s.schedule.as_slice()).collect();
    let SimulatedStep { time: step_time, spans, stage_syncs, buckets } =
        simulate_schedules(&times, &schedules);
    let mut breakdown = Breakdown::default();
    for costs in &stages {
        let busy = costs.time.forward + costs.time.backward;
        let step: Seconds = costs.time.step_phase.iter().map(StepPart::time).sum();
        let overlapped = costs.time.overlapped_backward();
        let exposed = overlapped.map_or(0.0, |pass| pass.all_ended() - costs.time.backward.0);
        let busy = busy * microbatches as f64 + step + Seconds(exposed);
        breakdown.add(&costs.parts(microbatches), 1.0 / stages.len() as f64);
        breakdown.collective_exposed += exposed / stages.len() as f64;
        // Sums in another order differ by rounding.
        let idle = step_time - busy;
        if idle > step_time * ROUNDING {
            breakdown.bubble += idle.0 / stages.len() as f64;
        }
    }
    Timeline { step_time, breakdown, spans, stage_syncs, buckets }
}

/// Simulates the schedules of all stages, and then their step phases.
pub fn simulate_schedules(times: &[StageTime], schedules: &[&[MicrobatchPass]]) -> SimulatedStep {
    let (mut spans, mut stage_syncs, mut buckets) = (vec![], vec![], vec![]);
    let time = simulate_passes(times, schedules, |event| match event {
        StepEvent::Pass(span) => spans.push(span),
        StepEvent::Sync(sync) => stage_syncs.push(sync),
        StepEvent::Bucket(bucket) => buckets.push(bucket),
    });
    SimulatedStep { time, spans, stage_syncs, buckets }
}

/// The step time of [`simulate_schedules`], without its spans.
pub fn schedule_time(times: &[StageTime], schedules: &[&[MicrobatchPass]]) -> Seconds {
    simulate_passes(times, schedules, |_| {})
}

/// An event that a simulation reports.
enum StepEvent {
    Pass(PassSpan),
    Sync(StageSync),
    Bucket(BucketSpan),
}

fn simulate_passes(
    times: &[StageTime],
    schedules: &[&[MicrobatchPass]],
    mut report: impl FnMut(StepEvent),
) -> Seconds {
    let stages = times.len();
    let passes = schedules.first().map_or(0, |passes| passes.len());
    // End of each pass by stage, direction and microbatch; negative until the pass is simulated.
    let mut ends = vec![[vec![-1.0_f64; passes], vec![-1.0_f64; passes]]; stages];
    let direction = |phase: Phase| usize::from(phase == Phase::Backward);
    let mut clock = vec![0.0_f64; stages];
    let mut next = vec![0_usize; stages];
    loop {
        let mut progressed = false;
        for stage in 0..stages {
            while let Some(pass) = schedules[stage].get(next[stage]) {
                let awaited = match pass.phase {
                    Phase::Forward if stage > 0 => Some(stage - 1),
                    Phase::Backward if stage + 1 < stages => Some(stage + 1),
                    _ => None,
                };
                let ready = match awaited {
                    None => 0.0,
                    Some(other) => {
                        let end = ends[other][direction(pass.phase)][pass.microbatch as usize];
                        if end < 0.0 {
                            break;
                        }
                        end
                    }
                };
                let begin = clock[stage].max(ready);
                next[stage] += 1;
                let is_last = next[stage] == schedules[stage].len();
                let overlapped = if is_last { times[stage].overlapped_backward() } else { None };
                let end = match (&overlapped, pass.phase) {
                    (Some(overlapped), _) => begin + overlapped.end,
                    (None, Phase::Forward) => begin + times[stage].forward.0,
                    (None, _) => begin + times[stage].backward.0,
                };
                ends[stage][direction(pass.phase)][pass.microbatch as usize] = end;
                clock[stage] = end;
                if let Some(overlapped) = overlapped {
                    // The step phase begins when pass and reductions have ended.
                    clock[stage] = begin + overlapped.all_ended();
                    for (bucket, span) in overlapped.buckets.iter().enumerate() {
                        let [begin, end] = span.map(|time| Seconds(begin + time));
                        report(StepEvent::Bucket(BucketSpan { stage, bucket, begin, end }));
                    }
                }
                progressed = true;
                let (phase, microbatch) = (pass.phase, pass.microbatch);
                let (begin, end) = (Seconds(begin), Seconds(end));
                report(StepEvent::Pass(PassSpan { stage, phase, microbatch, begin, end }));
            }
        }
        if !progressed {
            break;
        }
    }
    let step_begins = clock.clone();
    simulate_step_phases(times, &mut clock, |sync| report(StepEvent::Sync(sync)));
    for (stage, (begin, end)) in step_begins.into_iter().zip(&clock).enumerate() {
        let (begin, end) = (Seconds(begin), Seconds(*end));
        let (phase, microbatch) = (Phase::Step, 0);
        report(StepEvent::Pass(PassSpan { stage, phase, microbatch, begin, end }));
    }
    Seconds(clock.into_iter().fold(0.0, f64::max))
}

/// Simulates the step phases, each from its stage's clock on. The stages of a checked program synchronize in one order.
fn simulate_step_phases(
    times: &[StageTime],
    clock: &mut [f64],
    mut on_sync: impl FnMut(StageSync),
) {
    let mut next = vec![0_usize; times.len()];
    let mut progressed = true;
    while std::mem::take(&mut progressed) {
        for stage in 0..times.len() {
            while let Some(StepPart::Local(time)) = times[stage].step_phase.get(next[stage]) {
                clock[stage] += time.0;
                next[stage] += 1;
                progressed = true;
            }
        }
        for stage in 0..times.len() {
            let part = |stage: usize| times[stage].step_phase.get(next[stage]);
            let Some(StepPart::Synchronized(members, _)) = part(stage) else { continue };
            let arrived = |stage: usize| match part(stage) {
                Some(StepPart::Synchronized(same, time)) if same == members => Some(time.0),
                _ => None,
            };
            let lengths: Option<Vec<f64>> = members.stages().map(arrived).collect();
            let Some(lengths) = lengths else { continue };
            let begin = members.stages().map(|stage| clock[stage]).fold(0.0, f64::max);
            let end = begin + lengths.into_iter().fold(0.0, f64::max);
            for stage in members.stages() {
                on_sync(StageSync { stage, arrival: Seconds(clock[stage]), end: Seconds(end) });
                clock[stage] = end;
                next[stage] += 1;
            }
            progressed = true;
        }
    }
    debug_assert!(times.iter().zip(&next).all(|(time, next)| *next == time.step_phase.len()));
}

/// The times of a stage's gradient buckets.
fn bucket_times(stage: &StageProgram, price: KernelPrice) -> Vec<BucketTime> {
    let (mut ready, mut priced) = (Seconds(0.0), 0);
    let time = |instr: &Instr| price(&instr.kernel());
    let of_bucket = |GradientBucket { after, reductions }: &GradientBucket| {
        ready += stage.backward[priced..*after].iter().map(time).sum();
        priced = *after;
        BucketTime { ready, reduction: stage.step[reductions.clone()].iter().map(time).sum() }
    };
    stage.gradient_buckets.iter().map(of_bucket).collect()
}

/// A stage's kernels, priced and summed by kind.
struct StageKernels {
    time: StageTime,
    /// Per phase: forward, backward, step.
    kinds: [Breakdown; 3],
}

impl StageKernels {
    fn new(
        index: usize,
        stage: &StageProgram,
        mesh: &Mesh,
        (price, slowdown): (KernelPrice, Option<OverlapSlowdown>),
    ) -> StageKernels {
        let overlap = slowdown
            .filter(|_| !stage.gradient_buckets.is_empty())
            .map(|slowdown| StageOverlap { buckets: bucket_times(stage, price), slowdown });
        let beside_backward = overlap.as_ref().map_or(0, |_| stage.bucket_reductions());
        let mut kinds = [Breakdown::default(); 3];
        let mut totals = [Seconds(0.0); 2];
        let (mut step, mut local) = (vec![], Seconds(0.0));
        let phase_instructions =
            [&stage.forward[..], &stage.backward, &stage.step[beside_backward..]];
        for (phase, list) in phase_instructions.into_iter().enumerate() {
            for instr in list {
                let time = price(&instr.kernel());
                *kinds[phase].part_mut(instr) += time.0;
                match (totals.get_mut(phase), stage_sync_group(instr)) {
                    (Some(total), _) => *total += time,
                    (None, None) => local += time,
                    (None, Some(group)) => {
                        step.push(StepPart::Local(std::mem::take(&mut local)));
                        let members = SyncedStages::containing(index, group, mesh);
                        step.push(StepPart::Synchronized(members, time));
                    }
                }
            }
        }
        step.push(StepPart::Local(local));
        let [forward, backward] = totals;
        let time = StageTime { forward, backward, step_phase: step, overlap };
        StageKernels { time, kinds }
    }

    fn parts(&self, microbatches: u64) -> Breakdown {
        let mut parts = Breakdown::default();
        parts.add(&self.kinds[0], microbatches as f64);
        parts.add(&self.kinds[1], microbatches as f64);
        parts.add(&self.kinds[2], 1.0);
        parts
    }
}
