//! Derives lower bounds of a context by dividing its blocks within the memory of each stage, before anything
//! is lowered.

use narrows_plan::graph::SegmentKind;
use narrows_plan::{Bytes, Context, Seconds};

use super::bounds::{ContextBounds, LayoutBound, LayoutBounds};
use super::bucket_bound::bucket_bound;
use super::sharding_bound::sharding_bound;
use super::solver::{ContextSolver, PartitionResult};
use crate::infeasible::{Infeasible, MemoryEvidence};
use crate::pipeline::{EmbeddingAndHead, PipelineOverheads, StagePartitioner};
use crate::segment::SegmentSpec;

impl ContextSolver<'_> {
    /// Bounds on the plans of a context. Layouts that cannot beat `incumbent` are not divided.
    pub(crate) fn bounds(&self, context: &Context, incumbent: f64) -> ContextBounds {
        let mut layouts = vec![];
        for fastest in EmbeddingAndHead::fastest_per_layout(self.request, self.segments, context) {
            let layout = (fastest.boundary, fastest.tied_weight);
            let collectives = bucket_bound(self.segments, context, layout).max(sharding_bound(
                self.segments,
                context,
                layout,
            ));
            let undivided = fastest.bound.0.max(collectives);
            let (bound, cost) = match undivided < incumbent {
                true => self.layout_bound(context, &fastest, incumbent),
                false => (LayoutBound::NoImprovement, 0.0),
            };
            let bound = bound.at_least(Seconds(undivided));
            let working_set_cost = cost.min(bound.seconds() - undivided);
            layouts.push(LayoutBounds { fastest, bound, working_set_cost });
        }
        layouts.sort_by(|a, b| a.bound.seconds().total_cmp(&b.bound.seconds()));
        ContextBounds { layouts }
    }

    /// Bound on the plans of one layout, that of the relaxed embedding and head, with the seconds of it that working sets add.
    fn layout_bound(
        &self,
        context: &Context,
        fastest: &EmbeddingAndHead,
        incumbent: f64,
    ) -> (LayoutBound, f64) {
        let no_reserve = vec![Bytes(0); context.mesh.pipeline as usize];
        let relaxed = fastest.relaxation(self.segments, context);
        let mut overheads = PipelineOverheads::new(self.request, self.segments, context, &relaxed);
        // Other solutions of embedding and head may spend less in the step phase.
        let last = context.mesh.pipeline as usize - 1;
        for (stage, kind) in [(0, SegmentKind::Embedding), (last, SegmentKind::Head)] {
            let spec = SegmentSpec::embedding_or_head(kind, fastest.boundary, fastest.tied_weight);
            let solved = match kind {
                SegmentKind::Embedding => &relaxed.embedding,
                _ => &relaxed.head,
            };
            let step_phase_savings =
                solved.time.step_phase.0 - self.segments.step_phase_range(spec, context)[0];
            for overhead in overheads.of_stage_mut(stage) {
                overhead.step_phase_min =
                    Seconds(overhead.step_phase_min.0 - step_phase_savings.max(0.0));
            }
        }
        // Equal chunks are one division. Without the memory limit, its bound needs no assignments.
        if context.chunks > 1
            && let Ok(budgets) = self.block_budgets(context, &relaxed, &no_reserve)
            && StagePartitioner::new(self.segments, context, fastest.boundary, budgets)
                .interleaved_bound(&overheads)
                >= incumbent
        {
            return (LayoutBound::NoImprovement, 0.0);
        }
        let bound = match self.partition(context, &relaxed, &overheads, &no_reserve, incumbent) {
            PartitionResult::Partitions(_, partitions) => {
                let budgets = self.block_budgets(context, &relaxed, &no_reserve);
                let cost = budgets.map_or(0.0, |budgets| {
                    self.working_set_cost(context, fastest.boundary, budgets[0])
                });
                let divided = partitions[0].bound;
                return match divided.0 + cost {
                    bound if bound < incumbent => (LayoutBound::Bound(Seconds(bound)), cost),
                    _ if incumbent.is_finite() => (LayoutBound::NoImprovement, 0.0),
                    _ => (LayoutBound::Bound(divided), 0.0),
                };
            }
            PartitionResult::Interrupted => LayoutBound::Bound(fastest.bound),
            // With an incumbent, no plan that fits is faster; without an incumbent, no plan fits.
            PartitionResult::NoneFits if incumbent.is_finite() => LayoutBound::NoImprovement,
            PartitionResult::NoneFits => {
                let limit = self.request.arena_limit();
                let bound = self.memory_bound(context, &relaxed).unwrap_or_default();
                let needed = bound.max(limit);
                let evidence = MemoryEvidence::AllPlans;
                let stage = None;
                LayoutBound::Infeasible(Infeasible::Memory { stage, needed, limit, evidence })
            }
        };
        (bound, 0.0)
    }
}
