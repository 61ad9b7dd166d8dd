//! The plan of a context that needs the least memory.

use std::ops::Range;
use std::sync::Arc;

use narrows_cost_model::InFlight;
use narrows_plan::strategy::{Baseline, NormRule, Recompute, Rules};
use narrows_plan::{Bytes, Context, Seconds, StagePlan};

use super::sized_plan::SizedPlan;
use super::solver::ContextSolver;
use crate::feasible_plan::FeasiblePlan;
use crate::pipeline::{
    EmbeddingAndHead, Partition, StageAssignment, in_flight_in_chunks, stage_chunks,
};
use crate::request::Request;
use crate::segment::{SegmentSpec, SolvedSegment};

/// Number of hull vertices that are lowered, from the smallest up: recomputation needs temporary memory, so the
/// fewest kept bytes do not always give the smallest arena.
const LEVELS_MAX: usize = 5;

/// A solution of each block shape with the microbatches in flight of one chunk.
struct ChunkSolutions {
    in_flight: InFlight,
    of_shapes: Vec<Arc<SolvedSegment>>,
}

impl ChunkSolutions {
    /// Bytes of a block of this shape.
    fn bytes(&self, shape: usize) -> Bytes {
        self.of_shapes[shape].bytes.total(self.in_flight)
    }
}

impl ContextSolver<'_> {
    /// The plan with the smallest memory by the bytes of its segments: segments near their smallest vertex, and
    /// blocks divided so that the fullest stage is as small as possible.
    pub(super) fn min_memory_plan(&self, context: &Context) -> Option<SizedPlan> {
        let layouts = EmbeddingAndHead::fastest_per_layout(self.request, self.segments, context);
        let smallest = layouts.iter().flat_map(|layout| layout.smallest(self.segments, context));
        let mut best: Option<SizedPlan> = None;
        for embedding_and_head in smallest {
            for level in 0..LEVELS_MAX {
                let Some(stages) = self.min_memory_stages(context, &embedding_and_head, level)
                else {
                    continue;
                };
                // No arena is smaller than the bytes that are counted.
                let blocks = stages.iter().map(|stage| stage.bytes).enumerate();
                let counted = blocks
                    .map(|(stage, bytes)| bytes + embedding_and_head.bytes(context, stage))
                    .max();
                if best.as_ref().is_some_and(|best| counted >= Some(best.peak_arena())) {
                    continue;
                }
                let counts = stages.iter().map(|stage| stage.blocks.len()).collect();
                let partition = Partition { bound: Seconds(0.0), counts, stages };
                let peak = best.as_ref().map_or(Bytes(u64::MAX), SizedPlan::peak_arena);
                let sized = self.size_within(context, &embedding_and_head, partition, peak);
                if best.as_ref().is_none_or(|best| sized.peak_arena() < best.peak_arena()) {
                    best = Some(sized);
                }
            }
        }
        best
    }

    /// The smallest arena of the fullest stage, by [`Self::min_memory_plan`].
    pub(crate) fn min_memory(&self, context: &Context) -> Option<Bytes> {
        Some(self.min_memory_plan(context)?.peak_arena())
    }

    /// As [`Self::min_memory`], under restricted rules.
    pub(crate) fn min_memory_restricted(&self, context: &Context) -> Option<Bytes> {
        Some(self.min_memory_plan_restricted(context)?.peak_arena())
    }

    /// The smallest plan under restricted rules, if it fits.
    pub(crate) fn feasible_plan_restricted(&self, context: &Context) -> Option<FeasiblePlan> {
        self.complete_within_limit(self.min_memory_plan_restricted(context)?)
    }

    /// The smallest plan that is known without a limit: by the bytes of its segments, or under restricted rules.
    pub(crate) fn smallest_plan(&self, context: &Context) -> Option<FeasiblePlan> {
        let plans = [self.min_memory_plan(context), self.min_memory_plan_restricted(context)];
        let smallest = plans.into_iter().flatten().min_by_key(SizedPlan::peak_arena)?;
        Some(self.complete(smallest))
    }

    /// Lower bound on the memory of all plans of a context; `None` when some op has no legal strategy.
    pub(crate) fn least_memory_bound(&self, context: &Context) -> Option<Bytes> {
        let layouts = EmbeddingAndHead::fastest_per_layout(self.request, self.segments, context);
        let bound = |fastest: &EmbeddingAndHead| {
            self.memory_bound(context, &fastest.relaxation(self.segments, context))
        };
        layouts.iter().filter_map(bound).min()
    }

    /// The smallest plan under restricted rules: bytes exclude the memory of a block's recomputation, so
    /// minimising bytes recomputes more than is best for the arena.
    fn min_memory_plan_restricted(&self, context: &Context) -> Option<SizedPlan> {
        let plans =
            restrictions(self.request, context, false).into_iter().filter_map(|restricted| {
                let (request, context) = restricted;
                let segments = self.segments.for_request(&request);
                ContextSolver::new(&request, &segments).min_memory_plan(&context)
            });
        plans.min_by_key(SizedPlan::peak_arena)
    }

    /// A plan under restricted rules that is faster than `incumbent`: where memory binds, correcting
    /// budgets by arenas may miss plans that a smaller space leads to at once.
    /// With `published`, the strategies of published baselines are restrictions too.
    pub(crate) fn faster_plan_restricted(
        &self,
        context: &Context,
        incumbent: f64,
        published: bool,
    ) -> Option<FeasiblePlan> {
        let mut best: Option<FeasiblePlan> = None;
        for (request, context) in restrictions(self.request, context, published) {
            let cutoff = best.as_ref().map_or(incumbent, |plan| plan.time.0);
            let segments = self.segments.for_request(&request);
            let solver = ContextSolver::new(&request, &segments);
            let bounds = solver.bounds(&context, cutoff);
            let faster = solver.solve(&context, &bounds, cutoff).best.ok().flatten();
            // Where hardly any plan fits, the smallest one may be the only one that is found.
            let may_improve = published && bounds.bound(cutoff).is_ok_and(|bound| bound.0 < cutoff);
            let smallest = || {
                let smallest = may_improve.then(|| solver.min_memory_plan(&context))??;
                let plan = solver.complete_within_limit(smallest)?;
                (plan.time.0 < cutoff).then_some(plan)
            };
            best = faster.or_else(smallest).or(best);
        }
        best
    }

    /// Assigns every block the vertex `level` steps above its smallest, and divides the blocks so that
    /// the fullest stage needs the least.
    fn min_memory_stages(
        &self,
        context: &Context,
        embedding_and_head: &EmbeddingAndHead,
        level: usize,
    ) -> Option<Vec<Arc<StageAssignment>>> {
        let shapes = self.segments.layer_shapes();
        let chunks = self.chunk_solutions(context, |shape, in_flight| {
            let spec = SegmentSpec::block(shape, embedding_and_head.boundary);
            let hull = self.segments.hull(spec, context, in_flight, None);
            hull.iter().rev().nth(level.min(hull.len().checked_sub(1)?)).cloned()
        })?;
        let runs: Vec<Vec<Range<usize>>> = match context.chunks {
            1 => {
                let bytes = |stage: usize, block: usize| chunks[stage][0].bytes(shapes[block]);
                let division =
                    smallest_division(context, embedding_and_head, shapes.len(), &bytes)?;
                division.1.into_iter().map(|run| vec![run]).collect()
            }
            _ => (0..chunks.len())
                .map(|stage| stage_chunks(context, stage, shapes.len()).collect())
                .collect(),
        };
        let assign = |(chunks, runs): (&Vec<ChunkSolutions>, &Vec<Range<usize>>)| {
            let (mut blocks, mut all_in_flight) = (vec![], vec![]);
            for (chunk, run) in chunks.iter().zip(runs) {
                let solutions = shapes[run.clone()].iter().map(|shape| &chunk.of_shapes[*shape]);
                blocks.extend(solutions.cloned());
                all_in_flight.extend(run.clone().map(|_| chunk.in_flight));
            }
            Arc::new(StageAssignment::new(blocks, all_in_flight))
        };
        Some(chunks.iter().zip(&runs).map(assign).collect())
    }

    /// A solution of each block shape, by stage and chunk; `None` when a shape has none. `solution` is given a shape and the
    /// microbatches in flight.
    fn chunk_solutions(
        &self,
        context: &Context,
        solution: impl Fn(usize, InFlight) -> Option<Arc<SolvedSegment>>,
    ) -> Option<Vec<Vec<ChunkSolutions>>> {
        let of_chunk = |in_flight: InFlight| {
            let shapes = 0..self.segments.shape_count();
            let of_shapes =
                shapes.map(|shape| solution(shape, in_flight)).collect::<Option<_>>()?;
            Some(ChunkSolutions { in_flight, of_shapes })
        };
        let of_stage =
            |stage| in_flight_in_chunks(context, stage).into_iter().map(of_chunk).collect();
        (0..context.mesh.pipeline as usize).map(of_stage).collect()
    }

    /// Lower bound on the memory of the fullest stage over all divisions of the blocks: every block has the fewest bytes
    /// of any of its assignments. `None` when a block has no legal decisions.
    pub(super) fn memory_bound(
        &self,
        context: &Context,
        embedding_and_head: &EmbeddingAndHead,
    ) -> Option<Bytes> {
        let shapes = self.segments.layer_shapes();
        let chunks = self.chunk_solutions(context, |shape, in_flight| {
            let spec = SegmentSpec::block(shape, embedding_and_head.boundary);
            self.segments.hull(spec, context, in_flight, Some(Bytes(0))).pop()
        })?;
        if context.chunks > 1 {
            let of_stage = |(stage, chunks): (usize, &Vec<ChunkSolutions>)| {
                let runs = stage_chunks(context, stage, shapes.len());
                let blocks = chunks
                    .iter()
                    .zip(runs)
                    .flat_map(|(chunk, run)| shapes[run].iter().map(|shape| chunk.bytes(*shape)));
                embedding_and_head.bytes(context, stage) + blocks.sum()
            };
            return chunks.iter().enumerate().map(of_stage).max();
        }
        let bytes = |stage: usize, block: usize| chunks[stage][0].bytes(shapes[block]);
        Some(smallest_division(context, embedding_and_head, shapes.len(), &bytes)?.0)
    }
}

/// The division of the blocks whose fullest stage is smallest, with the bytes of that stage; `None` with fewer blocks than
/// stages between the first and the last. `bytes` returns the bytes of a block on a stage.
fn smallest_division(
    context: &Context,
    embedding_and_head: &EmbeddingAndHead,
    blocks: usize,
    bytes: &dyn Fn(usize, usize) -> Bytes,
) -> Option<(Bytes, Vec<Range<usize>>)> {
    let stages = context.mesh.pipeline as usize;
    let embedding_and_head_bytes = |stage: usize| embedding_and_head.bytes(context, stage);
    let blocks_min = |stage: usize| StagePlan::blocks_min(stage, stages);
    // Fills each stage up to a cap, leaving one block for each stage after it that needs one.
    let fill = |cap: Bytes| {
        let (mut ranges, mut first) = (vec![], 0);
        for stage in 0..stages {
            let last = blocks.checked_sub((stage + 1..stages).map(blocks_min).sum())?;
            let mut used = embedding_and_head_bytes(stage);
            let mut end = first;
            while end < last && (end < first + blocks_min(stage) || used + bytes(stage, end) <= cap)
            {
                used += bytes(stage, end);
                end += 1;
            }
            if used > cap {
                return None;
            }
            ranges.push(first..end);
            first = end;
        }
        (first == blocks).then_some(ranges)
    };
    let all: Bytes = (0..blocks).map(|block| bytes(0, block)).sum();
    let (mut low, mut high) =
        (0, (all + embedding_and_head_bytes(0) + embedding_and_head_bytes(stages - 1)).0);
    let mut ranges = fill(Bytes(high))?;
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        match fill(Bytes(middle)) {
            Some(smaller) => (high, ranges) = (middle, smaller),
            None => low = middle,
        }
    }
    Some((Bytes(high), ranges))
}

/// The request under restricted rules, each with its context: one way of recomputing, one norm, or collectives in order. With
/// `published`, each of these also with the strategies of one of the published baselines.
fn restrictions(request: &Request, context: &Context, published: bool) -> Vec<(Request, Context)> {
    let rules = request.rules;
    let is_free = rules.baseline == Baseline::Auto && context.tensor_size() > 1;
    let others = Baseline::ALL.into_iter().filter(|other| *other != rules.baseline);
    let others = others.filter(|_| published && is_free);
    let of_baselines = others.map(|baseline| Rules { baseline, ..rules });
    let of_rules = [rules].into_iter().chain(of_baselines).flat_map(|of_baseline| {
        let mut restricted = vec![];
        if rules.recompute == Recompute::Auto {
            let ways = [Recompute::Latents, Recompute::Block];
            restricted.extend(ways.map(|recompute| Rules { recompute, ..of_baseline }));
        }
        if rules.norm == NormRule::Auto {
            let norms = [NormRule::Sync, NormRule::Online];
            restricted.extend(norms.map(|norm| Rules { norm, ..of_baseline }));
        }
        restricted.into_iter().chain([of_baseline])
    });
    // A collective that overlaps with a GEMM keeps the GEMM's operands for longer.
    let in_order = Context { overlap_tensor_collectives: false, ..*context };
    let contexts = match context.overlap_tensor_collectives {
        true => vec![*context, in_order],
        false => vec![*context],
    };
    let is_restricted = |(of, rules_of): &(Context, Rules)| *of != *context || *rules_of != rules;
    let with_contexts = of_rules.flat_map(|rules| contexts.iter().map(move |of| (*of, rules)));
    let searches = with_contexts.filter(is_restricted);
    searches.map(|(of, rules)| (Request { rules, ..request.clone() }, of)).collect()
}
