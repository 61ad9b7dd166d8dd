//! Lower bound on the step of a pipeline from a mean of paths, and from prices of the memory of its stages.
//!
//! A step takes at least the length of each of its [paths](super::schedule_paths), and of any mean of them. In a mean, the decisions of
//! a block are the same in all paths, while the [bounds of single stages](super::joint_bound) take other ones for each path: fast passes
//! where others wait for the stage, and short reductions where it ends last. The updates of all stages follow the norm of all
//! gradients, which follows every path, so that any mean of them counts as well. Let yₖ be the share of path k, cₖ the part of its
//! length that depends on no decisions, zⱼ the share of the updates of stage j, λⱼ a price of each byte of the blocks of stage j, and Bⱼ
//! the bytes that these may take. Where decisions d of a block on stage j contribute aₖⱼ(d) to path k and uⱼ(d) to the updates, and take
//! bⱼ(d) bytes, a step takes at least
//!
//! ```text
//! Σₖ yₖ·cₖ − Σⱼ λⱼ·Bⱼ + Σ_blocks minⱼ min_d (Σₖ yₖ·aₖⱼ(d) + zⱼ·uⱼ(d) + λⱼ·bⱼ(d))
//! ```
//! whatever the division of the blocks. As the least of sums that are linear in y, z and λ, this is concave. Its maximum is the
//! Lagrangian dual of the division. A linear program over the paths and the decisions that are known so far gives shares and prices; the
//! best decisions at these are added (cutting planes; Kelley, 1960), and the longest path with these decisions. Where neither helps any
//! more, the longest path is that of the dual program's mix of decisions (column generation). The virtual stages of interleaved
//! pipelines take the place of stages; which blocks they have is fixed, and a stage has one price of memory.
//!
//! In this bound, a part of a block may be on each of several stages. Where that loses too much, [branching] on the number of blocks of a
//! stage, no more than ⌊n⌋ or at least ⌊n⌋ + 1 of the n in the best mix, gives larger bounds. These limits have prices like memory.

mod branching;
mod program;
mod stage_counts;

use narrows_cost_model::{PartTimes, StepWeights};
use narrows_plan::graph::SegmentKind;
use narrows_plan::strategy::{BoundaryLayout, TiedWeightLayout};
use narrows_plan::{Bytes, Context};

use self::stage_counts::StageCounts;
use super::in_flight::in_flight_in_chunk;
use super::interleaved::chunk_blocks;
use super::overhead::StageOverhead;
use super::schedule_paths::{PathCase, SchedulePath, SchedulePaths};
use super::step_path::{ClassTimes, SegmentClass, StepPath};
use crate::segment::{CheapestDecisions, SegmentSolver, SegmentSpec};
use crate::solve::{MEAN_TOLERANCE, MEANS_MAX};

/// Virtual stages of the longest pipelines that are bounded: the linear programs of longer ones take more time than they save.
const VIRTUAL_STAGES_MAX: usize = 32;

/// Relative difference of the costs of decisions that may be ignored.
const NEGLIGIBLE: f64 = 1e-4;

/// Seconds that a second of weight gradients with passes of their own costs decisions that shall have none.
const EXCLUDED: f64 = 1e6;

/// Decisions of a segment on a virtual stage.
struct Candidate {
    decisions: CheapestDecisions,
    times: PartTimes,
    class: SegmentClass,
}

/// Equal segments of a model.
struct Part {
    spec: SegmentSpec,
    /// Their number.
    count: f64,
    /// The only virtual stage that may have them.
    only: Option<usize>,
    /// Known decisions by virtual stage.
    candidates: Vec<Vec<Candidate>>,
}

/// Shares of paths and of the updates of each stage, and prices of a byte of each stage's blocks in seconds.
#[derive(Clone, Debug, Default)]
pub(crate) struct Multipliers {
    shares: Vec<f64>,
    updates: Vec<f64>,
    prices: Vec<f64>,
    /// Prices in seconds, for each stage, of a block on it where it may have no more, and of one on any other where it may have no
    /// fewer.
    block_prices: [Vec<f64>; 2],
    /// The paths of the shares.
    found: Vec<(SchedulePath, PathCase)>,
}

impl Multipliers {
    /// The stages at which paths with a share begin or end beside longer collectives.
    fn with_longer(&self) -> impl Iterator<Item = usize> {
        self.found.iter().flat_map(|(path, case)| path.with_longer(*case))
    }
}

/// Bounds on the plans of a context with one layout. Decisions that one bound needs are known to the next.
pub(super) struct PathMean<'a> {
    segments: &'a SegmentSolver<'a>,
    context: &'a Context,
    source: SchedulePaths<'a>,
    /// The known paths.
    found: Vec<(SchedulePath, PathCase)>,
    /// Bytes of the blocks of each stage.
    budgets: Vec<Bytes>,
    parts: Vec<Part>,
    /// The multipliers of the largest bound so far.
    best: Option<Multipliers>,
}

/// The paths of divisions.
struct DivisionPaths<'o> {
    all: Vec<StepPath>,
    overheads: &'o [StageOverhead],
    counts: StageCounts,
}

/// The bound at some multipliers.
struct Evaluation {
    /// In seconds.
    bound: f64,
    /// The times of the best decisions by virtual stage, with equal numbers of blocks; `None` where a segment is too wide for
    /// elimination.
    times: Option<Vec<ClassTimes>>,
}

impl<'a> PathMean<'a> {
    /// The bounds within these bytes of the blocks of each stage; `None` with one stage or very many.
    pub(super) fn new(
        segments: &'a SegmentSolver<'a>,
        context: &'a Context,
        layouts: (BoundaryLayout, Option<TiedWeightLayout>),
        budgets: Vec<Bytes>,
        best: Option<Multipliers>,
    ) -> Option<PathMean<'a>> {
        let (boundary, tied_weight) = layouts;
        let shapes = segments.layer_shapes();
        let virtual_stages = context.virtual_stages();
        let of_blocks = |shape: usize, blocks: &[usize], only| {
            let count = blocks.iter().filter(|other| **other == shape).count();
            (SegmentSpec::block(shape, boundary), count, only)
        };
        if virtual_stages > VIRTUAL_STAGES_MAX {
            return None;
        }
        let all_shapes = 0..segments.shape_count();
        let source = SchedulePaths::new(segments, context, layouts)?;
        let of_virtual_stage = |at: usize| {
            let blocks = &shapes[chunk_blocks(context, at, shapes.len())];
            all_shapes.clone().map(move |shape| of_blocks(shape, blocks, Some(at)))
        };
        let blocks: Vec<_> = match context.chunks {
            1 => all_shapes.clone().map(|shape| of_blocks(shape, shapes, None)).collect(),
            _ => (0..virtual_stages).flat_map(of_virtual_stage).collect(),
        };
        let found = best.as_ref().map_or_else(Vec::new, |best| best.found.clone());
        let end = |kind, stage| {
            (SegmentSpec::embedding_or_head(kind, boundary, tied_weight), 1, Some(stage))
        };
        let ends = [end(SegmentKind::Embedding, 0), end(SegmentKind::Head, virtual_stages - 1)];
        let part = |(spec, count, only): (SegmentSpec, usize, Option<usize>)| {
            let candidates = (0..virtual_stages).map(|_| vec![]).collect();
            Part { spec, count: count as f64, only, candidates }
        };
        let parts = blocks.into_iter().filter(|(_, count, _)| *count > 0).chain(ends);
        let parts = parts.map(part).collect();
        Some(PathMean { segments, context, source, found, budgets, parts, best })
    }

    /// The largest bound that is found with these overheads, in seconds; one of `cutoff` or more ends the search.
    pub(super) fn bound(
        &mut self,
        overheads: &[StageOverhead],
        cutoff: f64,
        is_interrupted: &dyn Fn() -> bool,
    ) -> f64 {
        let counts = StageCounts::any(overheads, self.segments.layer_shapes().len());
        let Some(all) = self.paths((overheads, &counts.least)) else { return 0.0 };
        let mut paths = DivisionPaths { all, overheads, counts };
        let first = self.first_multipliers();
        let (largest, best) = self.raise(&mut paths, first, cutoff, is_interrupted);
        self.best = best.map(|best| self.with_paths(best)).or_else(|| self.best.take());
        largest
    }

    /// The largest bound that is found of the plans with these numbers of blocks, in seconds.
    #[cfg(test)]
    pub(super) fn bound_of_division(
        &mut self,
        overheads: &[StageOverhead],
        counts: &[usize],
    ) -> f64 {
        let counts = StageCounts::exactly(counts);
        let all = self.paths((overheads, &counts.least)).expect("legal decisions");
        let mut paths = DivisionPaths { all, overheads, counts };
        let first = self.first_multipliers();
        self.raise(&mut paths, first, f64::INFINITY, &|| false).0
    }

    /// The largest bound that is found with the blocks that these divisions have, in seconds, and its multipliers; `next` are the
    /// first that are tried.
    fn raise(
        &mut self,
        paths: &mut DivisionPaths,
        mut next: Multipliers,
        cutoff: f64,
        is_interrupted: &dyn Fn() -> bool,
    ) -> (f64, Option<Multipliers>) {
        let (mut largest, mut found) = (0.0, None);
        for _ in 0..MEANS_MAX {
            let Some(Evaluation { bound, times }) = self.evaluate(paths, &next) else {
                break;
            };
            if bound > largest {
                (largest, found) = (bound, Some(next));
            }
            if largest >= cutoff || is_interrupted() {
                break;
            }
            let Some(times) = times else { break };
            self.find_path(paths, &times);
            let unit = if cutoff.is_finite() { cutoff } else { largest };
            if unit <= 0.0 {
                break;
            }
            let settled = largest * (1.0 + MEAN_TOLERANCE);
            let mut best = self.multipliers(paths, unit);
            if best.as_ref().is_some_and(|(value, _)| *value <= settled) {
                let mix = self.mixed_times(paths, unit);
                let is_found = mix.is_some_and(|times| self.find_path(paths, &times));
                best = is_found.then(|| self.multipliers(paths, unit)).flatten();
            }
            let Some((_, multipliers)) = best.filter(|(value, _)| *value > settled) else { break };
            next = multipliers;
        }
        (largest, found)
    }

    /// The multipliers of the largest bound, with the paths that have shares.
    pub(super) fn into_multipliers(self) -> Option<Multipliers> {
        self.best
    }

    /// The multipliers with the paths that have shares.
    fn with_paths(&self, mut multipliers: Multipliers) -> Multipliers {
        let paths = self.found.iter().cloned().zip(multipliers.shares);
        (multipliers.found, multipliers.shares) = paths.filter(|(_, share)| *share > 0.0).unzip();
        multipliers
    }

    /// The known paths, at least one; `None` where a segment has no legal decisions.
    fn paths(&mut self, division: (&[StageOverhead], &[usize])) -> Option<Vec<StepPath>> {
        if self.found.is_empty() {
            self.found.push(self.source.typical(division.0)?);
        }
        Some(self.weighted_paths(division))
    }

    fn weighted_paths(&self, division: (&[StageOverhead], &[usize])) -> Vec<StepPath> {
        let weighted =
            |(path, case): &(SchedulePath, PathCase)| self.source.weighted(path, *case, division);
        self.found.iter().map(weighted).collect()
    }

    /// The best multipliers so far; else the first path counts alone.
    fn first_multipliers(&self) -> Multipliers {
        let stages = self.budgets.len();
        let first = || Multipliers {
            shares: vec![1.0],
            updates: vec![1.0 / stages as f64; stages],
            prices: vec![0.0; stages],
            block_prices: [vec![0.0; stages], vec![0.0; stages]],
            found: self.found[..1].to_vec(),
        };
        let first = self.best.clone().unwrap_or_else(first);
        self.of_known_paths(&first)
    }

    /// The multipliers with a share of each known path, which are those of their own paths.
    fn of_known_paths(&self, multipliers: &Multipliers) -> Multipliers {
        let share = |path| {
            let own = multipliers.found.iter().position(|other| other == path);
            own.map_or(0.0, |own| multipliers.shares[own])
        };
        Multipliers { shares: self.found.iter().map(share).collect(), ..multipliers.clone() }
    }

    /// Adds the longest path at these times. Returns whether it was unknown.
    fn find_path(&mut self, paths: &mut DivisionPaths, times: &[ClassTimes]) -> bool {
        let division = (paths.overheads, paths.counts.least.as_slice());
        let longest = self.source.longest(times, division);
        let Some(found) = longest.filter(|path| !self.found.contains(path)) else { return false };
        let (path, case) = &found;
        paths.all.push(self.source.weighted(path, *case, division));
        self.found.push(found);
        true
    }

    /// The bound at these multipliers; adds the best decisions to the known ones. `None` where a segment has no legal decisions.
    fn evaluate(&mut self, paths: &DivisionPaths, multipliers: &Multipliers) -> Option<Evaluation> {
        let Multipliers { shares, updates, prices, block_prices, .. } = multipliers;
        let mean = |virtual_stage: usize, class| {
            let (stage, _) = self.context.stage_and_chunk(virtual_stage);
            let weights = paths.all.iter().map(|path| path.weights(virtual_stage, class));
            let shared = weights.zip(shares).filter(|(_, share)| **share != 0.0);
            let update = StepWeights { update: updates[stage], ..StepWeights::default() };
            shared.fold(update, |sum, (weights, share)| sum.plus(*weights, *share))
        };
        let besides = paths.all.iter().zip(shares);
        let of_memory = self.budgets.iter().zip(prices);
        let mut bound = besides.map(|(path, share)| path.besides_segments * share).sum::<f64>()
            - of_memory.map(|(budget, price)| budget.as_f64() * price).sum::<f64>()
            - paths.counts.price_within(block_prices);
        let mut times = Some(vec![ClassTimes::default(); self.context.virtual_stages()]);
        for part in &mut self.parts {
            let mut least = f64::INFINITY;
            for virtual_stage in 0..part.candidates.len() {
                if !part.may_be_on(virtual_stage, paths) {
                    continue;
                }
                let (stage, chunk) = self.context.stage_and_chunk(virtual_stage);
                let class = SegmentClass::of(part.spec.kind, f64::INFINITY);
                let weights = mean(virtual_stage, class);
                // In place of passes of their own, backward passes with all weight gradients may overlap with reductions.
                let without = || StepWeights {
                    weight_gradient: EXCLUDED,
                    ..mean(virtual_stage, SegmentClass::BlockWithoutWeightGradientPass)
                };
                let without = class.is_block().then(without);
                let cheaper = without.filter(|without| without.backward < weights.backward);
                let of_class = [weights].into_iter().chain(cheaper);
                // The memory and the number of blocks.
                let (price, of_counts) = match class.is_block() {
                    true => (prices[stage], StageCounts::price_on(stage, block_prices)),
                    false => (0.0, 0.0),
                };
                let in_flight = in_flight_in_chunk(self.context, stage, chunk as u64);
                let cheapest = |weights: StepWeights| {
                    let (weighing, memory) = ((&weights, None), Some((price, in_flight)));
                    let (spec, context) = (part.spec, self.context);
                    let decisions =
                        self.segments.cheapest_decisions(spec, context, weighing, memory)?;
                    Some((weights, decisions))
                };
                let of_class: Vec<_> = of_class.map(cheapest).collect::<Option<_>>()?;
                let (weights, decisions) =
                    of_class.into_iter().min_by(|(_, a), (_, b)| a.cost.total_cmp(&b.cost))?;
                least = least.min(decisions.cost + of_counts);
                let candidates = &mut part.candidates[virtual_stage];
                // Decisions that are hardly better than known ones are left out: programs of many decisions take long.
                let cost = |other: &Candidate| {
                    other.times.weighted(&weights) + price * other.decisions.bytes
                };
                let known = candidates.iter().min_by(|a, b| cost(a).total_cmp(&cost(b)));
                let known = known.filter(|known| {
                    known.decisions.are_those_of(&decisions)
                        || cost(known) <= decisions.cost + NEGLIGIBLE * decisions.cost.abs()
                });
                let known = known.map(|candidate| (candidate.class, candidate.times));
                let found = || {
                    let times =
                        self.segments.part_times(part.spec, self.context, &decisions, None)?;
                    let deferred = StepWeights { weight_gradient: 1.0, ..StepWeights::default() };
                    let class = SegmentClass::of(part.spec.kind, times.weighted(&deferred));
                    candidates.push(Candidate { decisions, times, class });
                    Some((class, times))
                };
                match (known.or_else(found), &mut times) {
                    (Some((class, part_times)), Some(all)) => {
                        let of_class = &mut all[virtual_stage][class as usize];
                        let share = match part.only {
                            Some(_) => 1.0,
                            None => paths.counts.share(stage),
                        };
                        *of_class = of_class.plus(part_times, part.count * share);
                    }
                    _ => times = None,
                }
            }
            bound += part.count * least;
        }
        Some(Evaluation { bound, times })
    }
}

impl Part {
    /// Whether a virtual stage may have the segments.
    fn may_be_on(&self, virtual_stage: usize, paths: &DivisionPaths) -> bool {
        let is_empty = || paths.overheads[virtual_stage % paths.overheads.len()].is_empty;
        self.only.map_or_else(|| !is_empty(), |only| only == virtual_stage)
    }
}
