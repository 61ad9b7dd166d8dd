//! Lower bounds on the step of a pipeline because of one of its stages, by schedule, from passes of this stage and those around.

use narrows_plan::{Context, PipelineSchedule};

/// The schedule of a pipeline and the microbatches of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepSchedule {
    /// The order of passes.
    pub schedule: PipelineSchedule,
    /// Microbatches of a step.
    pub microbatches: u64,
    /// Whether all stages with blocks but the first have weight-gradient passes, whatever their assignments.
    pub has_weight_gradient_passes: bool,
}

impl StepSchedule {
    /// The schedule and the microbatches of a context.
    pub fn of(context: &Context) -> StepSchedule {
        let microbatches = context.workload.microbatches(&context.mesh);
        let schedule = context.schedule;
        // Every block has a weight-gradient GEMM that may run in such a pass, unless it overlaps with a collective, or gradients are
        // reduced in every backward pass.
        let has_weight_gradient_passes = schedule.defers_weight_gradients()
            && !context.overlap_tensor_collectives
            && !context.shards_gradients();
        StepSchedule { schedule, microbatches, has_weight_gradient_passes }
    }
}

/// A stage of a pipeline.
pub(super) struct StagePosition {
    pub stage: usize,
    pub stages: usize,
    pub step: StepSchedule,
}

impl StagePosition {
    /// Stages from this one to the last.
    fn depth(&self) -> u64 {
        (self.stages - self.stage) as u64
    }

    /// Passes of a stage with one chunk after the first microbatch has come back: m − w + 1, where m > w.
    pub(super) fn passes_after_warm_up(&self) -> Option<f64> {
        let StepSchedule { schedule, microbatches, .. } = self.step;
        (!schedule.has_chunks() && microbatches > self.depth())
            .then(|| (microbatches - self.depth() + 1) as f64)
    }

    /// Lower bound on a 1F1B step because of the stage, without the step phase of the first one: `before` and
    /// `after` are the microbatch times of the stages around it, `own` its own.
    pub(super) fn bound_1f1b(&self, before: f64, own: f64, after: f64) -> f64 {
        let busy = before + self.step.microbatches as f64 * own;
        match self.passes_after_warm_up() {
            Some(passes) => busy.max(before + 2.0 * after + passes * own),
            None => busy,
        }
    }

    /// Forward passes of the stage after the first, and before its first backward pass, at most.
    pub(super) fn earlier_forward_passes(&self) -> f64 {
        (self.depth().min(self.step.microbatches) - 1) as f64
    }

    /// Lower bound on the passes of the stage in a zero-bubble step, without its step phase: of one microbatch those that take
    /// `of_one`, and of each other one `own`, of which `own_backward` runs backward.
    pub(super) fn bound_zero_bubble(
        &self,
        around: &PassesAround,
        of_one: f64,
        own: f64,
        own_backward: f64,
    ) -> f64 {
        let microbatches = self.step.microbatches as f64;
        let earlier = self.earlier_forward_passes();
        let busy = (microbatches - 1.0) * own;
        let waiting =
            around.round_trip_after + (microbatches - 1.0 - earlier) * own + earlier * own_backward;
        around.forward_before + of_one + busy.max(waiting)
    }

    /// Lower bound on the end of the passes of the first stage of a zero-bubble pipeline, because of the stage.
    pub(super) fn last_return(&self, around: &PassesAround, own: f64) -> f64 {
        let PassesAround { round_trip_before, own_round_trip, round_trip_after, .. } = around;
        let before_return = |passes: f64| {
            // The first stage has no weight-gradient passes.
            let without = if self.stage > 0 { passes.min(self.stage as f64 + 1.0) } else { 0.0 };
            round_trip_before + (passes - without) * own + without * own_round_trip
        };
        let busy = before_return(self.step.microbatches as f64);
        let waiting = |passes| before_return(passes) + 2.0 * round_trip_after;
        self.passes_after_warm_up().map(waiting).map_or(busy, |waiting| waiting.max(busy))
    }
}

/// Passes of one microbatch on a stage and the others, in seconds.
pub(super) struct PassesAround {
    /// Forward passes of the stages before.
    pub forward_before: f64,
    /// Forward and backward passes of the stages before, without the weight gradients that have passes of their own.
    pub round_trip_before: f64,
    /// The same of the stage.
    pub own_round_trip: f64,
    /// The same of the stages after.
    pub round_trip_after: f64,
}
