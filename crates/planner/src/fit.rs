//! Fits a plan into one context: layout of the hidden state, stages, memory.
//!
//! The arena of a stage is only known once it is lowered. A first attempt gives the blocks all the
//! memory that weights at the ends leave; what the arena then exceeds the limit by is taken from the
//! blocks' budget, and the stage is divided again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use narrows_cost_model::Prices;
use narrows_cost_model::simulate::{StageTime, run_schedule, simulate};
use narrows_plan::check::CheckedProgram;
use narrows_plan::emit::{
    Crossing, gradient_extent, hops, op_parameters, step_begin, step_norm, tied_reduce,
};
use narrows_plan::graph::SegmentKind;
use narrows_plan::lower::lower;
use narrows_plan::program::{Extent, Turn, one_forward_one_backward};
use narrows_plan::strategy::{Border, Context};
use narrows_plan::{Bytes, Kernel, Seconds};

use crate::assemble::{Decided, assemble};
use crate::divide::{Divider, block_part, in_flight};
use crate::request::Request;
use crate::search::tied_weights;
use crate::segments::{Part, Segments, Solved};
use crate::stages::{Extra, Partition};

/// A plan that fits, lowered and simulated.
#[derive(Clone, Debug)]
pub struct Fitted {
    /// The decisions.
    pub decided: Decided,
    /// The plan as written.
    pub plan: narrows_plan::Plan,
    /// The lowered plan, proven.
    pub program: CheckedProgram,
    /// Its simulated step time.
    pub time: Seconds,
    /// What the solver expected: the same with one stage.
    pub objective: Seconds,
}

/// Why nothing exists in a context.
#[derive(Clone, Debug, PartialEq)]
pub enum Refusal {
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
    },
}

/// Fits plans into contexts.
pub struct Fitter<'a> {
    request: &'a Request,
    segments: &'a Segments<'a>,
    priced: AtomicU64,
}

/// Embedding and head of a context, for one layout of what segments hand on.
#[derive(Clone)]
struct Ends {
    border: Border,
    embedding: Arc<Solved>,
    head: Arc<Solved>,
    bound: Seconds,
}

/// How often a budget is corrected by what the arena needs.
const CORRECTIONS_MAX: usize = 12;

/// How many partitions are improved by simulation.
const TRIED_MAX: usize = 4;

/// What came of one layout of the hidden state: the best plan, and a bound on all of them.
type Attempt = (Result<Option<Fitted>, Refusal>, Seconds);

impl<'a> Fitter<'a> {
    /// For one request.
    pub fn new(request: &'a Request, segments: &'a Segments<'a>) -> Self {
        Fitter { request, segments, priced: AtomicU64::new(0) }
    }

    /// Stage allotments priced so far.
    pub fn priced(&self) -> u64 {
        self.priced.load(Ordering::Relaxed)
    }

    /// The fastest plan of a context that is faster than `incumbent`; `Ok(None)` when there is no
    /// faster one. Also a bound: no plan of this context is faster.
    pub fn fit(&self, context: &Context, incumbent: f64) -> Attempt {
        let mut ends = self.ends(context);
        ends.sort_by(|a, b| a.bound.0.total_cmp(&b.bound.0));
        let mut best: Result<Option<Fitted>, Refusal> = Err(Refusal::NoStrategy);
        let mut proven = Seconds(f64::INFINITY);
        let mut incumbent = incumbent;
        for end in ends {
            if end.bound.0 >= incumbent {
                best = best.or(Ok(None));
                continue;
            }
            let (fitted, bound) = self.fit_ends(context, &end, incumbent);
            proven = Seconds(proven.0.min(bound.0));
            match fitted {
                Ok(Some(fitted)) => {
                    incumbent = incumbent.min(fitted.time.0);
                    best = Ok(Some(fitted));
                }
                Ok(None) => best = best.or(Ok(None)),
                Err(refusal) => best = best.map_err(|known| known.gentler(refusal)),
            }
        }
        (best, proven)
    }

    /// Every layout of the hidden state with its best ends, and a bound without memory limits.
    fn ends(&self, context: &Context) -> Vec<Ends> {
        let microbatches = context.workload.microbatches(&context.mesh);
        let mut found = vec![];
        for border in self.segments.borders(context) {
            let Some(blocks) = self.blocks(context, border) else { continue };
            let total = |solved: &Arc<Solved>| solved.time.total(microbatches);
            let blocks_time: Seconds = blocks.iter().map(total).sum();
            for tied_weight in tied_weights(self.request) {
                let part = |kind| Part::end(kind, border, tied_weight);
                let embedding = self.segments.fastest(part(SegmentKind::Embedding), context);
                let head = self.segments.fastest(part(SegmentKind::Head), context);
                let (Some(embedding), Some(head)) = (embedding, head) else { continue };
                let all = blocks_time + total(&embedding) + total(&head);
                let stages = context.mesh.pipeline as f64;
                found.push(Ends { border, embedding, head, bound: Seconds(all.0 / stages) });
            }
        }
        found
    }

    /// The fastest decisions of every block.
    fn blocks(&self, context: &Context, border: Border) -> Option<Vec<Arc<Solved>>> {
        self.segments
            .layer_shapes()
            .iter()
            .map(|&shape| self.segments.fastest(block_part(shape, border), context))
            .collect()
    }

    fn fit_ends(&self, context: &Context, ends: &Ends, incumbent: f64) -> Attempt {
        let limit = self.request.memory_bytes();
        let stages = context.mesh.pipeline as usize;
        let mut slack = vec![Bytes(0); stages];
        let extras = self.extras(context, ends);
        let mut first_bound = None;
        let mut refusal = Refusal::Memory { stage: None, needed: limit, limit };
        for _ in 0..CORRECTIONS_MAX {
            let budgets = self.budgets(context, ends, &slack);
            let Some(budgets) = budgets else { break };
            let divider = Divider::new(self.segments, context, ends.border, budgets);
            let (found, priced) = divider.partitions(&extras, incumbent);
            self.priced.fetch_add(priced, Ordering::Relaxed);
            let bound = found.first().map_or(Seconds(f64::INFINITY), |p| p.bound);
            let first_bound = *first_bound.get_or_insert(bound);
            if found.is_empty() && incumbent.is_finite() {
                // Nothing that fits beats the incumbent; whether anything fits does not matter.
                return (Ok(None), first_bound);
            }
            if found.is_empty() {
                let needed = limit + divider.excess();
                refusal = Refusal::Memory { stage: None, needed, limit };
                break;
            }
            match self.best_of(ends, found, &extras, &divider, incumbent) {
                Ok(fitted) => return (Ok(fitted), first_bound),
                Err((stage, needed)) => {
                    refusal = Refusal::Memory { stage: Some(stage), needed, limit };
                    slack[stage] += needed - limit;
                }
            }
        }
        (Err(refusal), Seconds(f64::INFINITY))
    }

    /// The partition with the shortest simulated step, lowered. An arena over the limit is an
    /// error: the stage, and what it needs.
    fn best_of(
        &self,
        ends: &Ends,
        found: Vec<Partition>,
        extras: &[Extra],
        divider: &Divider,
        incumbent: f64,
    ) -> Result<Option<Fitted>, (usize, Bytes)> {
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
        let Some((_, partition)) = best else { return Ok(None) };
        let fitted = self.realise(context, ends, partition);
        let limit = self.request.memory_bytes();
        let lowered = &fitted.program.program().stages;
        match lowered.iter().position(|stage| stage.arena > limit) {
            Some(stage) => Err((stage, lowered[stage].arena)),
            None => Ok(Some(fitted)),
        }
    }

    fn realise(&self, context: &Context, ends: &Ends, partition: Partition) -> Fitted {
        let decided = Decided {
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
        Fitted { decided, plan, program, time, objective: partition.bound }
    }

    /// What is left for the blocks of each stage; `None` when a stage's ends alone are too large.
    fn budgets(&self, context: &Context, ends: &Ends, slack: &[Bytes]) -> Option<Vec<Bytes>> {
        let limit = self.request.memory_bytes();
        let last = slack.len() - 1;
        slack
            .iter()
            .enumerate()
            .map(|(stage, slack)| {
                let in_flight = in_flight(context, stage);
                let mut fixed = *slack;
                if stage == 0 {
                    fixed += ends.embedding.bytes.total(in_flight);
                }
                if stage == last {
                    fixed += ends.head.bytes.resident;
                }
                (fixed < limit).then(|| limit - fixed)
            })
            .collect()
    }

    /// What each stage runs besides its blocks.
    fn extras(&self, context: &Context, ends: &Ends) -> Vec<Extra> {
        let prices = Prices::new(&self.request.profile, self.request.executor, &context.mesh);
        let price = |template: &narrows_plan::emit::Template| prices.kernel(&template.kernel());
        let stages = context.mesh.pipeline;
        let once: Seconds = step_norm(context).iter().chain([&step_begin()]).map(price).sum();
        (0..stages)
            .map(|stage| {
                let crossing = Crossing { carried: self.segments.carried(), border: ends.border };
                let (forward, backward) = hops(&crossing, &crossing, stage, context);
                let mut extra = Extra {
                    forward: forward.iter().map(price).sum(),
                    backward: backward.iter().map(price).sum(),
                    step: once,
                };
                if stage == 0 {
                    extra.add(&ends.embedding);
                }
                if stage + 1 == stages {
                    extra.add(&ends.head);
                }
                if self.request.model.tied && stages > 1 && (stage == 0 || stage + 1 == stages) {
                    extra.step += tied_gradient(&ends.head, context)
                        .map_or(Seconds(0.0), |extent| price(&tied_reduce(extent, context)));
                }
                extra
            })
            .collect()
    }
}

/// The gradient of the weight that both ends of a pipeline hold.
fn tied_gradient(head: &Solved, context: &Context) -> Option<Extent> {
    let op = head.segment.op_ids().find(|id| head.segment.op(*id).name == "head")?;
    let strategy = head.choice.ops[op.0 as usize].choice.strategy;
    let parameter = op_parameters(head.segment.op(op), strategy, context)?;
    gradient_extent(&parameter, context)
}

impl Extra {
    fn add(&mut self, solved: &Solved) {
        self.forward += solved.time.forward;
        self.backward += solved.time.backward;
        self.step += solved.time.step;
    }
}

impl Refusal {
    /// Of two refusals, the one that is closer to being a plan.
    fn gentler(self, other: Refusal) -> Refusal {
        match (&self, &other) {
            (Refusal::NoStrategy, _) => other,
            (Refusal::Memory { needed: a, .. }, Refusal::Memory { needed: b, .. }) if b < a => {
                other
            }
            _ => self,
        }
    }
}

/// Plays a partition's schedule with the times it was divided by: what simulating the lowered
/// program gives, without lowering it.
fn play(context: &Context, partition: &Partition, extras: &[Extra]) -> Seconds {
    let stages = context.mesh.pipeline;
    let microbatches = context.workload.microbatches(&context.mesh);
    let times: Vec<StageTime> = partition
        .stages
        .iter()
        .zip(extras)
        .map(|(stage, extra)| StageTime {
            forward: stage.forward + extra.forward,
            backward: stage.backward + extra.backward,
            step: stage.step + extra.step,
        })
        .collect();
    let schedules: Vec<Vec<Turn>> =
        (0..stages).map(|stage| one_forward_one_backward(stage, stages, microbatches)).collect();
    let schedules: Vec<&[Turn]> = schedules.iter().map(Vec::as_slice).collect();
    run_schedule(&times, &schedules).0
}
