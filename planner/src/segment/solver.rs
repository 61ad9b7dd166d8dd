//! Solves segments and caches the solutions: blocks of equal shape share one.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use narrows_cost_model::{
    Assignment, CostTable, MemoryRow, MemoryRowId, MemoryRows, PricedSpace, Prices, StepPhases,
    decode_assignment, segment_bytes, segment_time,
};
use narrows_plan::graph::{
    BlockShape, BoundaryTensor, Grouping, Segment, SegmentKind, block_segment, effective_grouping,
    embedding_segment, head_segment,
};
use narrows_plan::model::Model;
use narrows_plan::strategy::{BoundaryLayout, SegmentSpace, boundary_layouts};
use narrows_plan::{Bytes, Context, Kernel, Seconds, Zero};
use rayon::prelude::*;

use super::cache::{AlternativesCache, FastestSolution, PricedCache, SearchCache};
use super::elimination_orders::lock;
use super::hulls::Hulls;
use super::prepared::PreparedSegment;
use super::spec::{SegmentSpec, SolvedSegment};
use crate::arenas::ArenaCache;
use crate::deadline::Deadline;
use crate::report::TableSolves;
use crate::request::Request;
use crate::solve::{MinCostAssignment, SolveLimits, SolveMethod, SolveOutcome, solve_table};

/// Microbatches of a solve that minimises the microbatch time: so many that the step phase hardly counts.
pub(crate) const ASYMPTOTIC_MICROBATCHES: u64 = 1 << 20;

/// The fastest assignment of one grouping; `None` without one, or when the solver failed.
struct GroupingSolve {
    cheapest: Option<MinCostAssignment>,
    is_proven: bool,
}

/// Solves the segments of one request.
pub struct SegmentSolver<'a> {
    request: &'a Request,
    cache: SearchCache,
    /// The distinct block shapes.
    shapes: Vec<BlockShape>,
    layer_shapes: Vec<usize>,
    crossing_widths: Vec<u64>,
    narrowest_carried: Vec<BoundaryTensor>,
    pub(super) alternatives: Arc<AlternativesCache>,
    pub(super) priced: Arc<PricedCache>,
    /// Fastest solutions that no proof covers. They stay with their search.
    unproven: Mutex<HashMap<(SegmentSpec, Context), FastestSolution>>,
    pub(super) hulls: Hulls,
    deadline: Deadline,
    solve_count: AtomicU64,
    table_solves: Mutex<BTreeMap<SolveMethod, TableSolves>>,
    failed_solves: AtomicU64,
    has_unproven: AtomicBool,
}

impl<'a> SegmentSolver<'a> {
    /// A solver with empty caches.
    pub fn new(request: &'a Request, deadline: Deadline) -> Self {
        SegmentSolver::with_cache(request, deadline, &SearchCache::default())
    }

    /// A solver that shares tables and solutions with others.
    pub(crate) fn with_cache(
        request: &'a Request,
        deadline: Deadline,
        cache: &SearchCache,
    ) -> Self {
        let cache = cache.clone();
        let (alternatives, priced) = cache.of_request(request);
        let layers = BlockShape::all(&request.model);
        let crossing_widths = BlockShape::crossing_widths(&layers);
        let narrowest_carried = narrowest_carried(&layers, request.model.hidden);
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
            cache,
            shapes,
            layer_shapes,
            crossing_widths,
            narrowest_carried,
            alternatives,
            priced,
            unproven: Mutex::default(),
            hulls: Hulls::default(),
            deadline,
            solve_count: AtomicU64::default(),
            table_solves: Mutex::default(),
            failed_solves: AtomicU64::default(),
            has_unproven: AtomicBool::default(),
        }
    }

    /// Index of each layer's block shape.
    pub fn layer_shapes(&self) -> &[usize] {
        &self.layer_shapes
    }

    /// Number of distinct block shapes.
    pub(crate) fn shape_count(&self) -> usize {
        self.shapes.len()
    }

    /// Boundary layouts that a context and the request's baseline allow.
    pub fn boundary_layouts(&self, context: &Context) -> Vec<BoundaryLayout> {
        let baseline = self.request.rules.baseline;
        let mut boundaries = self.unrestricted_boundary_layouts(context);
        boundaries
            .retain(|boundary| context.tensor_size() == 1 || baseline.allows_boundary(*boundary));
        boundaries
    }

    /// Boundary layouts that a context allows under any baseline.
    fn unrestricted_boundary_layouts(&self, context: &Context) -> Vec<BoundaryLayout> {
        boundary_layouts(self.request.model.hidden, &self.crossing_widths, context)
    }

    /// The narrowest set of tensors between two neighbouring blocks: a lower bound on the transfers at a stage
    /// boundary whose position is not known yet.
    pub(crate) fn narrowest_carried(&self) -> &[BoundaryTensor] {
        &self.narrowest_carried
    }

    /// A solver for a similar request, with the same deadline, that shares tables and solutions where the requests
    /// are equal.
    pub(crate) fn for_request<'b>(&self, request: &'b Request) -> SegmentSolver<'b> {
        SegmentSolver::with_cache(request, self.deadline.clone(), &self.cache)
    }

    /// Arenas of plans, of this and other searches.
    pub(crate) fn arenas(&self) -> &ArenaCache {
        self.cache.arenas()
    }

    /// The deadline of the search.
    pub(crate) fn deadline(&self) -> &Deadline {
        &self.deadline
    }

    /// Whether the deadline has passed.
    pub(crate) fn out_of_time(&self) -> bool {
        self.deadline.is_over()
    }

    /// Segments solved so far.
    pub(crate) fn solve_count(&self) -> u64 {
        self.solve_count.load(Ordering::Relaxed)
    }

    /// Counts solves of segments.
    pub(super) fn count_solves(&self, solves: u64) {
        self.solve_count.fetch_add(solves, Ordering::Relaxed);
    }

    /// Number of solves of cost tables by the method that ended each.
    pub(crate) fn table_solves(&self) -> BTreeMap<SolveMethod, TableSolves> {
        lock(&self.table_solves).clone()
    }

    /// Number of integer programs that the library failed to solve.
    pub(crate) fn failed_solves(&self) -> u64 {
        self.failed_solves.load(Ordering::Relaxed)
    }

    /// Counts an integer program that the library failed to solve.
    pub(crate) fn count_failed_solve(&self) {
        self.failed_solves.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether some solve ended by a limit or a failure instead of a proof.
    pub(crate) fn has_unproven(&self) -> bool {
        self.has_unproven.load(Ordering::Relaxed)
    }

    /// Records a solve that ended by a limit or a failure instead of a proof.
    pub(super) fn record_unproven(&self) {
        self.has_unproven.store(true, Ordering::Relaxed);
    }

    /// The fastest solution without a memory limit; `None` when the segment has no legal decisions.
    pub fn fastest(&self, spec: SegmentSpec, context: &Context) -> Option<Arc<SolvedSegment>> {
        let key = (spec, *context);
        if let Some(cached) = lock(&self.priced.fastest).get(&key) {
            return cached.clone();
        }
        if let Some(cached) = lock(&self.unproven).get(&key) {
            return cached.clone();
        }
        let is_proven = AtomicBool::new(true);
        let solved = self
            .groupings(spec)
            .par_iter()
            .filter_map(|grouping| {
                let solve = self.solve(spec, *grouping, context);
                is_proven.fetch_and(solve.is_proven, Ordering::Relaxed);
                Some((*grouping, solve.cheapest?))
            })
            .min_by(|(_, a), (_, b)| a.cost.total_cmp(&b.cost))
            .map(|(grouping, cheapest)| {
                Arc::new(self.solution(spec, grouping, context, &cheapest.assignment))
            });
        let solutions = match is_proven.into_inner() {
            true => &self.priced.fastest,
            false => &self.unproven,
        };
        lock(solutions).insert(key, solved.clone());
        solved
    }

    /// The context with so many microbatches that minimising the step minimises the microbatch time.
    pub(crate) fn asymptotic(context: &Context) -> Context {
        let mut many = *context;
        many.workload.global_batch =
            many.mesh.data * many.workload.micro_batch * ASYMPTOTIC_MICROBATCHES;
        many
    }

    /// Lower bound on the forward and backward time of one microbatch, for any step phase and without a memory
    /// limit; `None` when the segment has no legal decisions.
    pub(crate) fn min_microbatch_time(&self, spec: SegmentSpec, context: &Context) -> Option<f64> {
        let mut many = Self::asymptotic(context);
        // Blocks do not depend on the number of stages. Embedding and head do: on two stages they have two
        // copies of a tied weight.
        if spec.kind == SegmentKind::Block {
            many.mesh.data *= many.mesh.pipeline;
            many.mesh.pipeline = 1;
        }
        many.zero = Zero::Off;
        many.workload.global_batch =
            many.mesh.data * many.workload.micro_batch * ASYMPTOTIC_MICROBATCHES;
        let spec = SegmentSpec { tied_weight: None, ..spec };
        let solved = self.fastest(spec, &many)?;
        // With M microbatches M·t + u is minimal, so any other t' is at least t − (u' − u)/M.
        let [_, step_max] = self.step_phase_range(spec, &many);
        let once = (step_max - solved.time.step_phase.0).max(0.0) / ASYMPTOTIC_MICROBATCHES as f64;
        Some((solved.time.forward + solved.time.backward).0 - once)
    }

    /// Bounds on the time of a segment in the step phase: `[min, max]` in seconds.
    pub(crate) fn step_phase_range(&self, spec: SegmentSpec, context: &Context) -> [f64; 2] {
        let key = (spec, *context);
        if let Some(cached) = lock(&self.priced.step_phase_ranges).get(&key) {
            return *cached;
        }
        let mut range = [f64::INFINITY, 0.0_f64];
        for grouping in self.groupings(spec) {
            let prepared = self.prepare(spec, grouping, context);
            let [min, max] = self.step_phases(&prepared, (spec, grouping), context).bounds();
            range = [range[0].min(min.0), range[1].max(max.0)];
        }
        lock(&self.priced.step_phase_ranges).insert(key, range);
        range
    }

    /// The times of a segment's ops in the step phase of a context.
    fn step_phases(
        &self,
        prepared: &PreparedSegment,
        (spec, grouping): (SegmentSpec, Grouping),
        context: &Context,
    ) -> Arc<StepPhases> {
        let key = (spec.kind, spec.shape, spec.tied_weight, grouping, *context);
        if let Some(cached) = lock(&self.priced.step_phases).get(&key) {
            return cached.clone();
        }
        let step_phases = StepPhases::new(&prepared.priced.space, context, &self.price());
        let step_phases = Arc::new(step_phases);
        lock(&self.priced.step_phases).insert(key, step_phases.clone());
        step_phases
    }

    /// The cost table of a segment in a context.
    pub(super) fn table(
        &self,
        prepared: &PreparedSegment,
        segment: (SegmentSpec, Grouping),
        context: &Context,
        rows: MemoryRows,
    ) -> CostTable {
        let step_phases = self.step_phases(prepared, segment, context);
        prepared.priced.table(context, &step_phases, rows)
    }

    /// The fastest solution of one grouping with at most `limit` bytes, solved exactly; `None` without one.
    pub(crate) fn fastest_within(
        &self,
        spec: SegmentSpec,
        context: &Context,
        in_flight: u64,
        grouping: Grouping,
        limit: Bytes,
    ) -> Option<Arc<SolvedSegment>> {
        let prepared = self.prepare(spec, grouping, context);
        let rows = MemoryRows::ResidentAndKept;
        let with_memory_rows = self.table(&prepared, (spec, grouping), context, rows);
        let table = within_one_row(with_memory_rows, &[1, in_flight], limit);
        let limits = SolveLimits { time: self.deadline.remaining(), gap: 0.0 };
        self.count_solves(1);
        let assignment = self.solve_table(&table, &limits)?.assignment?;
        Some(Arc::new(self.solution(spec, grouping, context, &assignment)))
    }

    /// The groupings that lead to different op graphs.
    pub(super) fn groupings(&self, spec: SegmentSpec) -> Vec<Grouping> {
        if spec.kind != SegmentKind::Block {
            return vec![Grouping::ALL[0]];
        }
        let mut groupings = vec![];
        for requested in self.request.grouping.groupings() {
            let grouping = effective_grouping(&self.shapes[spec.shape], *requested);
            if !groupings.contains(&grouping) {
                groupings.push(grouping);
            }
        }
        groupings
    }

    /// The op graph of a segment.
    pub(crate) fn segment(&self, spec: SegmentSpec, grouping: Grouping) -> Segment {
        let model: &Model = &self.request.model;
        match spec.kind {
            SegmentKind::Embedding => embedding_segment(model),
            SegmentKind::Block => block_segment(model, &self.shapes[spec.shape], grouping),
            SegmentKind::Head => head_segment(model),
        }
    }

    /// The space of a segment, priced for the context's tensor axis and microbatch.
    pub(super) fn prepare(
        &self,
        spec: SegmentSpec,
        grouping: Grouping,
        context: &Context,
    ) -> Arc<PreparedSegment> {
        let mut shared = *context;
        // The time of a microbatch does not depend on the number of microbatches, on ZeRO, or on the number
        // of stages.
        shared.mesh.data *= shared.mesh.pipeline;
        shared.mesh.pipeline = 1;
        shared.zero = Zero::Off;
        shared.workload.global_batch = shared.mesh.data * shared.workload.micro_batch;
        let key = (spec, grouping, shared);
        if let Some(cached) = lock(&self.priced.prepared).get(&key) {
            return cached.clone();
        }
        let ops_key = (spec.kind, spec.shape, spec.tied_weight, grouping, shared);
        let op_times = lock(&self.priced.op_times).get(&ops_key).cloned();
        let alternatives_key = (spec, grouping, shared.tensor_size(), shared.token_dim());
        let similar = lock(&self.alternatives.prepared).get(&alternatives_key).cloned();
        let prepared = match similar {
            Some(similar) => {
                let priced = similar.priced.in_context(shared, op_times, &self.price());
                PreparedSegment { priced, order: similar.order.clone() }
            }
            None => {
                let space = self.space(spec, grouping, shared);
                let priced = PricedSpace::new(space, op_times, &self.price());
                let order_key = (SegmentSpec { shape: 0, ..spec }, grouping);
                let order = self.alternatives.elimination_orders.order(order_key, &priced);
                PreparedSegment { priced, order }
            }
        };
        let prepared = Arc::new(prepared);
        let alternatives = &self.alternatives.prepared;
        lock(alternatives).entry(alternatives_key).or_insert_with(|| prepared.clone());
        lock(&self.priced.op_times).entry(ops_key).or_insert_with(|| prepared.priced.op_times());
        lock(&self.priced.prepared).insert(key, prepared.clone());
        prepared
    }

    /// The alternatives of a segment.
    fn space(&self, spec: SegmentSpec, grouping: Grouping, context: Context) -> SegmentSpace {
        let Request { model, rules, .. } = self.request;
        let segment = Arc::new(self.segment(spec, grouping));
        SegmentSpace::new(segment, spec.boundary, context, rules, model.tied, spec.tied_weight)
    }

    /// Prices of all meshes of the request.
    pub(crate) fn prices(&self) -> &Prices {
        &self.priced.prices
    }

    fn price(&self) -> impl Fn(&Kernel) -> Seconds + Sync {
        |kernel| self.prices().kernel_time(kernel)
    }

    fn solve(&self, spec: SegmentSpec, grouping: Grouping, context: &Context) -> GroupingSolve {
        let prepared = self.prepare(spec, grouping, context);
        self.count_solves(1);
        let step_phases = self.step_phases(&prepared, (spec, grouping), context);
        match &prepared.order {
            Some(order) => GroupingSolve {
                cheapest: order.cheapest(&prepared.priced.times(context, &step_phases)),
                is_proven: true,
            },
            None => {
                self.solve_wide(&prepared.priced.table(context, &step_phases, MemoryRows::None))
            }
        }
    }

    /// Solves a table that is too wide for elimination.
    fn solve_wide(&self, table: &CostTable) -> GroupingSolve {
        let limits = SolveLimits { time: self.deadline.remaining(), gap: 0.0 };
        let outcome = self.solve_table(table, &limits);
        let is_proven = outcome.as_ref().is_some_and(SolveOutcome::is_proven);
        if !is_proven {
            self.record_unproven();
        }
        let assignment = outcome.and_then(|outcome| outcome.assignment);
        let cost = |assignment: Assignment| MinCostAssignment {
            cost: table.time(&assignment).0,
            assignment,
        };
        GroupingSolve { cheapest: assignment.map(cost), is_proven }
    }

    /// Solves a table and counts the method that ended the solve, or the failure; `None` when the solver failed.
    fn solve_table(&self, table: &CostTable, limits: &SolveLimits) -> Option<SolveOutcome> {
        let Ok(outcome) = solve_table(table, limits) else {
            self.count_failed_solve();
            return None;
        };
        let mut solves = lock(&self.table_solves);
        let solves = solves.entry(outcome.method).or_default();
        match outcome.is_proven() {
            true => solves.proven += 1,
            false => solves.limited += 1,
        }
        Some(outcome)
    }

    /// The solution for an assignment of the cost table.
    pub(super) fn solution(
        &self,
        spec: SegmentSpec,
        grouping: Grouping,
        context: &Context,
        assignment: &[u32],
    ) -> SolvedSegment {
        let prepared = self.prepare(spec, grouping, context);
        let space = &prepared.priced.space;
        let choice = decode_assignment(space, assignment);
        let time = segment_time(space, context, &choice, &self.price());
        let bytes = segment_bytes(space, context, &choice);
        SolvedSegment { grouping, choice, segment: space.segment.clone(), time, bytes }
    }

    /// Names of block ops without any legal strategy in a context.
    pub(crate) fn ops_without_strategy(&self, context: &Context) -> Vec<String> {
        let mut names = vec![];
        let mut boundaries = self.boundary_layouts(context);
        if boundaries.is_empty() {
            // The baseline allows no boundary layout; its ops fail for the same reason under any layout.
            boundaries = self.unrestricted_boundary_layouts(context);
        }
        for boundary in boundaries {
            for spec in (0..self.shape_count()).map(|shape| SegmentSpec::block(shape, boundary)) {
                for grouping in self.groupings(spec) {
                    let prepared = self.prepare(spec, grouping, context);
                    let space = &prepared.priced.space;
                    let ops = space.segment.op_ids();
                    let without = ops.filter(|op| space.ops[op.0 as usize].is_empty());
                    names.extend(without.map(|op| space.segment.op(op).name.clone()));
                }
            }
        }
        names.sort();
        names.dedup();
        names
    }
}

/// The table with its memory rows replaced by their weighted sum, limited to `limit`.
fn within_one_row(mut table: CostTable, weights: &[u64], limit: Bytes) -> CostTable {
    for choice in table.nodes.iter_mut().flat_map(|node| &mut node.choices) {
        let weighted = |(row, bytes): &(MemoryRowId, Bytes)| *bytes * weights[row.0 as usize];
        let bytes: Bytes = choice.bytes.iter().map(weighted).sum();
        choice.bytes = if bytes.0 > 0 { vec![(MemoryRowId(0), bytes)] } else { vec![] };
    }
    table.rows = vec![MemoryRow { name: "block".into(), limit }];
    table
}

/// The narrowest set of tensors between two neighbouring blocks.
fn narrowest_carried(layers: &[BlockShape], hidden: u64) -> Vec<BoundaryTensor> {
    let inner = &layers[..layers.len() - 1];
    let width =
        |carried: &Vec<BoundaryTensor>| carried.iter().map(|tensor| tensor.width).sum::<u64>();
    inner.iter().map(|layer| layer.outgoing_tensors(hidden)).min_by_key(width).unwrap_or_default()
}
