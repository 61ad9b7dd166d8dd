//! Lower bounds on the step time of a pipeline.
//!
//! With tₛ the microbatch time of stage s of P, uₛ its step phase and wₛ = P − s, a 1F1B step of m
//! microbatches takes at least
//!
//! ```text
//! maxₛ u₀ + Σ_{j<s} tⱼ + m·tₛ
//! maxₛ u₀ + Σ_{j<s} tⱼ + 2·Σ_{j>s} tⱼ + (m − wₛ + 1)·tₛ      where m > wₛ
//! ```
//! First bound: stage s begins after the forward passes of the first microbatch on all earlier stages, which
//! run their own last backward passes after that of stage s. Second bound: stage s also waits twice for the later
//! stages. Its first backward pass follows wₛ forward passes and the round trip of the first microbatch to
//! the last stage; its last backward pass follows the round trip of the last microbatch. The first stage
//! ends last and then runs its step phase. Equal stages attain both bounds. A first stage of few blocks has a short step phase, and
//! another stage e ≤ s may end the step. The largest uₑ − Σ_{j<e} (tⱼ − fⱼ) then takes the place of u₀, where fⱼ are forward times.
//!
//! With the zero-bubble schedule, weight gradients follow the backward passes, so that no earlier stage waits for them. Let fₛ
//! be the forward time of a stage, bₛ its backward time with all weight gradients, b'ₛ its backward time without the weight
//! gradients that have passes of their own, tₛ = fₛ + bₛ, and t'ₛ = fₛ + b'ₛ. A step takes at least
//!
//! ```text
//! maxₛ uₛ + Σ_{j<s} fⱼ + m·tₛ
//! maxₛ uₛ + Σ_{j<s} fⱼ + Σ_{j>s} t'ⱼ + (m − v + 1)·tₛ + (v − 1)·bₛ  where v = min(m, wₛ)
//! maxₛ uₛ + Σ_{j<s} fⱼ + (m − 1)·tₛ + t'ₛ + r'ₛ               fₛ in place of t'ₛ where s has no weight-gradient
//!                                                     passes, as without blocks
//! maxₛ uₛ + Σ_{j<s} fⱼ + Σ_{j>s} t'ⱼ + (m − v)·tₛ + (v − 1)·bₛ + t'ₛ + r'ₛ   likewise
//! maxₛ u₀ + t₀ + Σ_{0<j<s} t'ⱼ + (m − k)·tₛ + k·t'ₛ                     where k = min(m, s + 1) and s > 0
//! maxₛ u₀ + t₀ + Σ_{0<j<s} t'ⱼ + 2·Σ_{j>s} t'ⱼ + (n − k)·tₛ + k·t'ₛ     where n = m − wₛ + 1 > 1 and k = min(n, s + 1)
//! maxₛ u₀ + 2·Σ_{j>s} t'ⱼ + n·tₛ                                        for s = 0
//! ```
//! Second bound: the first backward pass of stage s follows the round trip of the first microbatch, and until then the
//! stage has run at most v forward passes and no backward pass. Third and fourth bound: all gradient reductions begin after the
//! last pass has begun, which is a short one; r' is the part of their time that u does not count. Fifth bound: the backward pass
//! of the last microbatch follows all other passes of stage s but the weight gradients of k microbatches, and then visits the
//! earlier stages, of which the first computes its weight gradients in the same pass. Last bounds: stage s waits for the later
//! stages twice, before its first backward pass and before that of the last microbatch. From the one to the other it runs
//! n − 1 passes of each kind, but weight gradients only of microbatches whose backward pass was s or more passes before. In these
//! three, another stage e < s may end the step: the largest uₑ + tₑ − t'ₑ − Σ_{j<e} (t'ⱼ − fⱼ) takes the place of u₀ + t₀ − t'₀.
//!
//! Of uₛ, the gathers of updated weights run during the first forward pass, and before it. Each second of them adds at least h
//! (`OverlapSlowdown::hidden_cost`) to that pass, but a later stage hides up to Σ_{j<s} fⱼ of them while it waits for its first
//! microbatch. Bounds with uₛ of a later stage are therefore less by h·Σ_{j<s} fⱼ, except where they count no wait: the
//! stage is then as long idle as gathers are hidden.
//!
//! Blocks are assigned to minimise m·t + u. Another assignment may have a smaller t and a larger u,
//! so the bounds use the smallest t that the stage's bytes allow, the smallest u, f, b and t', and the smallest
//! m·t + u where both are of one stage. For later stages, tₑ + uₑ is minimised together. Such a bound B + t₀ + u₀ and the bound
//! A + n·t₀ + u₀ of the first stage alone, where A is 2·Σ_{j>0} tⱼ or, with few microbatches, 0 and n is m, have means
//!
//! ```text
//! (1 − y)·B + y·A + W·t₀ + u₀                          with W = 1 − y + y·n
//! ```
//! A first stage with a short step phase has long passes, so that a mean may be larger than both bounds, each at its own best t₀.
//! The means are taken at the W of [`PruningCutoff::first_stage_weights`].

use std::ops::Range;

use narrows_cost_model::PassTimesMin;
use narrows_plan::PipelineSchedule;

use super::assignment::StageAssignment;
use super::joint_bound::{JointBounds, JointStepEndCost};
use super::overhead::StageOverhead;
use super::partition::{FIRST_STAGE_WEIGHTS, PruningCutoff};
use super::prefix_sums::{prefix_sums, sum_of_run};
use super::stage_position::{PassesAround, StagePosition, StepSchedule};

/// Terms of the first stages of a division, at which a step may end, in bounds of later stages. In seconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepEndCost {
    /// Lower bound on the time that the step phase of any of them adds to the least passes of all.
    step_phase: f64,
    /// Terms of the means with bounds of the first stage alone, for each of [`PruningCutoff::first_stage_weights`].
    means: [f64; FIRST_STAGE_WEIGHTS],
    /// The terms of joint bounds.
    joint: JointStepEndCost,
}

impl StepEndCost {
    /// The cost of a first stage of which only a bound on the step phase is known.
    pub(super) fn of_step_phase(step_phase: f64) -> StepEndCost {
        let means = [f64::NEG_INFINITY; FIRST_STAGE_WEIGHTS];
        StepEndCost { step_phase, means, joint: JointStepEndCost::UNKNOWN }
    }

    /// Whether no bound of a later stage is larger than with the other cost.
    pub(super) fn is_no_more_than(&self, other: &StepEndCost) -> bool {
        let mut means = self.means.iter().zip(&other.means);
        self.step_phase <= other.step_phase
            && self.joint.is_no_more_than(&other.joint)
            && means.all(|(own, other)| own <= other)
    }
}

/// Prefix sums of lower bounds over stages and blocks.
pub(super) struct PrefixBounds {
    /// Microbatch time of the overheads of the stages before s.
    overheads: Vec<f64>,
    /// Passes of the overheads of the stages before s.
    overhead_passes: Vec<PassTimesMin>,
    /// Microbatch time of the blocks before b.
    microbatch_times: Vec<f64>,
    /// Passes of the blocks before b.
    passes: Vec<PassTimesMin>,
    /// Time of the reductions of the blocks before b that their step phases do not count.
    uncounted_reductions: Vec<f64>,
    /// Step phase of the blocks before b.
    step_phase_times: Vec<f64>,
    /// Microbatch time and step phase of the blocks before b, minimised together.
    single_microbatch_steps: Vec<f64>,
    /// The same with each weight of microbatch times.
    weighted_steps: Vec<[f64; FIRST_STAGE_WEIGHTS]>,
    /// The weights.
    weights: [u64; FIRST_STAGE_WEIGHTS],
    /// Least time that gathers during a first forward pass add to a step, over their time alone.
    gather_hidden_cost: f64,
    /// Bounds from passes, reductions and updates together.
    joint: Option<JointBounds>,
    step: StepSchedule,
}

impl PrefixBounds {
    pub(super) fn new(
        overheads: &[StageOverhead],
        step: StepSchedule,
        cutoff: &PruningCutoff,
    ) -> PrefixBounds {
        let microbatch_time = |overhead: &StageOverhead| (overhead.forward + overhead.backward).0;
        let passes = |overhead: &StageOverhead| PassTimesMin {
            forward: overhead.forward.0,
            backward: overhead.backward.0,
            without_weight_gradients: microbatch_time(overhead),
        };
        PrefixBounds {
            overheads: prefix_sums(overheads.iter().map(microbatch_time), |a, b| a + b),
            overhead_passes: prefix_sums(overheads.iter().map(passes), PassTimesMin::plus),
            microbatch_times: prefix_sums(cutoff.microbatch_times_min.iter().copied(), |a, b| {
                a + b
            }),
            passes: prefix_sums(cutoff.passes_min.iter().copied(), PassTimesMin::plus),
            uncounted_reductions: prefix_sums(
                cutoff.uncounted_reductions_min.iter().copied(),
                |a, b| a + b,
            ),
            step_phase_times: prefix_sums(cutoff.step_phase_times_min.iter().copied(), |a, b| {
                a + b
            }),
            single_microbatch_steps: prefix_sums(
                cutoff.single_microbatch_steps_min.iter().copied(),
                |a, b| a + b,
            ),
            weighted_steps: prefix_sums(cutoff.weighted_steps_min.iter().copied(), |a, b| {
                std::array::from_fn(|weight| a[weight] + b[weight])
            }),
            weights: cutoff.first_stage_weights,
            gather_hidden_cost: overheads[0].gather_hidden_cost,
            joint: cutoff.joint.as_ref().map(|minima| JointBounds::new(minima, overheads)),
            step,
        }
    }

    /// Lower bound on the step phase of a stage with the blocks of `run`.
    pub(super) fn step_phase_bound(&self, overhead: &StageOverhead, run: &Range<usize>) -> f64 {
        overhead.step_phase_min.0 + sum_of_run(&self.step_phase_times, run)
    }

    /// The cost of the stages at which a step may end for the bounds of later stages, once `stage` has the blocks of `run`; `before`
    /// is the one without this stage.
    pub(super) fn step_end_cost_after(
        &self,
        stage: usize,
        run: &Range<usize>,
        assignment: &StageAssignment,
        overhead: &StageOverhead,
        before: StepEndCost,
    ) -> StepEndCost {
        let joint = self.joint.as_ref();
        if stage > 0 {
            return StepEndCost {
                step_phase: before.step_phase.max(self.later_end(stage, run, overhead)),
                joint: joint.map_or(before.joint, |joint| {
                    joint.step_end_cost_after(stage, run, before.joint, self.step)
                }),
                ..before
            };
        }
        StepEndCost {
            step_phase: self.first_stage_bound(overhead, run, assignment),
            means: std::array::from_fn(|at| self.first_stage_mean(overhead, run, at)),
            joint: joint.map_or(JointStepEndCost::UNKNOWN, |joint| joint.first_stage(run)),
        }
    }

    /// The share y of the bound of the first stage alone in the mean at one of the weights; `None` at a weight of no mean.
    fn share_of_first_stage(&self, at: usize) -> Option<f64> {
        let first = StagePosition { stage: 0, stages: self.overheads.len() - 1, step: self.step };
        let passes = first.passes_after_warm_up().unwrap_or(self.step.microbatches as f64);
        let weight = self.weights[at] as f64;
        (weight > 1.0 && weight <= passes).then(|| (weight - 1.0) / (passes - 1.0))
    }

    /// The terms of a mean of the first stage with the blocks of `run`, less those of its passes that bounds of later stages count.
    fn first_stage_mean(&self, overhead: &StageOverhead, run: &Range<usize>, at: usize) -> f64 {
        let Some(share) = self.share_of_first_stage(at) else { return f64::NEG_INFINITY };
        let (weight, microbatches) = (self.weights[at] as f64, self.step.microbatches as f64);
        let around = self.passes_around(0, run);
        let blocks = self.microbatch_times.len() - 1;
        let (counted, after) = match self.step.schedule {
            PipelineSchedule::ZeroBubble => (around.own_round_trip, around.round_trip_after),
            PipelineSchedule::OneForwardOneBackward | PipelineSchedule::Interleaved => {
                let own = self.overheads[1] + self.microbatch_times[run.end];
                let all = self.overheads[self.overheads.len() - 1] + self.microbatch_times[blocks];
                (own, all - own)
            }
        };
        let waits = StagePosition { stage: 0, stages: self.overheads.len() - 1, step: self.step }
            .passes_after_warm_up()
            .map_or(0.0, |_| 2.0 * after);
        // m·t + u of the overhead is minimised together.
        let of_step = weight / microbatches;
        let step_phase =
            of_step * overhead.step_phase.0 + (1.0 - of_step) * overhead.step_phase_min.0;
        let of_overhead = weight * (overhead.forward + overhead.backward).0 + step_phase;
        let of_blocks = self.weighted_steps[run.end][at] - self.weighted_steps[run.start][at];
        share * waits + of_overhead + of_blocks - (1.0 - share) * counted
    }

    /// The largest bound on a step of which `passes` bounds the passes of a stage, and of those before it until they end their own.
    fn with_step_end(&self, passes: f64, end: &StepEndCost) -> f64 {
        let mean = |(at, term): (usize, &f64)| {
            let share = self.share_of_first_stage(at)?;
            Some((1.0 - share) * passes + term)
        };
        let means = end.means.iter().enumerate().filter_map(mean);
        means.fold(passes + end.step_phase, f64::max)
    }

    /// Lower bound on the time by which the first stage with the blocks of `run` delays a step beyond its passes without a
    /// memory limit: its step phase, or both minimised together. The passes are those that bounds of later stages count: with
    /// the zero-bubble schedule, without weight gradients.
    fn first_stage_bound(
        &self,
        overhead: &StageOverhead,
        run: &Range<usize>,
        assignment: &StageAssignment,
    ) -> f64 {
        let microbatch_time = sum_of_run(&self.microbatch_times, run);
        let together = (overhead.step_phase_min + assignment.single_microbatch_step_min).0;
        let both = together.max(microbatch_time + self.step_phase_bound(overhead, run));
        let counted = match self.step.schedule {
            PipelineSchedule::ZeroBubble => {
                let round_trip = |block: usize| self.passes[block].without_weight_gradients;
                round_trip(run.end) - round_trip(run.start)
            }
            PipelineSchedule::OneForwardOneBackward | PipelineSchedule::Interleaved => {
                microbatch_time
            }
        };
        both - counted
    }

    /// Lower bound on the time by which a step that ends at a later stage with the blocks of `run` exceeds the passes that bounds of
    /// the stages after it count: its own passes and its step phase, minimised together, follow the forward passes of the stages
    /// before, less the gathers that are hidden meanwhile, but not their backward passes.
    fn later_end(&self, stage: usize, run: &Range<usize>, overhead: &StageOverhead) -> f64 {
        let PassesAround { forward_before, round_trip_before, own_round_trip, .. } =
            self.passes_around(stage, run);
        let counted = match self.step.schedule {
            PipelineSchedule::ZeroBubble => round_trip_before + own_round_trip,
            PipelineSchedule::OneForwardOneBackward | PipelineSchedule::Interleaved => {
                self.overheads[stage + 1] + self.microbatch_times[run.end]
            }
        };
        let own = (overhead.forward + overhead.backward + overhead.step_phase_min).0
            + sum_of_run(&self.single_microbatch_steps, run);
        (1.0 - self.gather_hidden_cost) * forward_before + own - counted
    }

    /// Lower bound on a step because stage `stage` has the blocks of `run`; `end` is the cost of the stages before, or of the first one itself.
    pub(super) fn of_stage(
        &self,
        stage: usize,
        run: Range<usize>,
        assignment: &StageAssignment,
        overhead: &StageOverhead,
        end: &StepEndCost,
    ) -> f64 {
        let joint = self.joint.as_ref();
        let joint = joint.map_or(0.0, |joint| joint.of_stage(stage, &run, end.joint, self.step));
        let stages = self.overheads.len() - 1;
        let microbatches = self.step.microbatches as f64;
        let position = StagePosition { stage, stages, step: self.step };
        let before = self.overheads[stage] + self.microbatch_times[run.start];
        let to = self.overheads[stage + 1] + self.microbatch_times[run.end];
        let own = (overhead.forward + overhead.backward + assignment.microbatch_time_min)
            .0
            .max(to - before);
        // Its passes and its step phase, minimised together.
        let all = microbatches * assignment.microbatch_time(overhead)
            + (assignment.step_phase + overhead.step_phase - assignment.integrality_slack).0;
        let (mut bound, after) = match self.step.schedule {
            PipelineSchedule::ZeroBubble => {
                let around = self.passes_around(stage, &run);
                let backward = overhead.backward.0 + self.passes[run.end].backward
                    - self.passes[run.start].backward;
                let passes = |of_one| position.bound_zero_bubble(&around, of_one, own, backward);
                let mut before_step_phase = passes(own);
                if stage > 0 {
                    // The last microbatch before the last pass of the stage.
                    let of_blocks = |pass: fn(&PassTimesMin) -> f64| {
                        pass(&self.passes[run.end]) - pass(&self.passes[run.start])
                    };
                    let last = match self.step.has_weight_gradient_passes && !run.is_empty() {
                        true => {
                            (overhead.forward + overhead.backward).0
                                + of_blocks(|passes| passes.without_weight_gradients)
                        }
                        false => overhead.forward.0 + of_blocks(|passes| passes.forward),
                    };
                    // Those of the first block are counted.
                    let later_blocks = (run.start + 1).min(run.end);
                    let reductions =
                        sum_of_run(&self.uncounted_reductions, &(later_blocks..run.end));
                    before_step_phase = before_step_phase.max(passes(last) + reductions);
                }
                let hidden_gathers = self.gather_hidden_cost * around.forward_before;
                let waited = around.forward_before - hidden_gathers;
                let step_phase = self.step_phase_bound(overhead, &run) - hidden_gathers;
                let last_return = self.with_step_end(position.last_return(&around, own), end);
                let bound = (before_step_phase + step_phase).max(waited + all).max(last_return);
                (bound, around.round_trip_after)
            }
            PipelineSchedule::OneForwardOneBackward | PipelineSchedule::Interleaved => {
                let after = self.overheads[stages]
                    + self.microbatch_times[self.microbatch_times.len() - 1]
                    - to;
                let bound = self.with_step_end(position.bound_1f1b(before, own, after), end);
                (bound.max(all), after)
            }
        };
        if let Some(passes) = position.passes_after_warm_up().filter(|_| stage == 0) {
            bound = bound.max(self.first_stage_waiting(passes, after, all, end.step_phase));
        }
        bound.max(joint)
    }

    /// Lower bound on a step whose first stage waits twice for the later ones, which take `after`, and runs some passes besides.
    /// `all` is a lower bound on all of its passes and its step phase, m·t + u, of which `step_phase` is one on u.
    fn first_stage_waiting(&self, passes: f64, after: f64, all: f64, step_phase: f64) -> f64 {
        // The remainder after some passes is at least its share.
        let share = passes / self.step.microbatches as f64;
        2.0 * after + share * all + (1.0 - share) * step_phase
    }

    /// Lower bounds on the passes of the stages around one with the blocks of `run`.
    fn passes_around(&self, stage: usize, run: &Range<usize>) -> PassesAround {
        let (stages, blocks) = (self.overheads.len() - 1, self.passes.len() - 1);
        let sum = |stage: usize, block: usize, pass: fn(&PassTimesMin) -> f64| {
            pass(&self.overhead_passes[stage]) + pass(&self.passes[block])
        };
        let round_trip = |stage, block| sum(stage, block, |passes| passes.without_weight_gradients);
        let (before, to) = (round_trip(stage, run.start), round_trip(stage + 1, run.end));
        PassesAround {
            forward_before: sum(stage, run.start, |passes| passes.forward),
            round_trip_before: before,
            own_round_trip: to - before,
            round_trip_after: round_trip(stages, blocks) - to,
        }
    }
}
