//! Lower bounds on the step of a pipeline from passes, reductions and updates of the same decisions.
//!
//! The updates of all stages follow the norm of all gradients, which follows all passes and reductions. Let vₛ be the updates of
//! stage s, rₛ the rest of its step phase, and ρ = 1 / (m + P − 1) for m microbatches of P stages. A step takes at least the
//! time of any path of passes up to the norm, and any mean of the vₛ. The [bounds of both schedules](super::step_bound) are paths
//! through m + P − 1 passes, or fewer. If each pass bears the share ρ of the updates of its stage, these are a mean. With
//! f⁺ = f + ρ·v, and t⁺ and t'⁺ likewise, a step takes at least
//!
//! ```text
//! r₀ + t⁺₀ + Σ_{0<j<s} t'⁺ⱼ + (m − k)·t⁺ₛ + k·t'⁺ₛ                   zero-bubble, and the other bounds in the same way
//! rₑ + Σ_{j<e} f⁺ⱼ + t⁺ₑ + Σ_{e<j<s} t'⁺ⱼ + (m − k)·t⁺ₛ + k·t'⁺ₛ      the same where a step ends at stage e
//! Σ_{j<s} f⁺ⱼ + m·t⁺ₛ + rₛ
//! Σ_{j<s} f⁺ⱼ + Σ_{j>s} t'⁺ⱼ + m·t⁺ₛ − (v − 1)·fₛ + rₛ               zero-bubble, with v as there
//! Σ_{j<s} f⁺ⱼ + m·t⁺ₛ − (1 − c')·lₛ + (1 − h)·Rₛ + rₛ
//! ```
//! In the last one, gradient reductions of R seconds take longer than the last pass l that they overlap with. As in the bound of
//! one stage (`context/collective_bound`), they add h·R, counted in r, to a longer pass, and otherwise c' = c·(1 − 1/k) of the
//! pass adds to them. Gathers of updated weights during the first forward pass of the first stage mirror that.
//!
//! Every [term](super::joint_times) is the least of its sum over the decisions of a segment. Other bounds add the least passes of
//! some decisions and the least step phase of others.

use std::ops::Range;

use narrows_plan::PipelineSchedule;

use super::joint_times::{JointMinima, JointTimes, plus};
use super::overhead::StageOverhead;
use super::prefix_sums::prefix_sums;
use super::roles::{CASES, Ending, ForwardGathers, Role};
use super::stage_position::{PassesAround, StagePosition, StepSchedule};

/// Terms of the stages at which a step may end in the bounds of later stages, in seconds: what they add beyond the terms of stages
/// between.
#[derive(Clone, Copy, Debug)]
pub(super) struct JointStepEndCost {
    /// On the path of the last return, with the step phase of the stage where it ends: the largest of these.
    last_return: f64,
    /// Of the first stage on the path of the first forward pass.
    forward: f64,
}

impl JointStepEndCost {
    /// The terms of stages of which nothing is known.
    pub(super) const UNKNOWN: JointStepEndCost =
        JointStepEndCost { last_return: f64::NEG_INFINITY, forward: 0.0 };

    /// Whether no term is larger.
    pub(super) fn is_no_more_than(&self, other: &JointStepEndCost) -> bool {
        self.last_return <= other.last_return && self.forward <= other.forward
    }
}

/// Prefix sums of joint times over stages and blocks.
pub(super) struct JointBounds {
    overheads: Vec<JointTimes>,
    blocks: Vec<JointTimes>,
}

impl JointBounds {
    pub(super) fn new(minima: &JointMinima, overheads: &[StageOverhead]) -> JointBounds {
        let stages = overheads.len();
        let of_overhead = |(stage, overhead)| minima.of_overhead(overhead, stage, stages);
        JointBounds {
            overheads: prefix_sums(overheads.iter().enumerate().map(of_overhead), plus),
            blocks: prefix_sums(minima.blocks.iter().copied(), plus),
        }
    }

    /// The time in a role of all stages before one, whose blocks begin with `block`.
    fn before(&self, stage: usize, block: usize, role: Role) -> f64 {
        self.overheads[stage][role.index()] + self.blocks[block][role.index()]
    }

    /// The time of a stage in a role.
    fn own(&self, stage: usize, run: &Range<usize>, role: Role) -> f64 {
        self.before(stage + 1, run.end, role) - self.before(stage, run.start, role)
    }

    /// The largest time of a first stage in all cases of a role.
    fn longest(&self, run: &Range<usize>, role: fn(usize) -> Role) -> f64 {
        let of_cases = (0..CASES.len()).map(|case| self.own(0, run, role(case)));
        of_cases.fold(f64::NEG_INFINITY, f64::max)
    }

    /// The terms of a first stage with the blocks of `run`.
    pub(super) fn first_stage(&self, run: &Range<usize>) -> JointStepEndCost {
        let own = |role| self.own(0, run, role);
        let forward = |gathers| own(Role::Forward(gathers));
        let gathers = forward(ForwardGathers::Hidden).max(forward(ForwardGathers::Longer));
        JointStepEndCost {
            last_return: self.longest(run, Role::LastReturn) - own(Role::RoundTrip),
            // It waits for no microbatch, and hides no gathers meanwhile.
            forward: (gathers - forward(ForwardGathers::Uncounted)).max(0.0),
        }
    }

    /// The terms with those of a later stage that has the blocks of `run`; `before` are those of the stages before it.
    pub(super) fn step_end_cost_after(
        &self,
        stage: usize,
        run: &Range<usize>,
        before: JointStepEndCost,
        step: StepSchedule,
    ) -> JointStepEndCost {
        let [forward, round_trip] = [Role::Forward(ForwardGathers::Uncounted), Role::RoundTrip]
            .map(|role| self.before(stage, run.start, role));
        let own = |role| self.own(stage, run, role);
        let end =
            own(Ending::Hidden.last_return()).max(own(longer_ending(run, step).last_return()));
        let begin = forward + before.forward - round_trip;
        let last_return = before.last_return.max(begin + end - own(Role::RoundTrip));
        JointStepEndCost { last_return, ..before }
    }

    /// Lower bound on a step because of a stage with the blocks of `run`, with the terms of the stages before.
    pub(super) fn of_stage(
        &self,
        stage: usize,
        run: &Range<usize>,
        end: JointStepEndCost,
        step: StepSchedule,
    ) -> f64 {
        let (stages, blocks) = (self.overheads.len() - 1, self.blocks.len() - 1);
        let position = StagePosition { stage, stages, step };
        let before = self.before(stage, run.start, Role::RoundTrip);
        let to = self.before(stage + 1, run.end, Role::RoundTrip);
        let after = self.before(stages, blocks, Role::RoundTrip) - to;
        if stage == 0 {
            let waiting = position
                .passes_after_warm_up()
                .map_or(0.0, |_| 2.0 * after + self.longest(run, Role::AfterWarmUp));
            return waiting.max(self.longest(run, Role::Step));
        }
        // Later stages gather while they wait.
        let longer = longer_ending(run, step);
        let own = |role| self.own(stage, run, role);
        let forward_before =
            self.before(stage, run.start, Role::Forward(ForwardGathers::Uncounted));
        let largest = |time: &dyn Fn(Ending) -> f64| time(Ending::Hidden).max(time(longer));
        let begin = forward_before + end.forward;
        let of_step = begin + largest(&|ending| own(ending.step()));
        let passes = own(Role::Passes);
        let [waiting, last_return] = match step.schedule {
            PipelineSchedule::ZeroBubble => {
                let around = PassesAround {
                    forward_before,
                    round_trip_before: before,
                    own_round_trip: to - before,
                    round_trip_after: after,
                };
                // As the least of sums that are linear in the number of earlier forward passes, the time is concave in it.
                let second = StagePosition { stage: 1, stages, step };
                let share = position.earlier_forward_passes() / second.earlier_forward_passes();
                let waited = |ending: Ending| {
                    let all = own(ending.step());
                    if share > 0.0 { all + share * (own(Role::Waited(ending)) - all) } else { all }
                };
                [begin + after + largest(&waited), position.last_return(&around, passes)]
            }
            PipelineSchedule::OneForwardOneBackward | PipelineSchedule::Interleaved => {
                [0.0, position.bound_1f1b(before, passes, after)]
            }
        };
        of_step.max(waiting).max(end.last_return + last_return)
    }
}

/// The end of a step of a later stage with the blocks of `run` whose reductions take longer than its last pass.
fn longer_ending(run: &Range<usize>, step: StepSchedule) -> Ending {
    match step.has_weight_gradient_passes && !run.is_empty() {
        true => Ending::WithWeightGradients,
        false => Ending::Reductions,
    }
}
