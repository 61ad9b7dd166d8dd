//! Relaxed stages: lower bounds on the time of a stage's blocks that need two hull edges for all numbers of blocks.
//!
//! A supporting line of the hull bounds the time of each block from below by `intercept − price·bytes`. So n blocks
//! that share a budget of B bytes take at least
//!
//! ```text
//! n·intercept − price·B
//! ```
//! The line is that of the edge over the bytes of a block when all stages have equally many. A division of the blocks
//! that is no better with relaxed stages is no better with assigned ones.

use std::sync::Arc;

use narrows_plan::{Bytes, Context, Seconds};

use super::assignment::StageAssignment;
use super::in_flight::in_flight;
use crate::segment::{ASYMPTOTIC_MICROBATCHES, SegmentSolver, SegmentSpec};
use crate::solve::SupportingLine;

/// Lower bounds for the blocks of one stage. All blocks have one shape.
pub(super) struct RelaxedStage {
    budget: Bytes,
    microbatches: f64,
    /// Time of a block in a step: its passes and its step phase.
    step: SupportingLine,
    /// Time of a block in a step of [`ASYMPTOTIC_MICROBATCHES`].
    asymptotic: SupportingLine,
    /// Largest time of a block in the step phase, in seconds.
    step_phase_max: f64,
}

impl RelaxedStage {
    /// The relaxation of a stage whose blocks have `budget` bytes; `None` when a block has no legal decisions.
    pub(super) fn new(
        segments: &SegmentSolver,
        context: &Context,
        spec: SegmentSpec,
        stage: usize,
        budget: Bytes,
    ) -> Option<RelaxedStage> {
        let blocks = segments.layer_shapes().len() as u64;
        let average = Bytes(budget.0 * context.mesh.pipeline / blocks);
        let in_flight = in_flight(context, stage);
        let many = SegmentSolver::asymptotic(context);
        let line = |context| segments.supporting_line(spec, context, in_flight, average);
        Some(RelaxedStage {
            budget,
            microbatches: context.workload.microbatches(&context.mesh) as f64,
            step: line(context)?,
            asymptotic: line(&many)?,
            step_phase_max: segments.step_phase_range(spec, &many)[1],
        })
    }

    /// Times of `count` blocks, none of them longer than those of any assignment within the budget; `None` when no
    /// assignment fits.
    pub(super) fn assignment(&self, count: usize) -> Option<Arc<StageAssignment>> {
        let (count, budget) = (count as f64, self.budget.as_f64());
        if count * self.step.bytes_min > budget {
            return None;
        }
        let bound = |line: &SupportingLine| count * line.intercept - line.price * budget;
        let asymptotic = bound(&self.asymptotic) - count * self.step_phase_max;
        Some(Arc::new(StageAssignment {
            forward: Seconds((bound(&self.step) / self.microbatches).max(0.0)),
            microbatch_time_min: Seconds(asymptotic / ASYMPTOTIC_MICROBATCHES as f64),
            ..StageAssignment::default()
        }))
    }
}
