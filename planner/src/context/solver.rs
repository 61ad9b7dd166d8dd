//! Solves one context: partitions its blocks, lowers the result, places its memory, simulates it.
//!
//! The arena of a stage is known once the stage is lowered. The first attempt gives the blocks all
//! memory besides embedding and head. Where an arena then exceeds the limit, or a plan that fits may reserve more than it
//! needs, the blocks are partitioned again with other [reserves](StageReserves). The bound of a context is that of the first
//! attempt with the relaxed embedding and head, so the corrections show in the gap and never in a proof.

use std::collections::HashMap;
use std::iter;
use std::sync::atomic::{AtomicU64, Ordering};

use narrows_cost_model::ExactStepWork;
use narrows_plan::program::StageProgram;
use narrows_plan::{Bytes, Context};

use super::bounds::{ContextBounds, LayoutBound};
use super::pair_segments::PairSegments;
use super::progress::{ContextSolution, FitProgress};
use super::reserves::StageReserves;
use crate::feasible_plan::FeasiblePlan;
use crate::pipeline::{
    EmbeddingAndHead, Partition, PipelineOverheads, StagePartitioner, StepSchedule,
    simulate_partition,
};
use crate::request::Request;
use crate::segment::{SegmentSolver, SolvedSegment};

/// Solves contexts of one request.
pub(crate) struct ContextSolver<'a> {
    pub(crate) request: &'a Request,
    pub(super) segments: &'a SegmentSolver<'a>,
    /// Work of exact steps, where the optimizer has them.
    pub(super) exact_work: Option<ExactStepWork>,
    /// The segments with other prices of pairs of microbatches.
    pub(super) pair_segments: PairSegments<'a>,
    candidates_priced: AtomicU64,
}

/// Largest number of reserves tried.
const RESERVES_MAX: usize = 12;

/// Distance from the bound, relative to the step, from which on plans that fit are improved.
const IMPROVED_GAP_MIN: f64 = 0.01;

/// Distance from the bound, relative to the step, from which on the last blocks of a plan are made faster.
const LAST_BLOCKS_GAP_MIN: f64 = 0.002;

/// Number of partitions that are improved by simulation.
const SIMULATED_MAX: usize = 4;

/// Partitions whose arenas are too large: slightly different budgets lead to the same solutions.
#[derive(Default)]
struct OversizedPartitions {
    /// First stage that is too large, and the uncounted bytes of its arena, by the solutions of each stage.
    uncounted: HashMap<Vec<Vec<*const SolvedSegment>>, (usize, Bytes)>,
}

/// Result of dividing the blocks among the stages.
pub(super) enum PartitionResult<'a> {
    /// Partitions, with their partitioner.
    Partitions(StagePartitioner<'a>, Vec<Partition>),
    /// None fits.
    NoneFits,
    /// The deadline passed.
    Interrupted,
}

/// Result of lowering the best partition.
enum LoweringResult {
    /// The plan, with its partition.
    Fits(Box<FeasiblePlan>, Partition),
    /// No partition is faster than the incumbent.
    NoImprovement,
    /// The first stage whose arena exceeds the limit, and the bytes of its arena that blocks, embedding and head do not
    /// count: the next reserve to try.
    TooLarge(usize, Bytes),
    /// The deadline passed.
    Interrupted,
}

impl<'a> ContextSolver<'a> {
    /// A solver for the contexts of one request.
    pub(crate) fn new(request: &'a Request, segments: &'a SegmentSolver<'a>) -> Self {
        let exact_work =
            request.loro_every.map(|_| ExactStepWork::of(&request.model, &request.profile));
        ContextSolver {
            request,
            segments,
            exact_work,
            pair_segments: PairSegments::default(),
            candidates_priced: AtomicU64::new(0),
        }
    }

    /// Partial partitions priced so far.
    pub(crate) fn candidates_priced(&self) -> u64 {
        self.candidates_priced.load(Ordering::Relaxed)
    }

    /// Counts partial partitions.
    pub(super) fn count_priced(&self, partitions: u64) {
        self.candidates_priced.fetch_add(partitions, Ordering::Relaxed);
    }

    /// The segments that were solved, with all prices of pairs of microbatches.
    pub(crate) fn all_segments(&self) -> impl Iterator<Item = &SegmentSolver<'a>> {
        iter::once(self.segments).chain(self.pair_segments.iter())
    }

    /// Whether the deadline has passed.
    pub(crate) fn out_of_time(&self) -> bool {
        self.segments.out_of_time()
    }

    /// The fastest plan of a context that is faster than `incumbent`, and a bound on all of them.
    pub(crate) fn solve(
        &self,
        context: &Context,
        bounds: &ContextBounds,
        incumbent: f64,
    ) -> ContextSolution {
        let mut progress = FitProgress::new(incumbent);
        let mut multipliers = None;
        for (embedding_and_head, layout) in &bounds.layouts {
            match layout {
                LayoutBound::Bound { time, beyond_division } if time.0 < progress.incumbent => {
                    // This bound takes long, and is not worth its time before one of the best plans is known.
                    let of_mean = self.mean_bound(
                        context,
                        embedding_and_head,
                        progress.incumbent,
                        &mut multipliers,
                    );
                    if of_mean >= progress.incumbent {
                        progress.record_no_improvement();
                        continue;
                    }
                    progress.bound = progress.bound.min(of_mean.max(time.0));
                    let divided = (*time - *beyond_division).0;
                    self.solve_layout(context, embedding_and_head, divided, &mut progress);
                }
                LayoutBound::Bound { .. } | LayoutBound::NoImprovement => {
                    progress.record_no_improvement()
                }
                LayoutBound::Infeasible(infeasible) => progress.reject(infeasible.clone()),
            }
        }
        if context.overlap_microbatch_pairs {
            self.try_pairs(context, &mut progress);
        }
        if progress.is_open() {
            if self.segments.out_of_time() {
                progress.interrupt();
            } else {
                let (smallest, limit) = (self.min_memory_plan(context), self.request.arena_limit());
                progress.try_min_memory(smallest, limit, |smallest| self.complete(smallest));
            }
        }
        progress.finish()
    }

    /// Solves one boundary layout: first with the fastest embedding and head, and with all pairs of their hull
    /// vertices where memory keeps the first plan from the bound of a division.
    fn solve_layout(
        &self,
        context: &Context,
        fastest: &EmbeddingAndHead,
        bound: f64,
        progress: &mut FitProgress,
    ) {
        // No other embedding and head have a better bound. With several stages, bounds differ slightly, because
        // each stage is relaxed alone.
        let close = if context.mesh.pipeline == 1 { 1e-12 } else { 1e-3 };
        let is_settled =
            |first: Option<f64>| first.is_some_and(|first| first <= bound * (1.0 + close));
        // With an incumbent, the arenas of all pairs are not worth trying.
        let first = self.solve_with_embedding_and_head(context, fastest, progress);
        if is_settled(first) || (first.is_none() && progress.incumbent.is_finite()) {
            return;
        }
        for embedding_and_head in fastest.hull_pairs(self.segments, context) {
            if self.segments.out_of_time() {
                return progress.interrupt();
            }
            if embedding_and_head.bound.0 >= progress.incumbent {
                continue;
            }
            if is_settled(self.solve_with_embedding_and_head(
                context,
                &embedding_and_head,
                progress,
            )) {
                return;
            }
        }
    }

    /// Solves with one embedding and head. Returns the bound of the first partition, unless all arenas are too
    /// large.
    fn solve_with_embedding_and_head(
        &self,
        context: &Context,
        embedding_and_head: &EmbeddingAndHead,
        progress: &mut FitProgress,
    ) -> Option<f64> {
        let mut fastest = None;
        let bound = self.solve_with_reserves(context, embedding_and_head, progress, &mut fastest);
        if let Some(partition) = fastest {
            let incumbent = progress.incumbent;
            let is_close = bound.is_some_and(|bound| 1.0 - bound / incumbent < LAST_BLOCKS_GAP_MIN);
            if !is_close
                && let Some(faster) =
                    self.with_faster_last_blocks(context, embedding_and_head, &partition)
            {
                progress.accept(faster);
            }
        }
        bound
    }

    /// Solves with one embedding and head, with other reserves until a plan fits, and then for faster ones. `fastest` becomes the
    /// partition of the fastest plan, if it is faster than the incumbent.
    fn solve_with_reserves(
        &self,
        context: &Context,
        embedding_and_head: &EmbeddingAndHead,
        progress: &mut FitProgress,
        fastest: &mut Option<Partition>,
    ) -> Option<f64> {
        let overheads = self.overheads(context, embedding_and_head);
        let mut reserves = StageReserves::none(context.mesh.pipeline as usize);
        let mut first_bound = None;
        let mut oversized = OversizedPartitions::default();
        for _ in 0..RESERVES_MAX {
            if self.segments.out_of_time() {
                progress.interrupt();
                return None;
            }
            let incumbent = progress.incumbent;
            let may_improve = match self.partition(
                context,
                embedding_and_head,
                &overheads,
                reserves.current(),
                incumbent,
            ) {
                PartitionResult::NoneFits => reserves.lower_without_partition(),
                PartitionResult::Interrupted => {
                    progress.interrupt();
                    return None;
                }
                PartitionResult::Partitions(partitioner, partitions) => {
                    first_bound.get_or_insert(partitions[0].bound.0);
                    match self.lower_best(
                        embedding_and_head,
                        &partitions,
                        &overheads,
                        &partitioner,
                        incumbent,
                        &mut oversized,
                    ) {
                        LoweringResult::Fits(plan, partition) => {
                            let refined = self.refine(
                                embedding_and_head,
                                &plan,
                                &partition,
                                &overheads,
                                &partitioner,
                            );
                            let refined = refined.filter(|(refined, _)| refined.time < plan.time);
                            let (plan, partition) = refined.unwrap_or((*plan, partition));
                            if plan.time.0 < progress.incumbent {
                                *fastest = Some(partition);
                            }
                            progress.accept(plan);
                            let bound = first_bound.unwrap_or(0.0);
                            let gap = 1.0 - bound / progress.incumbent;
                            if reserves.are_least() || gap < IMPROVED_GAP_MIN {
                                return first_bound;
                            }
                            reserves.lower()
                        }
                        // Partitions with smaller reserves may be faster.
                        LoweringResult::NoImprovement if !reserves.are_least() => {
                            reserves.lower_without_partition()
                        }
                        LoweringResult::NoImprovement => {
                            progress.record_no_improvement();
                            return first_bound;
                        }
                        LoweringResult::Interrupted => {
                            progress.interrupt();
                            return first_bound;
                        }
                        LoweringResult::TooLarge(stage, uncounted) => {
                            reserves.raise(stage, uncounted)
                        }
                    }
                }
            };
            if !may_improve {
                break;
            }
        }
        if reserves.have_plan() {
            return first_bound;
        }
        progress.record_oversized(self.request.arena_limit());
        None
    }

    /// Divides the blocks among the stages, with `reserve` bytes of each stage kept free.
    pub(super) fn partition<'c>(
        &'c self,
        context: &'c Context,
        embedding_and_head: &EmbeddingAndHead,
        overheads: &PipelineOverheads,
        reserve: &[Bytes],
        incumbent: f64,
    ) -> PartitionResult<'c> {
        let Some(partitioner) = self.partitioner(context, embedding_and_head, reserve) else {
            return PartitionResult::NoneFits;
        };
        let (partitions, priced) = partitioner.partitions(overheads, incumbent);
        self.count_priced(priced);
        if partitioner.is_interrupted() {
            PartitionResult::Interrupted
        } else if partitions.is_empty() {
            PartitionResult::NoneFits
        } else {
            PartitionResult::Partitions(partitioner, partitions)
        }
    }

    /// Lowers the partition with the shortest simulated step.
    fn lower_best(
        &self,
        embedding_and_head: &EmbeddingAndHead,
        partitions: &[Partition],
        overheads: &PipelineOverheads,
        partitioner: &StagePartitioner,
        incumbent: f64,
        oversized: &mut OversizedPartitions,
    ) -> LoweringResult {
        let context = partitioner.context();
        let mut best: Option<(f64, Partition)> = None;
        // Partitions with empty stages do not displace others, whose steps may be shorter.
        let (all, has_empty) = (partitions.iter(), Partition::has_empty_stages);
        let full = all.clone().filter(|partition| !has_empty(partition)).take(SIMULATED_MAX);
        let with_empty = all.take(SIMULATED_MAX).filter(|partition| has_empty(partition));
        for partition in full.chain(with_empty) {
            let cutoff = best.as_ref().map_or(incumbent, |(time, _)| *time);
            if partition.bound.0 >= cutoff {
                continue;
            }
            let time = |partition: &Partition| simulate_partition(context, partition, overheads).0;
            let bound = |partition: &Partition| {
                partition.step_bound(overheads.of(&partition.counts), StepSchedule::of(context))
            };
            let (partition, time, priced) =
                partitioner.local_search(partition.clone(), cutoff, bound, time);
            self.candidates_priced.fetch_add(priced, Ordering::Relaxed);
            if time < cutoff {
                best = Some((time, partition));
            }
        }
        let Some((_, partition)) = best else {
            return match partitioner.is_interrupted() {
                true => LoweringResult::Interrupted,
                false => LoweringResult::NoImprovement,
            };
        };
        let solutions = partition.solution_ids();
        if let Some((stage, uncounted)) = oversized.uncounted.get(&solutions) {
            return LoweringResult::TooLarge(*stage, *uncounted);
        }
        // Lowering cannot be interrupted.
        if self.segments.out_of_time() {
            return LoweringResult::Interrupted;
        }
        let limit = self.request.arena_limit();
        let sized = self.size_within(context, embedding_and_head, partition.clone(), limit);
        match sized.arenas.iter().position(|arena| *arena > limit) {
            Some(stage) => {
                let counted =
                    partition.stages[stage].bytes + embedding_and_head.bytes(context, stage);
                let uncounted = sized.arenas[stage].saturating_sub(counted);
                oversized.uncounted.insert(solutions, (stage, uncounted));
                LoweringResult::TooLarge(stage, uncounted)
            }
            None => LoweringResult::Fits(Box::new(self.complete(sized)), partition),
        }
    }

    /// The plan of a partition refined by integer programs where memory binds; `None` when the refined plan is
    /// no faster or does not fit.
    fn refine(
        &self,
        embedding_and_head: &EmbeddingAndHead,
        plan: &FeasiblePlan,
        partition: &Partition,
        overheads: &PipelineOverheads,
        partitioner: &StagePartitioner,
    ) -> Option<(FeasiblePlan, Partition)> {
        let context = partitioner.context();
        if self.segments.out_of_time() {
            return None;
        }
        // An arena is the bytes of the stage's blocks plus bytes that depend on context and stage alone.
        let limit = self.request.arena_limit();
        let unused = |stage: &StageProgram| limit.saturating_sub(stage.arena);
        let unused: Vec<Bytes> = plan.program.program().stages.iter().map(unused).collect();
        let refined = partitioner.refine(partition, &unused)?;
        let time = |partition: &Partition| simulate_partition(context, partition, overheads);
        if time(&refined) >= time(partition) || self.segments.out_of_time() {
            return None;
        }
        let sized = self.size_within(context, embedding_and_head, refined.clone(), limit);
        Some((self.complete_within_limit(sized)?, refined))
    }

    /// A partitioner of the blocks with `reserve` bytes of each stage kept free; `None` where a stage does not fit without blocks.
    pub(super) fn partitioner<'c>(
        &'c self,
        context: &'c Context,
        embedding_and_head: &EmbeddingAndHead,
        reserve: &[Bytes],
    ) -> Option<StagePartitioner<'c>> {
        let budgets = self.block_budgets(context, embedding_and_head, reserve).ok()?;
        Some(StagePartitioner::new(self.segments, context, embedding_and_head.boundary, budgets))
    }

    pub(super) fn overheads(
        &self,
        context: &Context,
        embedding_and_head: &EmbeddingAndHead,
    ) -> PipelineOverheads {
        PipelineOverheads::new(self.request, self.segments, context, embedding_and_head)
    }

    /// The bytes of each stage for its blocks; `Err` with the bytes that a stage needs without blocks, where
    /// these exceed the limit.
    pub(super) fn block_budgets(
        &self,
        context: &Context,
        embedding_and_head: &EmbeddingAndHead,
        reserve: &[Bytes],
    ) -> Result<Vec<Bytes>, Bytes> {
        let limit = self.request.arena_limit();
        reserve
            .iter()
            .enumerate()
            .map(|(stage, reserve)| {
                let used = *reserve + embedding_and_head.bytes(context, stage);
                if used <= limit { Ok(limit - used) } else { Err(used) }
            })
            .collect()
    }
}
