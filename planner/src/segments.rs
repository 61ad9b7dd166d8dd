//! Solves segments, once each: blocks of equal shape share a solve.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use narrows_cost_model::Prices;
use narrows_cost_model::memory::{SegmentBytes, segment_bytes};
use narrows_cost_model::segment::{PricedSpace, SegmentTime, decode, segment_time};
use narrows_cost_model::table::{Assignment, CostTable};
use narrows_plan::graph::{
    BlockShape, CarriedTensor, Grouping, Segment, SegmentKind, block_segment, effective_grouping,
    embedding_segment, head_segment,
};
use narrows_plan::model::Model;
use narrows_plan::strategy::{
    BoundaryLayout, Context, SegmentChoice, SegmentSpace, TiedWeight, Zero, borders,
};
use narrows_plan::{Bytes, Kernel};
use rayon::prelude::*;

use crate::deadline::Deadline;
use crate::plans::EliminationOrders;
use crate::request::Request;
use crate::solve::eliminate::{EliminationOrder, MinCostAssignment};
use crate::solve::hull::{Hull, Sweeper};
use crate::solve::{SolveLimits, SolveStatus, exact};

/// A segment's decisions with what they cost.
#[derive(Clone, Debug)]
pub struct SolvedSegment {
    /// Which factors are grouped.
    pub grouping: Grouping,
    /// The decisions.
    pub choice: SegmentChoice,
    /// The op graph they are for.
    pub segment: Arc<Segment>,
    /// Times of one instance.
    pub time: SegmentTime,
    /// Bytes of one instance.
    pub bytes: SegmentBytes,
}

/// Which segment, and how its ends are fixed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SegmentSpec {
    /// Embedding, block or head.
    pub kind: SegmentKind,
    /// For blocks: which shape.
    pub shape: usize,
    /// Layouts of what comes in and goes out.
    pub border: BoundaryLayout,
    /// For tied embeddings and heads: how the weight lies.
    pub tied_weight: Option<TiedWeight>,
}

impl SegmentSpec {
    /// The embedding or the head: no latent crosses there.
    pub fn end(
        kind: SegmentKind,
        border: BoundaryLayout,
        tied_weight: Option<TiedWeight>,
    ) -> SegmentSpec {
        SegmentSpec { kind, shape: 0, border: BoundaryLayout::hidden(border.hidden), tied_weight }
    }
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct SegmentCacheKey {
    part: SegmentSpec,
    context: Context,
    in_flight: Option<u64>,
}

/// The tables of a block's groupings, ready for sweeps.
type Sweepers = Arc<Vec<(Grouping, Arc<Sweeper>)>>;

/// A part's space, ready to be solved in any context that shares its tensor axis and microbatch.
pub(crate) struct PreparedSegment {
    pub(crate) priced: PricedSpace,
    segment: Arc<Segment>,
    /// None when the links are too far from a tree.
    plan: Option<Arc<EliminationOrder>>,
}

/// A hull as far as it is known, with its vertices read back.
struct CachedHull {
    hull: Option<Hull>,
    solved: HashMap<(usize, Assignment), Arc<SolvedSegment>>,
}

/// Solves and remembers.
pub struct SegmentSolver<'a> {
    request: &'a Request,
    shapes: Vec<BlockShape>,
    layer_shapes: Vec<usize>,
    crossing: Vec<u64>,
    carried: Vec<CarriedTensor>,
    fastest: Mutex<HashMap<SegmentCacheKey, Option<Arc<SolvedSegment>>>>,
    steps: Mutex<HashMap<SegmentCacheKey, [f64; 2]>>,
    spaces: Mutex<HashMap<(SegmentSpec, Grouping, Context), Arc<PreparedSegment>>>,
    pub(crate) plans: EliminationOrders,
    sweepers: Mutex<HashMap<SegmentCacheKey, Sweepers>>,
    hulls: Mutex<HashMap<SegmentCacheKey, Arc<Mutex<Option<CachedHull>>>>>,
    deadline: Deadline,
    solves: std::sync::atomic::AtomicU64,
    unproven: std::sync::atomic::AtomicBool,
}

impl<'a> SegmentSolver<'a> {
    /// For one request.
    pub fn new(request: &'a Request, deadline: Deadline) -> Self {
        let layers = BlockShape::all(&request.model);
        let crossing = BlockShape::crossing_widths(&layers);
        let carried = least_carried(&layers, request.model.hidden);
        let mut shapes: Vec<BlockShape> = vec![];
        let layer_shapes = layers
            .into_iter()
            .map(|layer| {
                shapes.iter().position(|shape| *shape == layer).unwrap_or_else(|| {
                    shapes.push(layer);
                    shapes.len() - 1
                })
            })
            .collect();
        SegmentSolver {
            request,
            shapes,
            layer_shapes,
            crossing,
            carried,
            fastest: Mutex::default(),
            steps: Mutex::default(),
            spaces: Mutex::default(),
            plans: EliminationOrders::default(),
            sweepers: Mutex::default(),
            hulls: Mutex::default(),
            deadline,
            solves: Default::default(),
            unproven: Default::default(),
        }
    }

    /// The shape of each layer's block.
    pub fn layer_shapes(&self) -> &[usize] {
        &self.layer_shapes
    }

    /// The layouts that a context and the request's baseline allow between segments.
    pub fn borders(&self, context: &Context) -> Vec<BoundaryLayout> {
        let baseline = self.request.rules.baseline;
        let mut borders = self.all_borders(context);
        borders.retain(|border| context.tensor() == 1 || baseline.allows_border(*border));
        borders
    }

    /// The layouts that a context allows between segments, whatever the request says.
    pub(crate) fn all_borders(&self, context: &Context) -> Vec<BoundaryLayout> {
        borders(self.request.model.hidden, &self.crossing, context)
    }

    /// The least that goes from one block to the next, for pipelines whose cuts are not known yet.
    pub fn carried(&self) -> &[CarriedTensor] {
        &self.carried
    }

    /// When solving must end.
    pub fn deadline(&self) -> &Deadline {
        &self.deadline
    }

    /// Whether there is no time left.
    pub fn is_late(&self) -> bool {
        self.deadline.is_over()
    }

    /// How many shapes there are.
    pub fn shapes(&self) -> usize {
        self.shapes.len()
    }

    /// Integer programs solved so far.
    pub fn solves(&self) -> u64 {
        self.solves.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Whether some solve ended by a limit instead of a proof.
    pub fn has_unproven(&self) -> bool {
        self.unproven.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// The fastest decisions for a segment without a memory limit; `None` when no legal ones exist.
    pub fn fastest(&self, part: SegmentSpec, context: &Context) -> Option<Arc<SolvedSegment>> {
        let key = SegmentCacheKey { part, context: *context, in_flight: None };
        if let Some(known) = lock(&self.fastest).get(&key) {
            return known.clone();
        }
        let solved = self
            .groupings(part)
            .par_iter()
            .filter_map(|grouping| Some((*grouping, self.solve(part, *grouping, context)?)))
            .min_by(|(_, a), (_, b)| a.cost.total_cmp(&b.cost))
            .map(|(grouping, cheapest)| {
                Arc::new(self.finish(part, grouping, context, &cheapest.assignment))
            });
        lock(&self.fastest).insert(key, solved.clone());
        solved
    }

    /// The least forward and backward time of a microbatch, whatever happens once a step and
    /// whatever the memory; `None` when the part has no legal decisions.
    pub fn least_turn(&self, part: SegmentSpec, context: &Context) -> Option<f64> {
        let mut many = *context;
        // A block knows of no stages. Ends do: on two stages, each has a tied weight of its own.
        if part.kind == SegmentKind::Block {
            many.mesh.data *= many.mesh.pipeline;
            many.mesh.pipeline = 1;
        }
        many.zero = Zero::Off;
        many.workload.global_batch = many.mesh.data * many.workload.micro_batch * MANY;
        let part = SegmentSpec { tied_weight: None, ..part };
        let solved = self.fastest(part, &many)?;
        // MANY·t + u is least, so another t' is at least t − (u' − u)/MANY.
        let [_, most] = self.step_range(part, &many);
        let once = (most - solved.time.step.0).max(0.0) / MANY as f64;
        Some((solved.time.forward + solved.time.backward).0 - once)
    }

    /// The least and the most that a part may spend once a step.
    pub fn step_range(&self, part: SegmentSpec, context: &Context) -> [f64; 2] {
        let key = SegmentCacheKey { part, context: *context, in_flight: None };
        if let Some(known) = lock(&self.steps).get(&key) {
            return *known;
        }
        let prices = self.prices(context);
        let price = |kernel: &Kernel| prices.kernel(kernel);
        let mut range = [f64::INFINITY, 0.0_f64];
        for grouping in self.groupings(part) {
            let priced = &self.prepared(part, grouping, context).priced;
            let [least, most] = priced.step_range(context, &price);
            range = [range[0].min(least.0), range[1].max(most.0)];
        }
        lock(&self.steps).insert(key, range);
        range
    }

    /// Points of the lower convex hull of time against bytes of a block with `in_flight`
    /// microbatches, over all groupings, from the fastest to the smallest. The edge over `average`
    /// bytes is among them; without it, every vertex is.
    pub fn hull(
        &self,
        part: SegmentSpec,
        context: &Context,
        in_flight: u64,
        average: Option<Bytes>,
    ) -> Vec<Arc<SolvedSegment>> {
        let key = SegmentCacheKey { part, context: *context, in_flight: Some(in_flight) };
        let known = lock(&self.hulls).entry(key).or_default().clone();
        let mut held = lock(&known);
        let held = held.get_or_insert_with(|| {
            let sweepers = self.sweepers(part, context);
            let sweepers = sweepers.iter().map(|(_, sweeper)| sweeper.clone()).collect();
            // One row is weighted with the microbatches it is there for.
            let hull = Hull::new(sweepers, &[1.0, in_flight as f64]);
            CachedHull { hull, solved: HashMap::new() }
        });
        let Some(hull) = &mut held.hull else { return vec![] };
        let before = hull.sweeps();
        match average {
            Some(bytes) => hull.refine(bytes.as_f64()),
            None => hull.refine_all(),
        }
        let sweeps = hull.sweeps() - before;
        self.solves.fetch_add(sweeps, std::sync::atomic::Ordering::Relaxed);
        let sweepers = self.sweepers(part, context);
        let solved = &mut held.solved;
        hull.vertices()
            .iter()
            .map(|vertex| {
                let known = solved.entry((vertex.table, vertex.assignment.clone()));
                let make = || {
                    Arc::new(self.finish(
                        part,
                        sweepers[vertex.table].0,
                        context,
                        &vertex.assignment,
                    ))
                };
                known.or_insert_with(make).clone()
            })
            .collect()
    }

    /// The tables of all groupings, ready for sweeps.
    fn sweepers(&self, part: SegmentSpec, context: &Context) -> Sweepers {
        let key = SegmentCacheKey { part, context: *context, in_flight: None };
        if let Some(known) = lock(&self.sweepers).get(&key) {
            return known.clone();
        }
        let made: Vec<(Grouping, Arc<Sweeper>)> = self
            .groupings(part)
            .par_iter()
            .filter_map(|grouping| {
                let prepared = self.prepared(part, *grouping, context);
                let Some(plan) = prepared.plan.clone() else {
                    // Its decisions are missing from the hull: what is found is no proof.
                    self.unproven.store(true, std::sync::atomic::Ordering::Relaxed);
                    return None;
                };
                let prices = self.prices(context);
                let price = |kernel: &Kernel| prices.kernel(kernel);
                let table = prepared.priced.table(context, &price, true);
                Some((*grouping, Arc::new(Sweeper::planned(&table, plan))))
            })
            .collect();
        let made = Arc::new(made);
        lock(&self.sweepers).insert(key, made.clone());
        made
    }

    /// The groupings that differ for a part.
    pub(crate) fn groupings(&self, part: SegmentSpec) -> Vec<Grouping> {
        if part.kind != SegmentKind::Block {
            return vec![Grouping::ALL[0]];
        }
        let mut made = vec![];
        for wanted in self.request.grouping.groupings() {
            let grouping = effective_grouping(&self.shapes[part.shape], *wanted);
            if !made.contains(&grouping) {
                made.push(grouping);
            }
        }
        made
    }

    /// The op graph of a part.
    pub fn segment(&self, part: SegmentSpec, grouping: Grouping) -> Segment {
        let model: &Model = &self.request.model;
        match part.kind {
            SegmentKind::Embedding => embedding_segment(model),
            SegmentKind::Block => block_segment(model, &self.shapes[part.shape], grouping),
            SegmentKind::Head => head_segment(model),
        }
    }

    /// The space of a part, priced for its tensor axis and microbatch.
    pub(crate) fn prepared(
        &self,
        part: SegmentSpec,
        grouping: Grouping,
        context: &Context,
    ) -> Arc<PreparedSegment> {
        let mut shared = *context;
        // Neither the microbatches of a step nor ZeRO nor the stages show in a microbatch's times.
        shared.mesh.data *= shared.mesh.pipeline;
        shared.mesh.pipeline = 1;
        shared.zero = Zero::Off;
        shared.workload.global_batch = shared.mesh.data * shared.workload.micro_batch;
        let key = (part, grouping, shared);
        if let Some(known) = lock(&self.spaces).get(&key) {
            return known.clone();
        }
        let segment = self.segment(part, grouping);
        let tied = self.request.model.tied;
        let rules = &self.request.rules;
        let space = SegmentSpace::new(segment, part.border, shared, rules, tied, part.tied_weight);
        let prices = self.prices(&shared);
        let priced = PricedSpace::new(space, &|kernel: &Kernel| prices.kernel(kernel));
        let plan =
            self.plans.plan((SegmentSpec { shape: 0, ..part }, grouping, shared.tensor()), &priced);
        let segment = Arc::new(priced.space.segment.clone());
        let made = Arc::new(PreparedSegment { priced, segment, plan });
        lock(&self.spaces).insert(key, made.clone());
        made
    }

    fn prices(&self, context: &Context) -> Prices {
        Prices::new(&self.request.profile, self.request.executor, &context.mesh)
    }

    fn solve(
        &self,
        part: SegmentSpec,
        grouping: Grouping,
        context: &Context,
    ) -> Option<MinCostAssignment> {
        let prepared = self.prepared(part, grouping, context);
        let prices = self.prices(context);
        let price = |kernel: &Kernel| prices.kernel(kernel);
        self.solves.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        match &prepared.plan {
            Some(plan) => plan.cheapest(&prepared.priced.times(context, &price)),
            None => self.solve_wide(&prepared.priced.table(context, &price, false)),
        }
    }

    /// Solves a table that is too wide for elimination.
    fn solve_wide(&self, table: &CostTable) -> Option<MinCostAssignment> {
        let limits = SolveLimits { time: self.deadline.left(), gap: 0.0 };
        let outcome = exact(table, &limits).ok()?;
        if !matches!(outcome.status, SolveStatus::Optimal | SolveStatus::Infeasible) {
            self.unproven.store(true, std::sync::atomic::Ordering::Relaxed);
        }
        let assignment = outcome.assignment?;
        Some(MinCostAssignment { cost: table.time(&assignment).0, assignment })
    }

    fn finish(
        &self,
        part: SegmentSpec,
        grouping: Grouping,
        context: &Context,
        assignment: &[u32],
    ) -> SolvedSegment {
        let prepared = self.prepared(part, grouping, context);
        let prices = self.prices(context);
        let space = &prepared.priced.space;
        let choice = decode(space, assignment);
        let time = segment_time(space, context, &choice, &|kernel: &Kernel| prices.kernel(kernel));
        let bytes = segment_bytes(space, context, &choice);
        SolvedSegment { grouping, choice, segment: prepared.segment.clone(), time, bytes }
    }
}

/// Microbatches of a bounding solve: so many that once-a-step work does not decide.
pub(crate) const MANY: u64 = 1 << 20;

fn least_carried(layers: &[BlockShape], hidden: u64) -> Vec<CarriedTensor> {
    let inner = &layers[..layers.len() - 1];
    let width =
        |carried: &Vec<CarriedTensor>| carried.iter().map(|tensor| tensor.width).sum::<u64>();
    inner.iter().map(|layer| layer.carried(hidden)).min_by_key(width).unwrap_or_default()
}

/// What the lock guards: a panic elsewhere cannot leave a map half-changed.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
