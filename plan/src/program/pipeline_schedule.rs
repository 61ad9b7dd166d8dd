//! Pipeline schedules: the order in which a stage runs the passes of its microbatches.
//!
//! Programs state the passes of every stage, and engines, the check and the simulation run what is stated. Bounds on the
//! step time of a schedule are derived in `planner/src/pipeline/partition.rs`.
//!
//! - *1F1B*: stage s of S runs min(m, S − s − 1) forward passes, then one forward and one backward pass in turn, then
//!   the remaining backward passes.
//! - *Zero-bubble* (ZB-H1 of Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241): the same order of forward
//!   and backward passes, but the weight gradients of stage s > 0 are computed in passes of their own, s microbatches
//!   after the backward pass. So the previous stage gets its gradient earlier, and weight gradients fill the time in
//!   which a stage would wait. With equal stages of forward time f, backward time b and weight-gradient time w, the idle
//!   time of a step falls from (S − 1)·(f + b + w) to (S − 1)·(f + b − w), where m ≥ S.

use super::{MicrobatchPass, Phase, StageProgram};
use crate::PipelineSchedule;

/// A stage of a pipeline, with what its schedule depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageSchedule {
    /// The order of passes.
    pub schedule: PipelineSchedule,
    /// Index of the stage.
    pub stage: u64,
    /// Number of stages.
    pub stages: u64,
    /// Microbatches of a step.
    pub microbatches: u64,
}

impl StageSchedule {
    /// Whether weight gradients of blocks may have passes of their own. No stage waits for a gradient of the first.
    pub fn defers_weight_gradients(&self) -> bool {
        self.schedule == PipelineSchedule::ZeroBubble && self.stage > 0
    }

    /// Number of microbatches that run forward and have not run backward, at most.
    pub fn microbatches_in_flight(&self) -> u64 {
        (self.stages - self.stage).min(self.microbatches)
    }

    /// The passes of the stage, in order, with or without weight-gradient passes.
    pub fn passes(&self, has_weight_gradient_passes: bool) -> Vec<MicrobatchPass> {
        let microbatches = self.microbatches;
        let pass = |phase, microbatch| MicrobatchPass { phase, microbatch };
        let warm_up = (self.stages - self.stage - 1).min(microbatches);
        let deferred = has_weight_gradient_passes.then(|| self.stage.min(microbatches));
        let mut passes: Vec<MicrobatchPass> =
            (0..warm_up).map(|microbatch| pass(Phase::Forward, microbatch)).collect();
        for backward in 0..microbatches {
            let forward = backward + warm_up;
            passes.extend((forward < microbatches).then(|| pass(Phase::Forward, forward)));
            passes.push(pass(Phase::Backward, backward));
            let ready = deferred.and_then(|deferred| backward.checked_sub(deferred));
            passes.extend(ready.map(|microbatch| pass(Phase::WeightGradient, microbatch)));
        }
        let last = deferred.map_or(microbatches, |deferred| microbatches - deferred)..microbatches;
        passes.extend(last.map(|microbatch| pass(Phase::WeightGradient, microbatch)));
        passes
    }
}

impl StageProgram {
    /// The largest number of microbatches that have begun phase `from` and not ended phase `to`.
    pub(crate) fn microbatches_between(&self, from: Phase, to: Phase) -> u64 {
        let (mut between, mut most) = (0_u64, 0);
        for pass in &self.schedule {
            between += u64::from(pass.phase == from);
            most = most.max(between);
            between = between.saturating_sub(u64::from(pass.phase == to));
        }
        most
    }

    /// Whether every pass of a phase directly follows the previous pass of its microbatch.
    pub(crate) fn follows_at_once(&self, phase: Phase) -> bool {
        let previous = match phase {
            Phase::WeightGradient => Phase::Backward,
            _ => Phase::Forward,
        };
        self.schedule.iter().enumerate().filter(|(_, pass)| pass.phase == phase).all(
            |(at, pass)| {
                let before = at.checked_sub(1).map(|before| self.schedule[before]);
                before == Some(MicrobatchPass { phase: previous, ..*pass })
            },
        )
    }

    /// The phase that ends the passes of a microbatch and completes its weight gradients.
    pub fn last_phase(&self) -> Phase {
        match self.weight_gradient.is_empty() {
            true => Phase::Backward,
            false => Phase::WeightGradient,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(schedule: PipelineSchedule, stage: u64, microbatches: u64) -> String {
        let schedule = StageSchedule { schedule, stage, stages: 4, microbatches };
        let pass = |pass: MicrobatchPass| match pass.phase {
            Phase::Forward => format!("F{}", pass.microbatch),
            Phase::Backward => format!("B{}", pass.microbatch),
            Phase::WeightGradient | Phase::Step => format!("W{}", pass.microbatch),
        };
        schedule
            .passes(schedule.defers_weight_gradients())
            .into_iter()
            .map(pass)
            .collect::<Vec<_>>()
            .join(" ")
    }

    #[test]
    fn stages_run_their_passes_in_the_published_order() {
        let of = |stage| text(PipelineSchedule::OneForwardOneBackward, stage, 4);
        assert_eq!(of(0), "F0 F1 F2 F3 B0 B1 B2 B3");
        assert_eq!(of(2), "F0 F1 B0 F2 B1 F3 B2 B3");
        let of = |stage| text(PipelineSchedule::ZeroBubble, stage, 4);
        assert_eq!(of(0), "F0 F1 F2 F3 B0 B1 B2 B3");
        assert_eq!(of(1), "F0 F1 F2 B0 F3 B1 W0 B2 W1 B3 W2 W3");
        assert_eq!(of(3), "F0 B0 F1 B1 F2 B2 F3 B3 W0 W1 W2 W3");
        assert_eq!(text(PipelineSchedule::ZeroBubble, 3, 2), "F0 B0 F1 B1 W0 W1");
    }
}
