//! Fits a plan into one context: layout of the hidden state, stages, memory.
//!
//! The arena of a stage is only known once it is lowered. A first attempt gives the blocks all the
//! memory that weights at the ends leave; what the arena then exceeds the limit by is taken from the
//! blocks' budget, and the stage is divided again.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use narrows_cost_model::Prices;
use narrows_cost_model::simulate::simulate;
use narrows_plan::emit::{
    gradient_extent, hops, op_parameters, step_begin, step_norm, tied_reduce,
};
use narrows_plan::graph::SegmentKind;
use narrows_plan::lower::lower;
use narrows_plan::program::{Extent, Program, slots_in_flight};
use narrows_plan::strategy::{Context, borders};
use narrows_plan::{Bytes, EdgeLayout, Kernel, Seconds};

use crate::assemble::{Decided, assemble};
use crate::request::Request;
use crate::search::tied_weights;
use crate::segments::{Part, Segments, Solved};
use crate::stages::{Allotment, Extra, Partition, partitions, run_fronts};

/// A plan that fits, lowered and simulated.
#[derive(Clone, Debug)]
pub struct Fitted {
    /// The decisions.
    pub decided: Decided,
    /// The plan as written.
    pub plan: narrows_plan::Plan,
    /// The lowered plan.
    pub program: Program,
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

/// Embedding and head of a context, for one layout of the hidden state.
#[derive(Clone)]
struct Ends {
    border: EdgeLayout,
    embedding: Arc<Solved>,
    head: Arc<Solved>,
    bound: Seconds,
}

/// How often a budget is corrected by what the arena needs.
const CORRECTIONS_MAX: usize = 12;

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
        let baseline = self.request.rules.baseline;
        let mut found = vec![];
        for border in borders(self.request.model.hidden, context) {
            if context.tensor() > 1 && !baseline.allows_border(border) {
                continue;
            }
            let Some(blocks) = self.blocks(context, border) else { continue };
            let total = |solved: &Arc<Solved>| solved.time.total(microbatches);
            let blocks_time: Seconds = blocks.iter().map(total).sum();
            for tied_weight in tied_weights(self.request) {
                let part = |kind| Part { kind, shape: 0, border, tied_weight };
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
    fn blocks(&self, context: &Context, border: EdgeLayout) -> Option<Vec<Arc<Solved>>> {
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
        let mut first_bound = None;
        let mut refusal = Refusal::Memory { stage: None, needed: limit, limit };
        for _ in 0..CORRECTIONS_MAX {
            let budgets = self.budgets(context, ends, &slack);
            let Some(budgets) = budgets else { break };
            let divider = Divider::new(self, context, ends.border, budgets);
            let (found, priced) = divider.partitions(&self.extras(context, ends));
            self.priced.fetch_add(priced, Ordering::Relaxed);
            let bound = found.first().map_or(Seconds(f64::INFINITY), |p| p.bound);
            // Bytes a point skips, or a thinned front, may hide a faster division.
            let bound = if divider.exact() { bound } else { Seconds(bound.0.min(ends.bound.0)) };
            let first_bound = *first_bound.get_or_insert(bound);
            if found.is_empty() {
                break;
            }
            match self.best_of(context, ends, found, incumbent, limit) {
                Ok(fitted) => return (Ok(fitted), first_bound),
                Err((stage, needed)) => {
                    refusal = Refusal::Memory { stage: Some(stage), needed, limit };
                    slack[stage] += needed - limit;
                }
            }
        }
        (Err(refusal), Seconds(f64::INFINITY))
    }

    /// Lowers and simulates partitions in the order of their bounds. An arena over the limit is an
    /// error: the stage, and what it needs.
    fn best_of(
        &self,
        context: &Context,
        ends: &Ends,
        found: Vec<Partition>,
        incumbent: f64,
        limit: Bytes,
    ) -> Result<Option<Fitted>, (usize, Bytes)> {
        let mut best: Option<Fitted> = None;
        for partition in found {
            let least = best.as_ref().map_or(incumbent, |fitted| fitted.time.0);
            if partition.bound.0 >= least {
                break;
            }
            let fitted = self.realise(context, ends, partition);
            for (stage, program) in fitted.program.stages.iter().enumerate() {
                if program.arena > limit {
                    return Err((stage, program.arena));
                }
            }
            if fitted.time.0 < least {
                best = Some(fitted);
            }
        }
        Ok(best)
    }

    fn realise(&self, context: &Context, ends: &Ends, partition: Partition) -> Fitted {
        let decided = Decided {
            context: *context,
            border: ends.border,
            embedding: ends.embedding.clone(),
            stages: partition.stages.into_iter().map(|stage| stage.blocks).collect(),
            head: ends.head.clone(),
        };
        let plan = assemble(self.request, &decided);
        let resolved = plan
            .resolve(&self.request.model)
            .unwrap_or_else(|defects| unreachable!("the planner wrote a bad plan: {defects}"));
        let program = lower(&resolved);
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
                let (forward, backward) =
                    hops(self.request.model.hidden, ends.border, stage, context);
                let mut extra =
                    Extra { turn: forward.iter().chain(&backward).map(price).sum(), step: once };
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
        self.turn += solved.time.forward + solved.time.backward;
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

fn block_part(shape: usize, border: EdgeLayout) -> Part {
    Part { kind: SegmentKind::Block, shape, border, tied_weight: None }
}

fn in_flight(context: &Context, stage: usize) -> u64 {
    let microbatches = context.workload.microbatches(&context.mesh);
    slots_in_flight(stage as u64, context.mesh.pipeline, microbatches)
}

/// The fronts of the first n blocks of a run, and whether they had to be thinned.
type RunFronts = Arc<(Vec<Vec<Allotment>>, bool)>;

/// Divides the blocks among stages under their budgets.
struct Divider<'a> {
    fitter: &'a Fitter<'a>,
    context: &'a Context,
    border: EdgeLayout,
    budgets: Vec<Bytes>,
    /// By microbatches in flight and first block (0 when all blocks are alike).
    runs: RefCell<HashMap<(u64, usize), RunFronts>>,
    bound_by_memory: RefCell<bool>,
}

impl<'a> Divider<'a> {
    fn new(
        fitter: &'a Fitter<'a>,
        context: &'a Context,
        border: EdgeLayout,
        budgets: Vec<Bytes>,
    ) -> Self {
        let (runs, bound_by_memory) = (RefCell::default(), RefCell::default());
        Divider { fitter, context, border, budgets, runs, bound_by_memory }
    }

    fn partitions(&self, extras: &[Extra]) -> (Vec<Partition>, u64) {
        let blocks = self.fitter.segments.layer_shapes().len();
        let microbatches = self.context.workload.microbatches(&self.context.mesh);
        let choice = |stage, first, count| self.allot(stage, first, count);
        partitions(blocks, extras, microbatches, &choice)
    }

    /// Whether the division is the best of all, not only of the points on the fronts.
    fn exact(&self) -> bool {
        !*self.bound_by_memory.borrow()
    }

    /// The fastest points for a run of blocks on a stage.
    fn allot(&self, stage: usize, first: usize, count: usize) -> Option<Allotment> {
        let in_flight = in_flight(self.context, stage);
        let budget = self.budgets[stage];
        let shapes = &self.fitter.segments.layer_shapes()[first..first + count];
        let mut fastest = Allotment::default();
        for &shape in shapes {
            let part = block_part(shape, self.border);
            let block = self.fitter.segments.fastest(part, self.context)?;
            fastest.turn += block.time.forward + block.time.backward;
            fastest.step += block.time.step;
            fastest.bytes += block.bytes.total(in_flight);
            fastest.blocks.push(block);
        }
        if fastest.bytes <= budget {
            return Some(fastest);
        }
        *self.bound_by_memory.borrow_mut() = true;
        let fronts = self.run(in_flight, first);
        let microbatches = self.context.workload.microbatches(&self.context.mesh);
        fronts
            .0
            .get(count)?
            .iter()
            .filter(|allotment| allotment.bytes <= budget)
            .min_by(|a, b| a.total(microbatches).0.total_cmp(&b.total(microbatches).0))
            .cloned()
    }

    fn run(&self, in_flight: u64, first: usize) -> RunFronts {
        let segments = self.fitter.segments;
        let first = if segments.shapes() == 1 { 0 } else { first };
        if let Some(known) = self.runs.borrow().get(&(in_flight, first)) {
            return known.clone();
        }
        let fronts: Vec<_> = segments.layer_shapes()[first..]
            .iter()
            .map(|&shape| segments.front(block_part(shape, self.border), self.context, in_flight))
            .collect();
        let microbatches = self.context.workload.microbatches(&self.context.mesh);
        let limit = self.budgets.iter().copied().max().unwrap_or_default();
        let made = Arc::new(run_fronts(&fronts, in_flight, microbatches, limit));
        self.runs.borrow_mut().insert((in_flight, first), made.clone());
        made
    }
}
