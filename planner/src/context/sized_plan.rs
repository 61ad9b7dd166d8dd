//! A plan between the division of its blocks and its simulation.

use std::sync::Arc;

use narrows_plan::program::Program;
use narrows_plan::{Bytes, Plan, Seconds};

use crate::feasible_plan::ModelDecisions;
use crate::lowered_plans::PlanDigest;
use crate::pipeline::AssignmentMethod;

/// A plan whose memory is known.
pub(super) struct SizedPlan {
    pub decisions: ModelDecisions,
    pub plan: Plan,
    pub digest: PlanDigest,
    /// `None` where the arenas were known without lowering.
    pub program: Option<Program>,
    /// Arena of each stage.
    pub arenas: Arc<[Bytes]>,
    pub partition_time: Seconds,
    pub objective: Seconds,
    pub method: AssignmentMethod,
}

impl SizedPlan {
    /// Arena of the fullest stage.
    pub(super) fn peak_arena(&self) -> Bytes {
        self.arenas.iter().copied().max().unwrap_or_default()
    }
}
