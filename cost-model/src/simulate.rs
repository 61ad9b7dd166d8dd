//! Simulates a step of a program from the times of its kernels.
//!
//! Each device runs its instructions in order, with collectives overlapped where the program says so. The passes of a
//! stage follow each other. A forward pass waits for the forward pass of the previous virtual stage, a backward pass
//! for the backward pass of the next one, and a weight-gradient pass for no other stage. In the step phase, stages synchronise
//! wherever an instruction is a collective over the pipeline axis: no weight is updated before the norm of all stages'
//! gradients is known. A synchronisation begins when the last of its stages arrives. With one stage and without
//! gradient buckets the step time is
//!
//! ```text
//! m·(forward + backward) + step
//! ```
//! This is the sum over all instructions of the time that each adds, which the solver minimised. Gradient
//! buckets run on a stream of their own during the last pass, and the step phase begins when both have ended. Gather
//! buckets of the step before run on that stream from the begin of the step, and the first pass waits for them where it
//! reads their weights.

use narrows_plan::program::{MicrobatchPass, Phase};
use narrows_plan::{CheckedProgram, Seconds};

use crate::breakdown::Breakdown;
use crate::price::StreamPrices;
use crate::stage_kernels::StageKernels;
use crate::stage_time::{StageTime, StepPart};

/// Relative rounding of sums of times.
const ROUNDING: f64 = 1e-12;

/// One pass of a stage in the simulated step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PassSpan {
    /// The stage.
    pub stage: usize,
    /// The pass, or the step phase.
    pub pass: MicrobatchPass,
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
    /// Every synchronisation of every stage, in the order of the step phase.
    pub stage_syncs: Vec<StageSync>,
    /// The reductions of every gradient bucket that runs during the last pass of a stage.
    pub buckets: Vec<BucketSpan>,
    /// The gathers of every gather bucket that runs during the first pass of a stage.
    pub gathers: Vec<BucketSpan>,
}

/// The collectives of a gradient bucket or a gather bucket in the simulated step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BucketSpan {
    /// The stage.
    pub stage: usize,
    /// Index of the bucket in its stage.
    pub bucket: usize,
    /// Begin of its first collective.
    pub begin: Seconds,
    /// End of its last collective.
    pub end: Seconds,
}

/// A synchronisation of one stage.
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
    /// Every synchronisation of every stage, in the order of the step phase.
    pub stage_syncs: Vec<StageSync>,
    /// The reductions of every gradient bucket that runs during the last pass of a stage.
    pub buckets: Vec<BucketSpan>,
    /// The gathers of every gather bucket that runs during the first pass of a stage.
    pub gathers: Vec<BucketSpan>,
}

/// Simulates a checked program. The prices must be for the program's mesh; without their `overlap`, all instructions of
/// a device run one after the other.
pub fn simulate(program: &CheckedProgram, prices: StreamPrices) -> Timeline {
    let program = program.program();
    let mesh = &program.context.mesh;
    let indexed = program.stages.iter().enumerate();
    let stages: Vec<StageKernels> =
        indexed.map(|(index, stage)| StageKernels::new(index, stage, mesh, prices)).collect();
    let times: Vec<StageTime> = stages.iter().map(|costs| costs.time.clone()).collect();
    let passes = program.context.passes();
    let schedules: Vec<_> = program.stages.iter().map(|s| s.schedule.as_slice()).collect();
    let SimulatedStep { time: step_time, spans, stage_syncs, buckets, gathers } =
        simulate_schedules(&times, &schedules);
    let mut breakdown = Breakdown::default();
    for (index, (costs, stage)) in stages.iter().zip(&program.stages).enumerate() {
        let last = stage.schedule.last().map(|pass| pass.chunk_phase());
        let busy = costs.time.microbatch();
        let step: Seconds = costs.time.step_phase.iter().map(StepPart::time).sum();
        let exposed = last.and_then(|last| {
            Some(costs.time.overlapped_pass(last)?.all_ended() - costs.time.pass(last).0)
        });
        let waiting = gathers.iter().any(|bucket| bucket.stage == index);
        let first = spans.iter().find(|span| waiting && span.stage == index);
        let waited = first.map_or(0.0, |span| {
            (span.end - span.begin - costs.time.pass(span.pass.chunk_phase())).0
        });
        let exposed = exposed.unwrap_or(0.0) + waited;
        let busy = busy * passes as f64 + step + Seconds(exposed);
        breakdown.add(&costs.parts(passes), 1.0 / stages.len() as f64);
        breakdown.collective_exposed += exposed / stages.len() as f64;
        // Sums in another order differ by rounding.
        let idle = step_time - busy;
        if idle > step_time * ROUNDING {
            breakdown.bubble += idle.0 / stages.len() as f64;
        }
    }
    Timeline { step_time, breakdown, spans, stage_syncs, buckets, gathers }
}

/// Simulates the schedules of all stages, and then their step phases.
pub fn simulate_schedules(times: &[StageTime], schedules: &[&[MicrobatchPass]]) -> SimulatedStep {
    let (mut spans, mut stage_syncs) = (vec![], vec![]);
    let (mut buckets, mut gathers) = (vec![], vec![]);
    let time = simulate_passes(times, schedules, |event| match event {
        StepEvent::Pass(span) => spans.push(span),
        StepEvent::Sync(sync) => stage_syncs.push(sync),
        StepEvent::Reductions(bucket) => buckets.push(bucket),
        StepEvent::Gathers(bucket) => gathers.push(bucket),
    });
    SimulatedStep { time, spans, stage_syncs, buckets, gathers }
}

/// The step time of [`simulate_schedules`], without its spans.
pub fn schedule_time(times: &[StageTime], schedules: &[&[MicrobatchPass]]) -> Seconds {
    simulate_passes(times, schedules, |_| {})
}

/// An event that a simulation reports.
enum StepEvent {
    Pass(PassSpan),
    Sync(StageSync),
    Reductions(BucketSpan),
    Gathers(BucketSpan),
}

/// Number of microbatches of a schedule.
fn microbatches(passes: &[MicrobatchPass]) -> usize {
    passes.iter().map(|pass| pass.microbatch as usize + 1).max().unwrap_or(0)
}

fn simulate_passes(
    times: &[StageTime],
    schedules: &[&[MicrobatchPass]],
    mut report: impl FnMut(StepEvent),
) -> Seconds {
    let stages = times.len();
    let microbatches = schedules.first().map_or(0, |passes| microbatches(passes));
    let virtual_stages = times.iter().map(|time| time.chunks.len()).sum::<usize>();
    // End of each forward and backward pass by virtual stage and microbatch; negative until the pass is simulated.
    let mut ends =
        vec![[vec![-1.0_f64; microbatches], vec![-1.0_f64; microbatches]]; virtual_stages];
    let direction = |phase: Phase| usize::from(phase == Phase::Backward);
    let mut clock = vec![0.0_f64; stages];
    let mut next = vec![0_usize; stages];
    loop {
        let mut progressed = false;
        for stage in 0..stages {
            while let Some(pass) = schedules[stage].get(next[stage]) {
                let own = pass.chunk * stages + stage;
                let awaited = match pass.phase {
                    Phase::Forward if own > 0 => Some(own - 1),
                    Phase::Backward if own + 1 < virtual_stages => Some(own + 1),
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
                let gathered = match next[stage] {
                    1 => times[stage].gathered_pass(pass.chunk_phase(), begin),
                    _ => None,
                };
                let is_last = next[stage] == schedules[stage].len();
                let overlapped =
                    if is_last { times[stage].overlapped_pass(pass.chunk_phase()) } else { None };
                let end = match (&overlapped, &gathered) {
                    (Some(overlapped), _) => begin + overlapped.end,
                    (_, Some(gathered)) => begin + gathered.end,
                    _ => begin + times[stage].pass(pass.chunk_phase()).0,
                };
                for (bucket, span) in gathered.iter().flat_map(|pass| &pass.buckets).enumerate() {
                    let [begin, end] = span.map(|time| Seconds(begin + time));
                    report(StepEvent::Gathers(BucketSpan { stage, bucket, begin, end }));
                }
                if pass.phase != Phase::WeightGradient {
                    ends[own][direction(pass.phase)][pass.microbatch as usize] = end;
                }
                clock[stage] = end;
                if let Some(overlapped) = overlapped {
                    // The step phase begins when pass and reductions have ended.
                    clock[stage] = begin + overlapped.all_ended();
                    for (bucket, span) in overlapped.buckets.iter().enumerate() {
                        let [begin, end] = span.map(|time| Seconds(begin + time));
                        report(StepEvent::Reductions(BucketSpan { stage, bucket, begin, end }));
                    }
                }
                progressed = true;
                let (begin, end) = (Seconds(begin), Seconds(end));
                report(StepEvent::Pass(PassSpan { stage, pass: *pass, begin, end }));
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
        let pass = MicrobatchPass::STEP;
        report(StepEvent::Pass(PassSpan { stage, pass, begin, end }));
    }
    Seconds(clock.into_iter().fold(0.0, f64::max))
}

/// Simulates the step phases, each from its stage's clock on. The stages of a checked program synchronise in one order.
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
            let Some(StepPart::Synchronised(members, _)) = part(stage) else { continue };
            let arrived = |stage: usize| match part(stage) {
                Some(StepPart::Synchronised(same, time)) if same == members => Some(time.0),
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
