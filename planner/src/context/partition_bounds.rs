//! Derives lower bounds of a context by dividing its blocks within the memory of each stage, before anything
//! is lowered.

use narrows_plan::graph::SegmentKind;
use narrows_plan::{Bytes, Context, Seconds};

use super::bounds::{ContextBounds, LayoutBound};
use super::collective_bound::CollectiveBounds;
use super::solver::{ContextSolver, PartitionResult};
use crate::infeasible::{Infeasible, MemoryEvidence};
use crate::pipeline::{EmbeddingAndHead, PipelineOverheads};
use crate::request::MemoryLimit;
use crate::segment::SegmentSpec;

/// A layout of embedding and head of which bounds hold for all of its solutions.
pub(super) struct RelaxedLayout {
    embedding_and_head: EmbeddingAndHead,
    pub(super) overheads: PipelineOverheads,
}

impl ContextSolver<'_> {
    /// Bounds on the plans of a context. Layouts that cannot beat `incumbent` are not divided.
    pub(crate) fn bounds(&self, context: &Context, incumbent: f64) -> ContextBounds {
        let mut of_layouts = vec![];
        for fastest in EmbeddingAndHead::fastest_per_layout(self.request, self.segments, context) {
            let layout = (fastest.boundary, fastest.tied_weight);
            let mut collectives = CollectiveBounds::new(self.segments, context, layout);
            if fastest.bound.0.max(collectives.largest()) >= incumbent {
                of_layouts.push((fastest, LayoutBound::NoImprovement));
                continue;
            }
            let relaxed = self.relaxed_layout(context, &fastest);
            collectives.count_ends(&relaxed.overheads);
            let undivided = fastest.bound.0.max(collectives.largest());
            let mut bound = if undivided < incumbent {
                self.layout_bound(context, &relaxed, incumbent).at_least(Seconds(undivided))
            } else {
                LayoutBound::NoImprovement
            };
            if bound.seconds() < incumbent {
                let sought = [bound.seconds(), incumbent];
                let limited = self.within_memory(&collectives, context, &relaxed, sought);
                bound = match limited < incumbent {
                    true => bound.raised_to(limited),
                    false => LayoutBound::NoImprovement,
                };
            }
            if context.overlap_microbatch_pairs {
                bound = self.raise_pair_bound(context, &fastest, bound, incumbent);
            }
            of_layouts.push((fastest, bound));
        }
        of_layouts.sort_by(|a, b| a.1.seconds().total_cmp(&b.1.seconds()));
        ContextBounds { layouts: of_layouts }
    }

    /// The largest of the bounds of a layout within the memory of its blocks, in seconds, of those between a known bound and the
    /// incumbent.
    pub(super) fn within_memory(
        &self,
        collectives: &CollectiveBounds,
        context: &Context,
        layout: &RelaxedLayout,
        sought: [f64; 2],
    ) -> f64 {
        if self.request.memory_limit == MemoryLimit::None || self.out_of_time() {
            return 0.0;
        }
        let rooms = self.block_rooms(context, &layout.embedding_and_head);
        collectives.largest_within(&rooms, sought)
    }

    /// The relaxed embedding and head of the layout of the fastest.
    pub(super) fn relaxed_layout(
        &self,
        context: &Context,
        fastest: &EmbeddingAndHead,
    ) -> RelaxedLayout {
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
        RelaxedLayout { embedding_and_head: relaxed, overheads }
    }

    /// Bound on the plans of one layout: that of the relaxed embedding and head.
    pub(super) fn layout_bound(
        &self,
        context: &Context,
        layout: &RelaxedLayout,
        incumbent: f64,
    ) -> LayoutBound {
        let no_reserve = vec![Bytes(0); context.mesh.pipeline as usize];
        let RelaxedLayout { embedding_and_head: relaxed, overheads } = layout;
        match self.partition(context, relaxed, overheads, &no_reserve, incumbent) {
            PartitionResult::Partitions(_, partitions) => {
                LayoutBound::of_division(partitions[0].bound)
            }
            PartitionResult::Interrupted => LayoutBound::of_division(relaxed.bound),
            // With an incumbent, no plan that fits is faster; without an incumbent, no plan fits.
            PartitionResult::NoneFits if incumbent.is_finite() => LayoutBound::NoImprovement,
            PartitionResult::NoneFits => {
                let limit = self.request.arena_limit();
                let bound = self.memory_bound(context, relaxed).unwrap_or_default();
                let needed = bound.max(limit);
                let evidence = MemoryEvidence::AllPlans;
                let stage = None;
                LayoutBound::Infeasible(Infeasible::Memory { stage, needed, limit, evidence })
            }
        }
    }
}
