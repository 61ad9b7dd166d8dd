//! The plan of a context that needs the least memory.

use std::ops::Range;
use std::sync::Arc;

use narrows_cost_model::{InFlight, WorkingSet};
use narrows_plan::strategy::{Baseline, NormRule, Recompute, Rules};
use narrows_plan::{Bytes, Context, Seconds, StagePlan};

use super::average_stage::evenly_split_bytes;
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
                if best.is_some() && self.segments.out_of_time() {
                    return best;
                }
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
        let plans = self.restrictions_in_time(context, false).filter_map(|(request, context)| {
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
        for (request, context) in self.restrictions_in_time(context, published) {
            let cutoff = best.as_ref().map_or(incumbent, |plan| plan.time.0);
            let segments = self.segments.for_request(&request);
            let solver = ContextSolver::new(&request, &segments);
            let bounds = solver.bounds(&context, [0.0, cutoff]);
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

    /// The [`restrictions`] of the request that come before the deadline.
    fn restrictions_in_time(
        &self,
        context: &Context,
        published: bool,
    ) -> impl Iterator<Item = (Request, Context)> {
        let restricted = restrictions(self.request, context, published).into_iter();
        restricted.take_while(|_| !self.segments.out_of_time())
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
                let (_, division) =
                    smallest_division(context, embedding_and_head, shapes.len(), &bytes, &|_| {
                        Bytes(0)
                    })?;
                division.into_iter().map(|run| vec![run]).collect()
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
    /// of any of its assignments, and the stage holds what one block or the head holds during its passes. `None` when a block has
    /// no legal decisions.
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
        let working = self.uncounted_min(context, embedding_and_head, &chunks);
        if context.chunks > 1 {
            let of_stage = |(stage, chunks): (usize, &Vec<ChunkSolutions>)| {
                let runs = stage_chunks(context, stage, shapes.len());
                let blocks = chunks
                    .iter()
                    .zip(runs)
                    .flat_map(|(chunk, run)| shapes[run].iter().map(|shape| chunk.bytes(*shape)));
                embedding_and_head.bytes(context, stage) + blocks.sum() + working[stage]
            };
            return chunks.iter().enumerate().map(of_stage).max();
        }
        let bytes = |stage: usize, block: usize| chunks[stage][0].bytes(shapes[block]);
        let working = |stage: usize| working[stage];
        Some(smallest_division(context, embedding_and_head, shapes.len(), &bytes, &working)?.0)
    }

    /// Least bytes of each stage besides the fewest of its blocks and those of embedding and head, if it has blocks.
    ///
    /// Where a chunk has several microbatches in flight, each has buffers of its own for what its blocks keep, and what a block
    /// holds during a pass is there as well, apart from what it keeps itself of one microbatch. Averaged over n blocks with the
    /// resident bytes ρ, the bytes c with f microbatches in flight, and the working bytes W, a stage needs
    ///
    /// ```text
    /// Σ c + W − Σ (c − ρ)/(f·n)
    /// ```
    /// This grows with each c, so that it is least where all are. A last chunk with one microbatch in flight has other
    /// [working sets](super::block_room): at the backward passes of its last blocks, the head keeps nothing any more.
    fn uncounted_min(
        &self,
        context: &Context,
        embedding_and_head: &EmbeddingAndHead,
        chunks: &[Vec<ChunkSolutions>],
    ) -> Vec<Bytes> {
        let segments = self.segments;
        let stages = context.mesh.pipeline as usize;
        let layouts = (embedding_and_head.boundary, embedding_and_head.tied_weight);
        let Some(working) = segments.block_working_bytes(layouts.0, context) else {
            return vec![Bytes(0); stages];
        };
        let resident = evenly_split_bytes(segments.block_parameters_min(), context);
        let largest = |ChunkSolutions { in_flight, of_shapes }: &ChunkSolutions| {
            let bytes = of_shapes.iter().map(|block| block.bytes.total(*in_flight));
            bytes.max().unwrap_or_default()
        };
        let with_copies = |chunk: &ChunkSolutions| {
            let kept = largest(chunk).saturating_sub(resident).0;
            working.at_fullest().saturating_sub(Bytes(kept.div_ceil(chunk.in_flight.kept)))
        };
        let on_last_stage = |chunk: &ChunkSolutions| {
            let of_head = segments.head_working_bytes(layouts, context);
            let sets = match stages {
                1 => working.of_stage(context, segments.layer_shapes().len() as u64, of_head),
                _ => working.of_last_stage(of_head),
            };
            let freed = embedding_and_head.freed_by_head(segments, context);
            let uncounted = |WorkingSet { last_blocks, bytes }| {
                let needed = resident * last_blocks + bytes;
                needed.saturating_sub(largest(chunk) * last_blocks + freed)
            };
            sets.into_iter().map(uncounted).max().unwrap_or_default()
        };
        let is_once = |chunk: &&ChunkSolutions| chunk.in_flight.kept == context.pass_microbatches();
        let of_stage = |stage: usize| {
            let chunks = &chunks[stage];
            if chunks.iter().any(|chunk| chunk.in_flight.written > 0) {
                return Bytes(0);
            }
            match chunks.iter().rfind(is_once) {
                None => with_copies(&chunks[0]),
                Some(once) if stage + 1 == stages => on_last_stage(once),
                Some(_) => Bytes(0),
            }
        };
        (0..stages).map(of_stage).collect()
    }
}

/// The division of the blocks whose fullest stage is smallest, with the bytes of that stage; `None` with fewer blocks than
/// stages between the first and the last. `bytes` returns the bytes of a block on a stage, and `working` those that a stage with
/// blocks needs besides.
fn smallest_division(
    context: &Context,
    embedding_and_head: &EmbeddingAndHead,
    blocks: usize,
    bytes: &dyn Fn(usize, usize) -> Bytes,
    working: &dyn Fn(usize) -> Bytes,
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
            while end < last {
                let with_working = if end == first { working(stage) } else { Bytes(0) };
                let with_block = used + bytes(stage, end) + with_working;
                if end >= first + blocks_min(stage) && with_block > cap {
                    break;
                }
                used = with_block;
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
    let ends = embedding_and_head_bytes(0) + embedding_and_head_bytes(stages - 1);
    let working = (0..stages).map(working).max().unwrap_or_default();
    let (mut low, mut high) = (0, (all + ends + working).0);
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

#[cfg(test)]
mod tests {
    use narrows_cost_model::profile;
    use narrows_plan::PipelineSchedule;
    use narrows_plan::model::presets;

    use crate::context_space::contexts;
    use crate::deadline::Deadline;
    use crate::request::{MemoryLimit, Request};
    use crate::segment::SegmentSolver;

    use super::*;

    #[test]
    fn no_plan_needs_less_than_the_bound() {
        check_every(12, 60);
    }

    #[test]
    #[ignore = "second level: six times as many contexts"]
    fn no_plan_of_more_contexts_needs_less_than_the_bound() {
        check_every(2, 360);
    }

    /// Checks that no plan of every n-th context needs less than the bound of the context, and that some need hardly more, on one
    /// stage and in pipelines of every schedule.
    fn check_every(n: usize, contexts_min: usize) {
        let profile = profile::preset("a100-80gb").expect("a preset");
        let mut ratios: Vec<(Context, f64)> = vec![];
        for (name, devices, sequence) in [
            ("cola-60m", 4, 2048),
            ("llama-60m", 6, 1024),
            ("lax-130m", 4, 1024),
            ("svd-350m", 8, 2048),
        ] {
            let model = presets::find(name).expect("a preset");
            let request = Request {
                memory_limit: MemoryLimit::None,
                ..Request::new(model, profile.clone(), devices, 2 * devices, sequence)
            };
            let segments = SegmentSolver::new(&request, Deadline::none());
            let solver = ContextSolver::new(&request, &segments);
            for context in contexts(&request).into_iter().step_by(n) {
                let smallest =
                    [solver.min_memory(&context), solver.min_memory_restricted(&context)];
                let Some(smallest) = smallest.into_iter().flatten().min() else { continue };
                let bound = solver.least_memory_bound(&context).expect("a plan");
                assert!(bound <= smallest, "{name}, {context:?}: {bound} and {smallest}");
                ratios.push((context, smallest.as_f64() / bound.as_f64()));
            }
        }
        let tightest = |is_counted: &dyn Fn(&Context) -> bool| {
            let counted = ratios.iter().filter(|(context, _)| is_counted(context));
            counted.map(|(_, ratio)| *ratio).fold(f64::INFINITY, f64::min)
        };
        let on_one_stage = tightest(&|context| context.mesh.pipeline == 1);
        let of_schedules = [
            PipelineSchedule::OneForwardOneBackward,
            PipelineSchedule::Interleaved,
            PipelineSchedule::ZeroBubble,
        ]
        .map(|schedule| {
            tightest(&|context| context.mesh.pipeline > 1 && context.schedule == schedule)
        });
        let case = format!("{on_one_stage}, {of_schedules:?} in pipelines");
        assert!(on_one_stage < 1.002, "{case}");
        assert!(of_schedules.into_iter().all(|ratio| ratio < 1.05), "{case}");
        assert!(ratios.len() > contexts_min, "{} contexts", ratios.len());
    }
}
