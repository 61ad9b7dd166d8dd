//! Paths of passes through a pipeline that a step waits for, with one chunk a stage.
//!
//! A path begins with the first forward pass of the first stage and visits the stages up to one, s. It goes on with the passes of s, or
//! with the round trips of its first and its last microbatch through the later stages and the passes of s between them. It ends with
//! the step phase of s, or with that of the first stage, to which the last microbatch returns. The [bounds of a
//! stage](super::step_bound) are the lengths of such paths.

use narrows_plan::PipelineSchedule;

use super::joint_times::JointTimes;
use super::roles::{CASES, Ending, ForwardGathers, Longer, ROLES, Role};
use super::stage_position::{StagePosition, StepSchedule};

/// Number of times that a stage contributes each role to a path.
pub(super) type RoleCounts = [f64; ROLES.len()];

/// The contributions of each stage to a path.
#[derive(Clone, Debug)]
pub(super) struct PipelinePath {
    pub stages: Vec<RoleCounts>,
}

/// The length of what a stage contributes whose times by role these are.
pub(super) fn length(counts: &RoleCounts, times: &JointTimes) -> f64 {
    counts.iter().zip(times).map(|(count, time)| count * time).sum()
}

/// The paths of a division.
pub(super) struct PipelinePaths<'a> {
    pub step: StepSchedule,
    /// Collectives that may take longer than the passes of a stage.
    pub possible: Longer,
    /// Whether each stage has no blocks.
    pub empty: &'a [bool],
}

impl PipelinePaths<'_> {
    /// All of them.
    pub(super) fn all(&self) -> Vec<PipelinePath> {
        let stages = self.empty.len();
        let through_first = self.through_first_stage();
        let later = 1..stages;
        let ending = later.clone().flat_map(|stage| self.ending_at(stage));
        let returning = later.flat_map(|stage| self.returning_from(stage));
        through_first.into_iter().chain(ending).chain(returning).collect()
    }

    fn position(&self, stage: usize) -> StagePosition {
        StagePosition { stage, stages: self.empty.len(), step: self.step }
    }

    /// A path of which a stage contributes `own`, and others in these roles with their counts.
    fn path(
        &self,
        stage: usize,
        own: &[(Role, f64)],
        other: impl Fn(usize) -> Option<(Role, f64)>,
    ) -> PipelinePath {
        let mut stages = vec![[0.0; ROLES.len()]; self.empty.len()];
        for (at, counts) in stages.iter_mut().enumerate() {
            let other = (at != stage).then(|| other(at)).flatten();
            let own = if at == stage { own } else { &[] };
            for (role, count) in own.iter().copied().chain(other) {
                counts[role.index()] += count;
            }
        }
        PipelinePath { stages }
    }

    /// The cases of collectives that may take longer than passes.
    fn cases(&self) -> impl Iterator<Item = usize> {
        let Longer { gathers, reductions } = self.possible;
        (0..CASES.len()).filter(move |case| {
            let longer = CASES[*case];
            (gathers || !longer.gathers) && (reductions || !longer.reductions)
        })
    }

    /// The roles of the step of a stage that waits for the round trip of its first microbatch through the later stages.
    fn waiting_step(&self, stage: usize, ending: Ending) -> Option<[(Role, f64); 2]> {
        if self.step.schedule != PipelineSchedule::ZeroBubble {
            return None;
        }
        // All forward passes of the second stage before its first backward pass are left out of the role.
        let left_out = self.position(1).earlier_forward_passes();
        let share = self.position(stage).earlier_forward_passes() / left_out;
        let own = [(ending.step(), 1.0 - share), (Role::Waited(ending), share)];
        (left_out > 0.0).then_some(own)
    }

    /// Paths that do not go beyond the first stage, or return to it from the later ones twice.
    fn through_first_stage(&self) -> Vec<PipelinePath> {
        let mut paths = vec![];
        let twice = |at: usize| (at > 0).then_some((Role::RoundTrip, 2.0));
        let once = |at: usize| (at > 0).then_some((Role::RoundTrip, 1.0));
        for case in self.cases() {
            paths.push(self.path(0, &[(Role::Step(case), 1.0)], |_| None));
            if self.position(0).passes_after_warm_up().is_some() {
                paths.push(self.path(0, &[(Role::AfterWarmUp(case), 1.0)], twice));
            }
        }
        for ending in [Ending::Hidden, Ending::Reductions] {
            let is_possible = ending == Ending::Hidden || self.possible.reductions;
            let waiting = self.waiting_step(0, ending);
            paths.extend(waiting.filter(|_| is_possible).map(|own| self.path(0, &own, once)));
        }
        paths
    }

    /// Paths that end with the step phase of a later stage.
    fn ending_at(&self, stage: usize) -> Vec<PipelinePath> {
        let longer = match self.step.has_weight_gradient_passes && !self.empty[stage] {
            true => Ending::WithWeightGradients,
            false => Ending::Reductions,
        };
        let mut paths = vec![];
        for gathers in [ForwardGathers::Hidden, ForwardGathers::Longer] {
            for ending in [Ending::Hidden, longer] {
                if gathers == ForwardGathers::Longer && !self.possible.gathers
                    || ending != Ending::Hidden && !self.possible.reductions
                {
                    continue;
                }
                // The first stage waits for no microbatch, and hides no gathers meanwhile.
                let before = |at: usize| match at {
                    0 => (Role::Forward(gathers), 1.0),
                    _ => (Role::Forward(ForwardGathers::Uncounted), 1.0),
                };
                let own = [(ending.step(), 1.0)];
                paths.push(self.path(stage, &own, |at| (at < stage).then(|| before(at))));
                let all =
                    |at: usize| Some(if at < stage { before(at) } else { (Role::RoundTrip, 1.0) });
                let waiting = self.waiting_step(stage, ending);
                paths.extend(waiting.map(|own| self.path(stage, &own, all)));
            }
        }
        paths
    }

    /// Paths that return from a later stage to the first one.
    fn returning_from(&self, stage: usize) -> Vec<PipelinePath> {
        let own = |passes: f64| {
            let without = passes.min(stage as f64 + 1.0);
            [(Role::Passes, passes - without), (Role::RoundTrip, without)]
        };
        let busy = own(self.step.microbatches as f64);
        let waiting = self.position(stage).passes_after_warm_up().map(own);
        let mut paths = vec![];
        for case in self.cases() {
            let before = |at: usize| match at {
                0 => (Role::First(case), 1.0),
                _ => (Role::RoundTrip, 1.0),
            };
            paths.push(self.path(stage, &busy, |at| (at < stage).then(|| before(at))));
            let all =
                |at: usize| Some(if at < stage { before(at) } else { (Role::RoundTrip, 2.0) });
            paths.extend(waiting.map(|own| self.path(stage, &own, all)));
        }
        paths
    }
}
