//! Lower bound on the step of a pipeline from a mean of paths, and from prices of the memory of its stages.
//!
//! A step takes at least the length of each of its [paths](super::paths), and of any mean of them. In a mean, the decisions of a block
//! are the same in all paths, while the [bounds of single stages](super::joint_bound) take other ones for each path: fast passes where
//! others wait for the stage, and short reductions where it ends last. Let yₖ be the share of path k in the mean, cₖ the part of its
//! length that depends on no decisions, λⱼ a price of each byte of the blocks of stage j, and Bⱼ the bytes that these may take. Where
//! decisions d of a block on stage j contribute aₖⱼ(d) to path k and take bⱼ(d) bytes, a step takes at least
//!
//! ```text
//! Σₖ yₖ·cₖ − Σⱼ λⱼ·Bⱼ + Σ_blocks minⱼ min_d (Σₖ yₖ·aₖⱼ(d) + λⱼ·bⱼ(d))
//! ```
//! whatever the division of the blocks. As the least of sums that are linear in y and λ, this is concave. Its maximum is the
//! Lagrangian dual of the division; cutting planes (Kelley, 1960) seek it: a linear program over the decisions that are known so
//! far gives shares and prices, and the best decisions at these are added.

use narrows_cost_model::StepWeights;
use narrows_plan::graph::SegmentKind;
use narrows_plan::strategy::{BoundaryLayout, TiedWeightLayout};
use narrows_plan::{Bytes, Context};

use super::in_flight::in_flight_in_chunk;
use super::joint_times::{JointPricing, JointTimes};
use super::overhead::StageOverhead;
use super::paths::{PipelinePath, PipelinePaths, RoleCounts, length};
use super::roles::ROLES;
use super::stage_position::StepSchedule;
use crate::segment::{SegmentSolver, SegmentSpec};
use crate::solve::{LinearProgram, LinearRow, TIME_SCALE, solve_relaxation};

/// Stages of the longest pipelines that are bounded: the linear programs of longer ones take more time than they save.
const STAGES_MAX: usize = 8;
/// Linear programs that are solved for a bound.
const PROGRAMS_MAX: usize = 12;
/// Relative difference to the value of the linear program at which the search ends.
const TOLERANCE: f64 = 1e-3;
/// Largest price of memory: of a stage's bytes, in steps.
const PRICE_MAX: f64 = 2.0;

/// Decisions of a segment on a stage.
struct Candidate {
    times: JointTimes,
    bytes: f64,
}

/// Equal segments of a model.
struct Part {
    spec: SegmentSpec,
    /// Their number.
    count: f64,
    /// The only stage that may have them.
    stage: Option<usize>,
    /// Known decisions by stage.
    candidates: Vec<Vec<Candidate>>,
}

/// Shares of paths, and prices of a byte of each stage's blocks in seconds.
#[derive(Clone, Debug)]
pub(crate) struct Multipliers {
    shares: Vec<f64>,
    prices: Vec<f64>,
}

/// Bounds on the plans of a context with one layout. Decisions that one bound needs are known to the next.
pub(super) struct PathMean<'a> {
    segments: &'a SegmentSolver<'a>,
    context: &'a Context,
    pricing: JointPricing<'a>,
    budgets: Vec<Bytes>,
    parts: Vec<Part>,
    /// The multipliers of the largest bound so far.
    best: Option<Multipliers>,
}

/// The paths of a division with what their lengths count besides segments.
struct Paths {
    all: Vec<PipelinePath>,
    besides_segments: Vec<f64>,
    empty: Vec<bool>,
}

impl<'a> PathMean<'a> {
    /// The bounds within these bytes of the blocks of each stage; `None` with one stage or very many, and for interleaved
    /// pipelines.
    pub(super) fn new(
        segments: &'a SegmentSolver<'a>,
        context: &'a Context,
        layouts: (BoundaryLayout, Option<TiedWeightLayout>),
        budgets: Vec<Bytes>,
        best: Option<Multipliers>,
    ) -> Option<PathMean<'a>> {
        let stages = budgets.len();
        if stages > STAGES_MAX {
            return None;
        }
        let pricing = JointPricing::new(segments, context, layouts)?;
        let (boundary, tied_weight) = layouts;
        let part = |spec, count, stage| {
            let candidates = (0..stages).map(|_| vec![]).collect();
            Part { spec, count, stage, candidates }
        };
        let of_shape = |shape: usize| {
            let count = segments.layer_shapes().iter().filter(|other| **other == shape).count();
            part(SegmentSpec::block(shape, boundary), count as f64, None)
        };
        let end = |kind, stage| {
            let spec = SegmentSpec::embedding_or_head(kind, boundary, tied_weight);
            part(spec, 1.0, Some(stage))
        };
        let ends = [end(SegmentKind::Embedding, 0), end(SegmentKind::Head, stages - 1)];
        let parts = (0..segments.shape_count()).map(of_shape).chain(ends).collect();
        Some(PathMean { segments, context, pricing, budgets, parts, best })
    }

    /// The largest bound that is found with these overheads, in seconds; one of `cutoff` or more ends the search. 0 where a
    /// segment is too wide for elimination.
    pub(super) fn bound(
        &mut self,
        overheads: &[StageOverhead],
        cutoff: f64,
        is_interrupted: &dyn Fn() -> bool,
    ) -> f64 {
        let paths = self.paths(overheads);
        let mut largest = 0.0;
        let known = self.best.clone().filter(|known| known.shares.len() == paths.all.len());
        let mut next = known.unwrap_or_else(|| Multipliers {
            shares: vec![1.0 / paths.all.len() as f64; paths.all.len()],
            prices: vec![0.0; self.budgets.len()],
        });
        for _ in 0..PROGRAMS_MAX {
            let Some(bound) = self.evaluate(&paths, &next) else { return largest };
            if bound > largest {
                (largest, self.best) = (bound, Some(next));
            }
            if largest >= cutoff || is_interrupted() {
                break;
            }
            let unit = if cutoff.is_finite() { cutoff } else { largest };
            let best = (unit > 0.0).then(|| self.multipliers(&paths, unit)).flatten();
            let Some((program_value, multipliers)) = best else { break };
            if program_value <= largest * (1.0 + TOLERANCE) {
                break;
            }
            next = multipliers;
        }
        largest
    }

    /// The multipliers of the largest bound.
    pub(super) fn into_multipliers(self) -> Option<Multipliers> {
        self.best
    }

    fn paths(&self, overheads: &[StageOverhead]) -> Paths {
        let empty: Vec<bool> = overheads.iter().map(|overhead| overhead.is_empty).collect();
        let (step, possible) = (StepSchedule::of(self.context), self.pricing.possible());
        let all = PipelinePaths { step, possible, empty: &empty }.all();
        let of_stages: Vec<JointTimes> =
            overheads.iter().map(|overhead| self.pricing.besides_segments(overhead)).collect();
        let besides = |path: &PipelinePath| {
            path.stages.iter().zip(&of_stages).map(|(counts, times)| length(counts, times)).sum()
        };
        let besides_segments = all.iter().map(besides).collect();
        Paths { all, besides_segments, empty }
    }

    /// The bound at these multipliers in seconds; adds the best decisions to the known ones. `None` where a segment has no legal
    /// decisions, or is too wide for elimination.
    fn evaluate(&mut self, paths: &Paths, multipliers: &Multipliers) -> Option<f64> {
        let Multipliers { shares, prices } = multipliers;
        let mean = |stage: usize| {
            let mut counts: RoleCounts = [0.0; ROLES.len()];
            for (path, share) in paths.all.iter().zip(shares) {
                let of_path = counts.iter_mut().zip(&path.stages[stage]);
                of_path.for_each(|(sum, count)| *sum += share * count);
            }
            counts
        };
        let means: Vec<RoleCounts> = (0..self.budgets.len()).map(mean).collect();
        let besides = paths.besides_segments.iter().zip(shares);
        let of_memory = self.budgets.iter().zip(prices);
        let mut bound = besides.map(|(time, share)| time * share).sum::<f64>()
            - of_memory.map(|(budget, price)| budget.as_f64() * price).sum::<f64>();
        for part in &mut self.parts {
            let mut least = f64::INFINITY;
            for (stage, counts) in means.iter().enumerate() {
                if !part.may_be_on(stage, paths) {
                    continue;
                }
                let kind = part.spec.kind;
                let weights = self.pricing.weights_of(counts, kind);
                let price = if kind == SegmentKind::Block { prices[stage] } else { 0.0 };
                let memory = Some((price, in_flight_in_chunk(self.context, stage, 0)));
                let costs = (&weights, None);
                let decisions =
                    self.segments.cheapest_decisions(part.spec, self.context, costs, memory)?;
                least = least.min(decisions.cost);
                let times = self.pricing.times_of(part.spec, &decisions)?;
                let candidates = &mut part.candidates[stage];
                let bytes = decisions.bytes;
                if !candidates.iter().any(|known| known.times == times && known.bytes == bytes) {
                    candidates.push(Candidate { times, bytes });
                }
            }
            bound += part.count * least;
        }
        Some(bound)
    }

    /// The best multipliers if the known decisions were all, with the bound that they would give, in seconds; `unit` is the order of
    /// magnitude of a step.
    fn multipliers(&self, paths: &Paths, unit: f64) -> Option<(f64, Multipliers)> {
        let scale = TIME_SCALE / unit;
        let path_count = paths.all.len();
        let priced = self.stages_with_limits();
        let first_part = path_count + priced.len();
        // The program minimises, and its variables are shares of paths, prices of all bytes of a stage, and costs of parts.
        let mut costs: Vec<f64> = paths.besides_segments.iter().map(|time| -time * scale).collect();
        costs.extend(priced.iter().map(|_| 1.0));
        costs.extend(self.parts.iter().map(|part| -part.count));
        let mut upper_bounds = vec![1.0; path_count];
        upper_bounds.resize(first_part, PRICE_MAX * TIME_SCALE);
        upper_bounds.resize(costs.len(), TIME_SCALE * TIME_SCALE);
        let mut rows = vec![LinearRow {
            terms: (0..path_count).map(|path| (path, 1.0)).collect(),
            is_equality: true,
            rhs: 1.0,
        }];
        for (at, part) in self.parts.iter().enumerate() {
            for (stage, candidates) in part.candidates.iter().enumerate() {
                for candidate in candidates.iter().filter(|_| part.may_be_on(stage, paths)) {
                    let mut terms = vec![(first_part + at, 1.0)];
                    let of_path = |(at, path): (usize, &PipelinePath)| {
                        (at, -scale * length(&path.stages[stage], &candidate.times))
                    };
                    terms.extend(paths.all.iter().enumerate().map(of_path));
                    let price = priced.iter().position(|other| *other == stage);
                    if let Some(price) = price.filter(|_| part.spec.kind == SegmentKind::Block) {
                        let share = candidate.bytes / self.budgets[stage].as_f64();
                        terms.push((path_count + price, -share));
                    }
                    terms.retain(|(_, coefficient)| *coefficient != 0.0);
                    rows.push(LinearRow { terms, is_equality: false, rhs: 0.0 });
                }
            }
        }
        let values = solve_relaxation(&LinearProgram { costs: costs.clone(), upper_bounds, rows })?;
        let value = -costs.iter().zip(&values).map(|(cost, value)| cost * value).sum::<f64>();
        let mut shares: Vec<f64> =
            values[..path_count].iter().map(|share| share.max(0.0)).collect();
        let all: f64 = shares.iter().sum();
        shares.iter_mut().for_each(|share| *share /= all);
        let mut prices = vec![0.0; self.budgets.len()];
        for (stage, price) in priced.iter().zip(&values[path_count..]) {
            prices[*stage] = price.max(0.0) / scale / self.budgets[*stage].as_f64();
        }
        Some((value / scale, Multipliers { shares, prices }))
    }

    /// The stages that cannot have all blocks with any known decisions.
    fn stages_with_limits(&self) -> Vec<usize> {
        let needs_more = |stage: usize| {
            let blocks = self.parts.iter().filter(|part| part.spec.kind == SegmentKind::Block);
            let most = blocks.map(|part| {
                let bytes = part.candidates[stage].iter().map(|candidate| candidate.bytes);
                part.count * bytes.fold(0.0, f64::max)
            });
            let budget = self.budgets[stage].as_f64();
            budget > 0.0 && most.sum::<f64>() > budget
        };
        (0..self.budgets.len()).filter(|stage| needs_more(*stage)).collect()
    }
}

impl Part {
    /// Whether a stage may have the segments.
    fn may_be_on(&self, stage: usize, paths: &Paths) -> bool {
        self.stage.map_or(!paths.empty[stage], |only| only == stage)
    }
}

impl JointPricing<'_> {
    /// The weights of a segment of this kind on a stage that contributes roles this often.
    fn weights_of(&self, counts: &RoleCounts, kind: SegmentKind) -> StepWeights {
        let roles = ROLES.into_iter().zip(counts).filter(|(_, count)| **count != 0.0);
        roles.fold(StepWeights::default(), |sum, (role, count)| {
            sum.plus(self.weights(role, kind).of_segment, *count)
        })
    }
}
