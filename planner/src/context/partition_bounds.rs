//! Derives lower bounds of a context by dividing its blocks within the memory of each stage, before anything
//! is lowered.

use narrows_plan::graph::SegmentKind;
use narrows_plan::{Bytes, Context, Seconds};

use super::bounds::{ContextBounds, LayoutBound};
use super::collective_bound::CollectiveBounds;
use super::collective_mean::CollectiveMean;
use super::collective_step::CollectiveStep;
use super::solver::ContextSolver;
use crate::infeasible::{Infeasible, MemoryEvidence};
use crate::pipeline::{EmbeddingAndHead, Multipliers, PipelineOverheads};
use crate::request::MemoryLimit;
use crate::segment::{PassCosts, SegmentSolver, SegmentSpec};

/// A layout of embedding and head of which bounds hold for all of its solutions.
pub(super) struct RelaxedLayout {
    pub(super) embedding_and_head: EmbeddingAndHead,
    pub(super) overheads: PipelineOverheads,
}

impl ContextSolver<'_> {
    /// Bounds on the plans of a context, of which one is known, in seconds. Layouts that cannot beat `incumbent` are not divided.
    pub(crate) fn bounds(&self, context: &Context, [known, incumbent]: [f64; 2]) -> ContextBounds {
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
                let bound = self.layout_bound(context, &relaxed, incumbent);
                bound.at_least(Seconds(undivided))
            } else {
                LayoutBound::NoImprovement
            };
            if bound.seconds() < incumbent {
                let exceeded =
                    self.exceeded_memory(context, &relaxed.embedding_and_head, incumbent);
                bound = exceeded.unwrap_or(bound);
            }
            if bound.seconds() < incumbent {
                let sought = [bound.seconds(), incumbent];
                let limited = self.within_memory(&collectives, context, &relaxed, sought);
                bound = match limited < incumbent {
                    true => bound.raised_to(limited),
                    false => LayoutBound::NoImprovement,
                };
            }
            of_layouts.push((fastest, bound));
        }
        let sort = |layouts: &mut Vec<(EmbeddingAndHead, LayoutBound)>| {
            layouts.sort_by(|a, b| a.1.seconds().total_cmp(&b.1.seconds()));
        };
        sort(&mut of_layouts);
        if context.overlap_microbatch_pairs {
            self.raise_pair_bounds(context, &mut of_layouts, [known, incumbent]);
            sort(&mut of_layouts);
        }
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
        if self.out_of_time() {
            return 0.0;
        }
        let rooms = self.block_rooms(context, &layout.embedding_and_head);
        collectives.largest_within(&rooms, sought)
    }

    /// The bound of a layout all of whose plans need more memory than there is; `None` where some may fit.
    fn exceeded_memory(
        &self,
        context: &Context,
        relaxed: &EmbeddingAndHead,
        incumbent: f64,
    ) -> Option<LayoutBound> {
        if self.request.memory_limit == MemoryLimit::None || self.out_of_time() {
            return None;
        }
        let needed = self.memory_bound(context, relaxed)?;
        (needed > self.request.arena_limit()).then(|| self.no_room(needed, incumbent))
    }

    /// The bound of a layout without a plan that fits and is faster than the incumbent, of which all plans need so much memory.
    fn no_room(&self, needed: Bytes, incumbent: f64) -> LayoutBound {
        if incumbent.is_finite() {
            return LayoutBound::NoImprovement;
        }
        let limit = self.request.arena_limit();
        let (stage, evidence) = (None, MemoryEvidence::AllPlans);
        let needed = needed.max(limit);
        LayoutBound::Infeasible(Infeasible::Memory { stage, needed, limit, evidence })
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

    /// Lower bound in seconds on the plans of the layout of the fastest embedding and head, from means of bounds: of paths through the
    /// pipeline, or of cases of the collectives of one stage. `incumbent` or more where none takes less, 0 where there is no such
    /// bound.
    pub(super) fn mean_bound(
        &self,
        context: &Context,
        fastest: &EmbeddingAndHead,
        incumbent: f64,
        multipliers: &mut Option<Multipliers>,
    ) -> f64 {
        if context.pass_microbatches() > 1 {
            return 0.0;
        }
        if context.mesh.pipeline == 1 {
            let relaxed = self.relaxed_layout(context, fastest);
            return self.mean_of_collectives(self.segments, context, (&relaxed, None), incumbent);
        }
        let no_reserve = vec![Bytes(0); context.mesh.pipeline as usize];
        let RelaxedLayout { embedding_and_head, overheads } = self.relaxed_layout(context, fastest);
        let partitioner = self.partitioner(context, &embedding_and_head, &no_reserve);
        partitioner.map_or(0.0, |partitioner| {
            partitioner.mean_of_paths(&overheads, incumbent, multipliers)
        })
    }

    /// The same of one stage, with the times of these segments and these costs of passes, where there are such.
    pub(super) fn mean_of_collectives(
        &self,
        segments: &SegmentSolver,
        context: &Context,
        (layout, passes): (&RelaxedLayout, Option<PassCosts>),
        incumbent: f64,
    ) -> f64 {
        let RelaxedLayout { embedding_and_head, overheads } = layout;
        let Some(step) = CollectiveStep::with_overheads(segments, context, overheads, passes)
        else {
            return 0.0;
        };
        let rooms = self.block_rooms(context, embedding_and_head);
        let mut mean = CollectiveMean::new(segments, context, &step, rooms);
        mean.bound(incumbent, &|| self.out_of_time())
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
        let partitioner = self.partitioner(context, relaxed, &no_reserve);
        let bounds = partitioner.map(|partitioner| {
            let (partitions, priced) = partitioner.partitions(overheads, incumbent);
            self.count_priced(priced);
            (partitions.first().map(|best| best.bound), partitioner.is_interrupted())
        });
        match bounds {
            Some((_, true)) => LayoutBound::of_division(relaxed.bound),
            Some((Some(bound), _)) => LayoutBound::of_division(bound),
            // With an incumbent, no plan that fits is faster; without an incumbent, no plan fits.
            _ => self.no_room(self.memory_bound(context, relaxed).unwrap_or_default(), incumbent),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::context_space::contexts;
    use crate::deadline::Deadline;
    use crate::request::Request;
    use crate::segment::SegmentSolver;
    use crate::slower_links;

    use super::*;

    /// Within a memory limit, which raises some bounds, no plan is faster than the mean of its paths.
    #[test]
    fn no_plan_within_the_memory_is_faster_than_a_mean_of_its_paths() {
        let (mut checked, mut raised, mut limited, mut tightest) = (0, 0, 0, f64::INFINITY);
        for (name, slower, mib) in [("llama-350m", 1.0, 1200), ("cola-350m", 8.0, 700)] {
            let unlimited = slower_links::request(name, [1.0, slower], [16, 64, 1024]);
            let memory_limit = MemoryLimit::Bytes(Bytes(mib << 20));
            let request = Request { memory_limit, ..unlimited.clone() };
            let segments = SegmentSolver::new(&request, Deadline::none());
            let [solver, without_limit] =
                [&request, &unlimited].map(|request| ContextSolver::new(request, &segments));
            let has_bound = |context: &Context| (2..=8).contains(&context.mesh.pipeline);
            for context in contexts(&request).into_iter().filter(has_bound).step_by(9) {
                let bounds = solver.bounds(&context, [0.0, f64::INFINITY]);
                let Ok(divided) = bounds.bound(f64::INFINITY) else { continue };
                let free = without_limit.bounds(&context, [0.0, f64::INFINITY]);
                let free = without_limit.solve(&context, &free, f64::INFINITY).bound.0;
                let solved = solver.solve(&context, &bounds, f64::INFINITY);
                let (Ok(Some(plan)), Seconds(bound)) = (solved.best, solved.bound) else {
                    continue;
                };
                assert!(bound <= plan.time.0 * (1.0 + 1e-9), "{name}, {context:?}: {bound}");
                raised += usize::from(bound > divided.0 * (1.0 + 1e-9));
                checked += 1;
                if bound > free * 1.005 {
                    limited += 1;
                    tightest = tightest.min(plan.time.0 / bound);
                }
            }
        }
        assert!(checked > 50 && raised > 5, "{checked} plans, {raised} raised");
        assert!(limited > 5 && tightest < 1.03, "{limited} raised by memory, within {tightest}");
    }
}
