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
    /// Arena of each stage, or of the stages up to the first whose arena is too large.
    pub arenas: Arc<[Bytes]>,
    pub partition_time: Seconds,
    pub objective: Seconds,
    pub method: AssignmentMethod,
}

impl SizedPlan {
    /// Arena of the fullest stage whose arena is known.
    pub(super) fn peak_arena(&self) -> Bytes {
        self.arenas.iter().copied().max().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use narrows_cost_model::profile;
    use narrows_plan::model::presets;
    use narrows_plan::{Bytes, PipelineSchedule};

    use super::super::solver::ContextSolver;
    use crate::context_space::contexts;
    use crate::deadline::Deadline;
    use crate::request::{MemoryLimit, Request};
    use crate::segment::SegmentSolver;

    /// No stage needs less than what its blocks, its embedding and its head count, with any schedule.
    #[test]
    fn no_arena_is_smaller_than_what_is_counted() {
        let profile = profile::preset("a100-80gb").expect("a preset");
        let (mut checked, mut deferred) = (0, 0);
        for (name, mib, pipeline) in [
            ("cola-350m", 80 << 10, 4),
            ("cola-350m", 900, 4),
            ("llama-130m", 1200, 2),
            ("lax-130m", 500, 3),
        ] {
            let model = presets::find(name).expect("a preset");
            let request = Request {
                pipeline: Some(pipeline),
                memory_limit: MemoryLimit::Bytes(Bytes(mib << 20)),
                ..Request::new(model, profile.clone(), 4 * pipeline, 64, 1024)
            };
            let segments = SegmentSolver::new(&request, Deadline::none());
            let solver = ContextSolver::new(&request, &segments);
            for context in contexts(&request).into_iter().step_by(3) {
                let Some((_, context, ends, partition)) =
                    solver.even_partition(context, f64::INFINITY)
                else {
                    continue;
                };
                let stages = partition.stages.iter().map(|stage| stage.bytes).enumerate();
                let counted: Vec<Bytes> =
                    stages.map(|(stage, blocks)| blocks + ends.bytes(&context, stage)).collect();
                let blocks = partition.stages.iter().flat_map(|stage| &stage.blocks);
                let has_deferred =
                    blocks.into_iter().any(|block| block.bytes.deferred.written.0 > 0);
                let is_zero_bubble = context.schedule == PipelineSchedule::ZeroBubble;
                deferred += usize::from(has_deferred && is_zero_bubble);
                let arenas = solver.size(&context, &ends, partition).arenas;
                for (stage, (counted, arena)) in counted.into_iter().zip(arenas.iter()).enumerate()
                {
                    assert!(counted <= *arena, "{name}, {context:?}, {stage}: {counted}, {arena}");
                    checked += 1;
                }
            }
        }
        assert!(checked > 300 && deferred > 20, "{checked} stages, {deferred} plans");
    }
}
