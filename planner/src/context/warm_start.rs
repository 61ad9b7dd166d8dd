//! Quick first plans of a search.

use narrows_plan::{Bytes, Context, Seconds};
use rayon::prelude::*;

use super::sized_plan::SizedPlan;
use super::solver::ContextSolver;
use crate::bounded_context::BoundedContext;
use crate::context_queue::ContextQueue;
use crate::context_space::may_need_least_memory;
use crate::feasible_plan::FeasiblePlan;
use crate::pipeline::{
    EmbeddingAndHead, Partition, StagePartitioner, StepSchedule, simulate_partition,
};

/// Estimated slowdown of a step in a context: the pipeline bubble, and ten percent for each doubling of the
/// tensor axis.
fn estimated_slowdown(context: &Context) -> f64 {
    let microbatches = context.workload.microbatches(&context.mesh) as f64;
    let bubble = (context.mesh.pipeline - 1) as f64 / microbatches;
    (1.0 + bubble) * (1.0 + 0.1 * (context.mesh.tensor as f64).log2())
}

/// Contexts that are tried in parallel.
const CHUNK: usize = 8;

/// Even partitions that are lowered until one fits.
const LOWERED_MAX: usize = 4;

/// Corrections of the reserves of one even partition.
const WARM_START_CORRECTIONS_MAX: usize = 4;

impl ContextSolver<'_> {
    /// A fallback for short time limits, without a bound: an even partition in the first context in which one
    /// fits, in the order of [`estimated_slowdown`].
    pub(crate) fn first_feasible(&self, contexts: &[Context]) -> Option<FeasiblePlan> {
        let possible = contexts.iter().filter(|context| self.flops_bound(context).is_ok());
        let mut possible: Vec<&Context> = possible.collect();
        possible.sort_by(|a, b| estimated_slowdown(a).total_cmp(&estimated_slowdown(b)));
        for chunk in possible.chunks(CHUNK) {
            let mut even: Vec<_> = chunk
                .par_iter()
                .filter_map(|context| self.even_partition(**context, f64::INFINITY))
                .collect();
            even.sort_by(|a, b| a.0.total_cmp(&b.0));
            for (_, context, embedding_and_head, partition) in even {
                let sized = self.size(&context, &embedding_and_head, partition);
                if let Some(plan) = self.complete_within_limit(sized) {
                    return Some(plan);
                }
                if self.segments.out_of_time() {
                    return None;
                }
            }
            if self.segments.out_of_time() {
                return None;
            }
        }
        None
    }

    /// The first incumbent: the fastest even partition, by its time before lowering, that fits after lowering. Where none of
    /// the fastest fits, it is the fastest of those with corrected reserves. Where none of these fits, contexts whose plans may be
    /// larger than their bytes suggest are left out. After the deadline, it is the fastest of the partitions until then, if that
    /// fits.
    pub(crate) fn warm_start(&self, open: &mut ContextQueue) -> Option<FeasiblePlan> {
        let is_small = |context: &Context| may_need_least_memory(self.request, context);
        self.fastest_even_partition(open, |_| true)
            .or_else(|| self.fastest_even_partition(open, is_small))
    }

    /// The fastest even partition that fits, of the contexts that satisfy a condition.
    fn fastest_even_partition(
        &self,
        open: &mut ContextQueue,
        condition: impl Fn(&Context) -> bool,
    ) -> Option<FeasiblePlan> {
        let devices = self.request.devices;
        let mut even: Vec<(f64, Context, EmbeddingAndHead, Partition)> = vec![];
        for chunk in 0.. {
            even.sort_by(|a, b| a.0.total_cmp(&b.0));
            let fastest = even.first().map_or(f64::INFINITY, |(time, ..)| *time);
            // At most LOWERED_MAX partitions are lowered: slower ones need no assignment.
            let cutoff = even.get(LOWERED_MAX - 1).map_or(f64::INFINITY, |(time, ..)| *time);
            let is_faster = |open: &BoundedContext| open.step_time_bound() < fastest;
            let is_tried =
                |context: &Context| context.mesh.devices() == devices && condition(context);
            let promising: Vec<Context> = open
                .most_promising(CHUNK * (chunk + 1), is_tried, is_faster)
                .into_iter()
                .skip(CHUNK * chunk)
                .filter(|open| is_faster(open))
                .map(|open| open.context)
                .collect();
            if promising.is_empty() || self.segments.out_of_time() {
                break;
            }
            let in_time = promising.par_iter().filter(|_| !self.segments.out_of_time());
            even.par_extend(in_time.filter_map(|context| self.even_partition(*context, cutoff)));
        }
        even.sort_by(|a, b| a.0.total_cmp(&b.0));
        let limit = self.request.arena_limit();
        let mut oversized = vec![];
        for (_, context, embedding_and_head, partition) in even.into_iter().take(LOWERED_MAX) {
            let sized = self.size(&context, &embedding_and_head, partition.clone());
            if sized.peak_arena() <= limit {
                let plan = self.complete(sized);
                return Some(self.or_faster(plan, &context, &embedding_and_head, &partition));
            }
            if self.segments.out_of_time() {
                return None;
            }
            oversized.push((context, embedding_and_head, sized));
        }
        // The fastest before correction may be the slowest after it.
        let mut best: Option<FeasiblePlan> = None;
        for (context, ends, sized) in oversized {
            let known = best.as_ref().map_or(f64::INFINITY, |plan| plan.time.0);
            if sized.partition_time.0 >= known {
                continue;
            }
            let corrected = self.corrected_even_partition(&context, &ends, sized);
            best = corrected.filter(|plan| plan.time.0 < known).or(best);
        }
        best
    }

    /// The plan of an even partition whose stages reserve the bytes by which the arenas of `sized` are too large.
    fn corrected_even_partition(
        &self,
        context: &Context,
        embedding_and_head: &EmbeddingAndHead,
        mut sized: SizedPlan,
    ) -> Option<FeasiblePlan> {
        let limit = self.request.arena_limit();
        let mut reserve = vec![Bytes(0); context.mesh.pipeline as usize];
        for _ in 0..WARM_START_CORRECTIONS_MAX {
            if self.segments.out_of_time() {
                return None;
            }
            for (reserve, arena) in reserve.iter_mut().zip(sized.arenas.iter()) {
                *reserve += arena.saturating_sub(limit);
            }
            let budgets = self.block_budgets(context, embedding_and_head, &reserve).ok()?;
            let boundary = embedding_and_head.boundary;
            let partitioner = StagePartitioner::new(self.segments, context, boundary, budgets);
            let overheads = self.overheads(context, embedding_and_head);
            let partition = partitioner.even_partition(&overheads, f64::INFINITY)?;
            sized = self.size(context, embedding_and_head, partition.clone());
            if sized.peak_arena() <= limit {
                let plan = self.complete(sized);
                return Some(self.or_faster(plan, context, embedding_and_head, &partition));
            }
        }
        None
    }

    /// The plan of a partition, or the one with faster last blocks, if that is faster.
    fn or_faster(
        &self,
        plan: FeasiblePlan,
        context: &Context,
        embedding_and_head: &EmbeddingAndHead,
        partition: &Partition,
    ) -> FeasiblePlan {
        let faster = self.with_faster_last_blocks(context, embedding_and_head, partition);
        faster.filter(|faster| faster.time < plan.time).unwrap_or(plan)
    }

    /// The fastest even partition of a context that takes at most `cutoff` seconds, with its time.
    pub(super) fn even_partition(
        &self,
        context: Context,
        cutoff: f64,
    ) -> Option<(f64, Context, EmbeddingAndHead, Partition)> {
        let no_reserve = vec![Bytes(0); context.mesh.pipeline as usize];
        let mut layouts =
            EmbeddingAndHead::fastest_per_layout(self.request, self.segments, &context);
        layouts.sort_by(|a, b| a.bound.0.total_cmp(&b.bound.0));
        let mut best: Option<(f64, EmbeddingAndHead, Partition)> = None;
        for embedding_and_head in layouts {
            let time_min = best.as_ref().map_or(cutoff, |(time, ..)| *time);
            if embedding_and_head.bound.0 > time_min {
                break;
            }
            let Ok(budgets) = self.block_budgets(&context, &embedding_and_head, &no_reserve) else {
                continue;
            };
            let partitioner = StagePartitioner::new(
                self.segments,
                &context,
                embedding_and_head.boundary,
                budgets,
            );
            let overheads = self.overheads(&context, &embedding_and_head);
            let Some(mut partition) = partitioner.even_partition(&overheads, time_min) else {
                continue;
            };
            partition.bound = Seconds(
                partition.step_bound(overheads.of(&partition.counts), StepSchedule::of(&context)),
            );
            let time = simulate_partition(&context, &partition, &overheads).0;
            if best.as_ref().is_none_or(|(fastest, ..)| time < *fastest) {
                best = Some((time, embedding_and_head, partition));
            }
        }
        best.map(|(time, embedding_and_head, partition)| {
            (time, context, embedding_and_head, partition)
        })
    }
}

#[cfg(test)]
mod tests {
    use narrows_cost_model::profile;
    use narrows_plan::model::presets;

    use crate::context_queue::ContextQueue;
    use crate::context_solvers::ContextSolvers;
    use crate::context_space::contexts;
    use crate::deadline::Deadline;
    use crate::request::{MemoryLimit, Request};
    use crate::segment::SegmentSolver;

    use super::*;

    /// The first plan of a request.
    fn first_plan(request: Request) -> FeasiblePlan {
        let (requests, deadline) = ([request], Deadline::none());
        let segments = [SegmentSolver::new(&requests[0], deadline.clone())];
        let solvers = ContextSolvers::new(&requests, &segments);
        let [request] = &requests;
        let mut open = ContextQueue::new(request.objective, contexts(request), &solvers, &deadline);
        open.warm_start().expect("a plan")
    }

    /// With this limit, the fastest even partition shards the weights over all devices, and takes 40 % more time than others once
    /// its blocks keep little enough.
    #[test]
    fn the_first_plan_is_the_fastest_after_correction() {
        let model = presets::find("lax-30b").expect("a preset");
        let profile = profile::preset("a100-40gb").expect("a preset");
        let request = Request {
            memory_limit: MemoryLimit::Bytes(Bytes(20_917_340_091)),
            pipeline: Some(1),
            ..Request::new(model, profile, 32, 32, 1024)
        };
        let first = first_plan(request.clone()).time;
        let sharded = first_plan(Request { tensor: Some(1), ..request }).time;
        assert!(first.0 < 0.8 * sharded.0, "{first} and {sharded}");
    }
}
