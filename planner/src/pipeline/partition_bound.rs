//! Lower bound on the step of a partition, whose stages have their assignments.

use std::ops::Range;

use narrows_cost_model::PassTimes;
use narrows_plan::{PipelineSchedule, Seconds};

use super::interleaved::{chunk_passes, passes_bound};
use super::overhead::StageOverhead;
use super::partition::Partition;
use super::stage_position::{PassesAround, StagePosition, StepSchedule};

impl Partition {
    /// Lower bound on a step with these assignments, in seconds.
    pub(crate) fn step_bound(&self, overheads: &[StageOverhead], step: StepSchedule) -> f64 {
        let stages = || self.stages.iter().zip(overheads);
        let times: Vec<f64> =
            stages().map(|(stage, overhead)| stage.microbatch_time(overhead)).collect();
        let step_phase =
            |stage: usize| (self.stages[stage].step_phase + overheads[stage].step_phase).0;
        let position = |stage: usize| StagePosition { stage, stages: times.len(), step };
        match step.schedule {
            PipelineSchedule::Interleaved => {
                let of_stages: Vec<Vec<PassTimes>> =
                    stages().map(|(stage, overhead)| chunk_passes(stage, overhead)).collect();
                let time = |passes: &PassTimes| (passes.forward + passes.backward).0;
                let chunks = of_stages.first().map_or(0, Vec::len);
                let chunks: Vec<f64> = (0..chunks)
                    .flat_map(|chunk| of_stages.iter().map(move |stage| time(&stage[chunk])))
                    .collect();
                passes_bound(&chunks, times.len(), step.microbatches, |_| 0.0) + step_phase(0)
            }
            PipelineSchedule::ZeroBubble => {
                let forward: Vec<f64> = stages()
                    .map(|(stage, overhead)| (stage.forward + overhead.forward).0)
                    .collect();
                let deferred = |stage: usize| match stage {
                    0 => 0.0,
                    _ => self.stages[stage].weight_gradient.0,
                };
                let backward = |stage: usize| times[stage] - forward[stage];
                let round_trip = |stages: Range<usize>| -> f64 {
                    stages.map(|stage| times[stage] - deferred(stage)).sum()
                };
                let of_stage = |stage: usize| {
                    let around = PassesAround {
                        forward_before: forward[..stage].iter().sum(),
                        round_trip_before: round_trip(0..stage),
                        own_round_trip: round_trip(stage..stage + 1),
                        round_trip_after: round_trip(stage + 1..times.len()),
                    };
                    let position = position(stage);
                    let (own, backward) = (times[stage], backward(stage));
                    let passes =
                        |of_one| position.bound_zero_bubble(&around, of_one, own, backward);
                    let mut before_step_phase = passes(own);
                    let uncounted = overheads[stage]
                        .slowdown
                        .map_or(0.0, |slowdown| 1.0 - slowdown.hidden_cost());
                    if stage > 0 && deferred(stage) > 0.0 {
                        let later_blocks = self.stages[stage].blocks.iter().skip(1);
                        let reductions: Seconds =
                            later_blocks.map(|block| block.time.overlapped).sum();
                        let before_last = passes(own - deferred(stage));
                        before_step_phase =
                            before_step_phase.max(before_last + uncounted * reductions.0);
                    }
                    let hidden_gathers =
                        overheads[stage].gather_hidden_cost * around.forward_before;
                    let last_return = position.last_return(&around, own) + step_phase(0);
                    (before_step_phase + step_phase(stage) - hidden_gathers).max(last_return)
                };
                (0..times.len()).map(of_stage).fold(0.0, f64::max)
            }
            PipelineSchedule::OneForwardOneBackward => {
                let all: f64 = times.iter().sum();
                let (mut before, mut bound) = (0.0, 0.0_f64);
                for (stage, own) in times.iter().enumerate() {
                    let after = all - before - own;
                    bound = bound.max(position(stage).bound_1f1b(before, *own, after));
                    before += own;
                }
                // The first stage ends its passes last, and then runs its step phase.
                bound + step_phase(0)
            }
        }
    }
}
