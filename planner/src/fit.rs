//! Fits a plan into one context: layout of the hidden state, stages, memory.
//!
//! The arena of a stage is only known once it is lowered. A first attempt gives the blocks all the
//! memory that weights at the ends leave; what the arena then exceeds the limit by is taken from the
//! blocks' budget, and the stage is divided again; where that takes too much, half of it is given
//! back. The bound of a context is that of the first attempt, with ends as fast as the fastest and as
//! small as the smallest: what corrections then miss shows in the gap, and never as a proof.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use narrows_cost_model::Prices;
use narrows_cost_model::simulate::simulate;
use narrows_plan::check::CheckedProgram;
use narrows_plan::lower::lower;
use narrows_plan::strategy::Context;
use narrows_plan::{Bytes, Kernel, Seconds};

use crate::assemble::{ModelDecisions, assemble};
use crate::divide::StagePartitioner;
use crate::ends::EmbeddingAndHead;
use crate::extras::{StageOverhead, play};
use crate::outlook::{ContextBounds, LayoutBound};
use crate::request::Request;
use crate::segments::{SegmentSolver, SolvedSegment};
use crate::stages::Partition;
use crate::tried::FitProgress;

/// A plan that fits, lowered and simulated.
#[derive(Clone, Debug)]
pub struct FeasiblePlan {
    /// The decisions.
    pub decided: ModelDecisions,
    /// The plan as written.
    pub plan: narrows_plan::Plan,
    /// The lowered plan, proven.
    pub program: CheckedProgram,
    /// Its simulated step time.
    pub time: Seconds,
    /// The same from the times that the blocks were divided by, before anything was lowered.
    pub played: Seconds,
    /// What the solver expected: the same with one stage.
    pub objective: Seconds,
}

/// Why nothing exists in a context.
#[derive(Clone, Debug, PartialEq)]
pub enum Infeasible {
    /// Some op has no legal strategy that its neighbours can meet.
    NoStrategy,
    /// It does not fit.
    Memory {
        /// Which stage, when it came that far.
        stage: Option<usize>,
        /// The least that was found to be needed.
        needed: Bytes,
        /// What there is.
        limit: Bytes,
        /// Whose need that is.
        of: MemoryEvidence,
    },
}

/// Which plans need what a refusal says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryEvidence {
    /// Every plan needs at least so much: none exists.
    Every,
    /// One that was lowered, and is too large; another may fit.
    Lowered,
    /// All that were tried are too large; another may fit.
    Tried,
}

/// Fits plans into contexts.
pub struct ContextSolver<'a> {
    pub(crate) request: &'a Request,
    pub(crate) segments: &'a SegmentSolver<'a>,
    priced: AtomicU64,
}

/// How often a budget is corrected by what the arena needs.
const CORRECTIONS_MAX: usize = 12;

/// How many partitions are improved by simulation.
const TRIED_MAX: usize = 4;

/// What came of a context.
pub struct ContextSolution {
    /// The fastest plan; `Ok(None)` when none was found that is faster than the incumbent.
    pub best: Result<Option<FeasiblePlan>, Infeasible>,
    /// No plan of this context is faster.
    pub proven: Seconds,
    /// Whether the deadline came before all was tried: what was not found may exist.
    pub is_interrupted: bool,
}

/// Partitions whose arenas are too large: budgets that differ a little lead to the same blocks.
#[derive(Default)]
struct OversizedPartitions {
    /// By the blocks of each stage: the first stage that is too large, and its arena.
    arenas: HashMap<Vec<Vec<*const SolvedSegment>>, (usize, Bytes)>,
}

/// What came of dividing the blocks among the stages.
pub(crate) enum PartitionResult<'a> {
    /// Partitions, with what found them.
    Found(StagePartitioner<'a>, Vec<Partition>),
    /// None; the bytes by which even the smallest decisions are too large.
    Nothing(Bytes),
    /// The deadline came first.
    Interrupted,
}

/// What came of lowering the best partition.
enum LoweringResult {
    Fits(Box<FeasiblePlan>),
    /// None is faster than the incumbent.
    NothingFaster,
    /// The first stage whose arena is over the limit, and its arena.
    TooLarge(usize, Bytes),
    /// The deadline came first.
    Interrupted,
}

impl FeasiblePlan {
    /// The arena of the fullest stage.
    pub fn peak(&self) -> Bytes {
        let stages = self.program.program().stages.iter();
        stages.map(|stage| stage.arena).max().unwrap_or_default()
    }
}

impl<'a> ContextSolver<'a> {
    /// For one request.
    pub fn new(request: &'a Request, segments: &'a SegmentSolver<'a>) -> Self {
        ContextSolver { request, segments, priced: AtomicU64::new(0) }
    }

    /// Stage allotments priced so far.
    pub fn priced(&self) -> u64 {
        self.priced.load(Ordering::Relaxed)
    }

    /// The fastest plan of a context that is faster than `incumbent`, and a bound on all of them.
    pub fn fit(
        &self,
        context: &Context,
        outlook: &ContextBounds,
        incumbent: f64,
    ) -> ContextSolution {
        let mut attempt = FitProgress::new(incumbent);
        for (ends, reach) in &outlook.borders {
            match reach {
                LayoutBound::Bound(bound) if bound.0 < attempt.incumbent => {
                    self.fit_border(context, ends, bound.0, &mut attempt);
                }
                LayoutBound::Bound(_) | LayoutBound::NothingFaster => attempt.nothing_faster(),
                LayoutBound::Refused(refusal) => attempt.refuse(refusal.clone()),
            }
        }
        if attempt.is_open() {
            if self.segments.is_late() {
                attempt.interrupt();
            } else {
                attempt.last_resort(self.smallest(context), self.request.memory_bytes());
            }
        }
        attempt.end()
    }

    /// Fits a plan with this border. The fastest ends first; where memory keeps them from what all
    /// ends together could reach, the others too.
    fn fit_border(
        &self,
        context: &Context,
        fastest: &EmbeddingAndHead,
        bound: f64,
        tried: &mut FitProgress,
    ) {
        tried.proven = tried.proven.min(bound);
        // No other ends have a better bound. Those of several stages differ a little by what is
        // least of each alone.
        let close = if context.mesh.pipeline == 1 { 1e-12 } else { 1e-3 };
        let settled =
            |first: Option<f64>| first.is_some_and(|first| first <= bound * (1.0 + close));
        // Where there is a plan to beat already, arenas are not worth trying every pair.
        let first = self.fit_ends(context, fastest, tried);
        if settled(first) || (first.is_none() && tried.incumbent.is_finite()) {
            return;
        }
        for ends in fastest.pairs(self.segments, context) {
            if self.segments.is_late() {
                return tried.interrupt();
            }
            if ends.bound.0 >= tried.incumbent {
                continue;
            }
            if settled(self.fit_ends(context, &ends, tried)) {
                return;
            }
        }
    }

    /// Fits a plan with these ends. Returns the bound on those that the blocks' bytes allow, unless
    /// every arena that was tried is too large.
    fn fit_ends(
        &self,
        context: &Context,
        ends: &EmbeddingAndHead,
        tried: &mut FitProgress,
    ) -> Option<f64> {
        let extras = self.extras(context, ends);
        let mut slack = vec![Bytes(0); context.mesh.pipeline as usize];
        let mut first_bound = None;
        // Between what leads to too large an arena and what leaves nothing.
        let (mut low, mut high) = (slack.clone(), None);
        let mut refused = OversizedPartitions::default();
        for _ in 0..CORRECTIONS_MAX {
            if self.segments.is_late() {
                tried.interrupt();
                return None;
            }
            match self.divided(context, ends, &extras, &slack, tried.incumbent) {
                PartitionResult::Nothing(_) if slack == low => break,
                PartitionResult::Nothing(_) => high = Some(slack.clone()),
                PartitionResult::Interrupted => {
                    tried.interrupt();
                    return None;
                }
                PartitionResult::Found(divider, found) => {
                    first_bound.get_or_insert(found[0].bound.0);
                    let to_beat = tried.incumbent;
                    match self.best_of(ends, found, &extras, &divider, to_beat, &mut refused) {
                        LoweringResult::Fits(fitted) => {
                            tried.take(*fitted);
                            return first_bound;
                        }
                        LoweringResult::NothingFaster => {
                            tried.nothing_faster();
                            return first_bound;
                        }
                        LoweringResult::Interrupted => {
                            tried.interrupt();
                            return first_bound;
                        }
                        LoweringResult::TooLarge(stage, needed) => {
                            low.clone_from(&slack);
                            if high.is_none() {
                                slack[stage] += needed - self.request.memory_bytes();
                                continue;
                            }
                        }
                    }
                }
            }
            if let Some(high) = &high {
                let between = |(low, high): (&Bytes, &Bytes)| Bytes(low.0 + (high.0 - low.0) / 2);
                slack = low.iter().zip(high).map(between).collect();
            }
        }
        tried.left_open(self.request.memory_bytes());
        None
    }

    /// Divides the blocks among the stages, with so many bytes less than the limit.
    pub(crate) fn divided(
        &self,
        context: &'a Context,
        ends: &EmbeddingAndHead,
        extras: &[StageOverhead],
        slack: &[Bytes],
        incumbent: f64,
    ) -> PartitionResult<'a> {
        let limit = self.request.memory_bytes();
        let budgets = match self.budgets(context, ends, slack) {
            Ok(budgets) => budgets,
            Err(needed) => return PartitionResult::Nothing(needed.saturating_sub(limit)),
        };
        let divider = StagePartitioner::new(self.segments, context, ends.border, budgets);
        let (found, priced) = divider.partitions(extras, incumbent);
        self.priced.fetch_add(priced, Ordering::Relaxed);
        if divider.is_interrupted() {
            PartitionResult::Interrupted
        } else if found.is_empty() {
            PartitionResult::Nothing(divider.excess())
        } else {
            PartitionResult::Found(divider, found)
        }
    }

    /// The partition with the shortest simulated step, lowered.
    fn best_of(
        &self,
        ends: &EmbeddingAndHead,
        found: Vec<Partition>,
        extras: &[StageOverhead],
        divider: &StagePartitioner,
        incumbent: f64,
        refused: &mut OversizedPartitions,
    ) -> LoweringResult {
        let context = divider.context();
        let microbatches = context.workload.microbatches(&context.mesh);
        let choice = |stage, first, count| divider.known_allotment(stage, first, count);
        let mut best: Option<(f64, Partition)> = None;
        for partition in found.into_iter().take(TRIED_MAX) {
            let least = best.as_ref().map_or(incumbent, |(time, _)| *time);
            if partition.bound.0 >= least {
                break;
            }
            let time = |partition: &Partition| play(context, partition, extras).0;
            let bound = |partition: &Partition| partition.bound_of(extras, microbatches);
            let (partition, time, priced) = partition.improve(&choice, least, bound, time);
            self.priced.fetch_add(priced, Ordering::Relaxed);
            if time < least {
                best = Some((time, partition));
            }
        }
        let Some((_, partition)) = best else {
            let interrupted = divider.is_interrupted();
            return if interrupted {
                LoweringResult::Interrupted
            } else {
                LoweringResult::NothingFaster
            };
        };
        let blocks = partition.blocks();
        if let Some((stage, arena)) = refused.arenas.get(&blocks) {
            return LoweringResult::TooLarge(*stage, *arena);
        }
        // Lowering cannot be interrupted.
        if self.segments.is_late() {
            return LoweringResult::Interrupted;
        }
        let fitted = self.realise(context, ends, partition);
        let limit = self.request.memory_bytes();
        let lowered = &fitted.program.program().stages;
        match lowered.iter().position(|stage| stage.arena > limit) {
            Some(stage) => {
                let arena = lowered[stage].arena;
                refused.arenas.insert(blocks, (stage, arena));
                LoweringResult::TooLarge(stage, arena)
            }
            None => LoweringResult::Fits(Box::new(fitted)),
        }
    }

    pub(crate) fn realise(
        &self,
        context: &Context,
        ends: &EmbeddingAndHead,
        partition: Partition,
    ) -> FeasiblePlan {
        let played = play(context, &partition, &self.extras(context, ends));
        let decided = ModelDecisions {
            context: *context,
            border: ends.border,
            embedding: ends.embedding.clone(),
            stages: partition.stages.iter().map(|stage| stage.blocks.clone()).collect(),
            head: ends.head.clone(),
        };
        let plan = assemble(self.request, &decided);
        let resolved = plan
            .resolve(&self.request.model)
            .unwrap_or_else(|defects| unreachable!("the planner wrote a bad plan: {defects}"));
        let program = CheckedProgram::check(lower(&resolved)).unwrap_or_else(|errors| {
            unreachable!("the planner's own program is refused: {errors}")
        });
        let prices = Prices::new(&self.request.profile, self.request.executor, &context.mesh);
        let price = |kernel: &Kernel| prices.kernel(kernel);
        let time = simulate(&program, &price).step_time;
        FeasiblePlan { decided, plan, program, time, played, objective: partition.bound }
    }

    /// What is left for the blocks of each stage; what a stage's ends alone need, when that is all
    /// or more.
    pub(crate) fn budgets(
        &self,
        context: &Context,
        ends: &EmbeddingAndHead,
        slack: &[Bytes],
    ) -> Result<Vec<Bytes>, Bytes> {
        let limit = self.request.memory_bytes();
        slack
            .iter()
            .enumerate()
            .map(|(stage, slack)| {
                let fixed = *slack + ends.bytes(context, stage);
                if fixed < limit { Ok(limit - fixed) } else { Err(fixed) }
            })
            .collect()
    }
}

impl Infeasible {
    /// Of two refusals, the one that is closer to being a plan.
    pub(crate) fn gentler(self, other: Infeasible) -> Infeasible {
        match (&self, &other) {
            (Infeasible::NoStrategy, _) => other,
            (
                Infeasible::Memory { needed, of, .. },
                Infeasible::Memory { needed: theirs, of: whose, .. },
            ) => {
                // What is proved of every plan is further from one than what was tried.
                let proved = |of| of == MemoryEvidence::Every;
                if (proved(*whose), theirs) < (proved(*of), needed) { other } else { self }
            }
            _ => self,
        }
    }
}
