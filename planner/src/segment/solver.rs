//! The segments of one request: built, priced, and shared where other requests need the same.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use narrows_cost_model::{OpTimes, PricedSpace, Prices, StepPhases};
use narrows_plan::graph::{
    BoundaryTensor, Grouping, Segment, SegmentKind, block_segment, effective_grouping,
    embedding_segment, head_segment,
};
use narrows_plan::model::Model;
use narrows_plan::strategy::{AlternativesContext, BoundaryLayout, SegmentSpace, boundary_layouts};
use narrows_plan::{Context, Kernel, Seconds};
use rustc_hash::FxHashMap;

use super::cache::{AlternativesCache, FastestSolution, PricedCache, SegmentCache};
use super::hull_cache::Hulls;
use super::keys::{StepKey, ops_key};
use super::model_layers::ModelLayers;
use super::pair_prices::{PairPrices, PassWork};
use super::prepared::PreparedSegment;
use super::spec::SegmentSpec;
use crate::deadline::Deadline;
use crate::lock::lock;
use crate::lowered_plans::LoweredPlans;
use crate::request::Request;
use crate::solve::{SolveMethod, TableSolves};

/// Solves the segments of one request.
pub struct SegmentSolver<'a> {
    pub(super) request: &'a Request,
    cache: SegmentCache,
    layers: Arc<ModelLayers>,
    pub(super) alternatives: Arc<AlternativesCache>,
    pub(super) priced: Arc<PricedCache>,
    /// Prices of meshes without and with a tensor axis.
    prices: [Arc<Prices>; 2],
    /// The same segments with [`Prices::with_fast_inter_node_links`], where these differ.
    fast_inter_node: Option<Box<SegmentSolver<'a>>>,
    pair_prices: PairPrices,
    /// Fastest solutions that no proof covers. They stay with their search.
    pub(super) unproven: Mutex<FxHashMap<(SegmentSpec, StepKey), FastestSolution>>,
    pub(super) hulls: Hulls,
    deadline: Deadline,
    solve_count: AtomicU64,
    pub(super) table_solves: Mutex<BTreeMap<SolveMethod, TableSolves>>,
    failed_solves: AtomicU64,
    has_unproven: AtomicBool,
}

impl<'a> SegmentSolver<'a> {
    /// A solver with empty caches.
    pub fn new(request: &'a Request, deadline: Deadline) -> Self {
        SegmentSolver::with_cache(request, deadline, &SegmentCache::default())
    }

    /// A solver that shares tables and solutions with others.
    pub(crate) fn with_cache(
        request: &'a Request,
        deadline: Deadline,
        cache: &SegmentCache,
    ) -> Self {
        let cache = cache.clone();
        let (alternatives, priced) = cache.of_request(request);
        let prices = [false, true].map(|has_tensor_axis| priced.prices(request, has_tensor_axis));
        let fast = prices.each_ref().map(|prices| prices.fast_inter_node.clone());
        let fast_prices = match fast {
            [Some(without_axis), Some(with_axis)] => Some([without_axis, with_axis]),
            _ => None,
        };
        let mut solver = SegmentSolver {
            request,
            cache,
            layers: Arc::new(ModelLayers::new(&request.model, request.sequence_length)),
            alternatives,
            priced,
            prices: prices.map(|prices| prices.own),
            fast_inter_node: None,
            pair_prices: PairPrices::default(),
            unproven: Mutex::default(),
            hulls: Hulls::default(),
            deadline,
            solve_count: AtomicU64::default(),
            table_solves: Mutex::default(),
            failed_solves: AtomicU64::default(),
            has_unproven: AtomicBool::default(),
        };
        solver.fast_inter_node = fast_prices.map(|prices| {
            Box::new(solver.with_prices(prices, solver.priced.clone(), PairPrices::default()))
        });
        solver
    }

    /// The same segments with other prices, tables of these, and counters of their own.
    fn with_prices(
        &self,
        prices: [Arc<Prices>; 2],
        priced: Arc<PricedCache>,
        pair_prices: PairPrices,
    ) -> SegmentSolver<'a> {
        SegmentSolver {
            request: self.request,
            cache: self.cache.clone(),
            layers: self.layers.clone(),
            alternatives: self.alternatives.clone(),
            priced,
            prices,
            fast_inter_node: None,
            pair_prices,
            unproven: Mutex::default(),
            hulls: Hulls::default(),
            deadline: self.deadline.clone(),
            solve_count: AtomicU64::default(),
            table_solves: Mutex::default(),
            failed_solves: AtomicU64::default(),
            has_unproven: AtomicBool::default(),
        }
    }

    /// The same segments with other prices of kernels in pairs of microbatches.
    pub(crate) fn with_pair_prices(&self, pair_prices: PairPrices) -> SegmentSolver<'a> {
        self.with_prices(self.prices.clone(), Arc::default(), pair_prices)
    }

    /// The same segments where the tensor or context axis of a context spans nodes, with links between nodes that are as fast
    /// as those inside a node. Bounds from them hold for the context, and are the same for all slower links. `None` where they
    /// would not differ.
    pub(crate) fn with_fast_inter_node_links(
        &self,
        context: &Context,
    ) -> Option<&SegmentSolver<'a>> {
        let fast = self.fast_inter_node.as_deref()?;
        (fast.pass_key(context) != self.pass_key(context)).then_some(fast)
    }

    /// Index of each layer's block shape.
    pub fn layer_shapes(&self) -> &[usize] {
        &self.layers.layer_shapes
    }

    /// Number of parameters of the model.
    pub(crate) fn parameters(&self) -> u64 {
        self.layers.parameters
    }

    /// FLOPs of one sequence, forward and backward.
    pub(crate) fn sequence_flops(&self) -> f64 {
        self.layers.sequence_flops
    }

    /// Number of parameters of a block on average, rounded down.
    pub(crate) fn block_parameters(&self) -> u64 {
        self.layers.block_parameters
    }

    /// Least number of parameters of the linears of a block, without those of crossing latents.
    pub(crate) fn block_parameters_min(&self) -> u64 {
        self.layers.block_parameters_min
    }

    /// The value of each layer, computed once for each block shape.
    pub(crate) fn of_layers<T: Clone>(&self, of_shape: impl Fn(usize) -> T) -> Vec<T> {
        let shapes: Vec<T> = (0..self.layers.shapes.len()).map(of_shape).collect();
        self.layers.layer_shapes.iter().map(|shape| shapes[*shape].clone()).collect()
    }

    /// Number of distinct block shapes.
    pub(crate) fn shape_count(&self) -> usize {
        self.layers.shapes.len()
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
        boundary_layouts(self.request.model.hidden, &self.layers.crossing_widths, context)
    }

    /// The narrowest set of tensors between two neighbouring blocks: a lower bound on the transfers at a stage
    /// boundary whose position is not known yet.
    pub(crate) fn narrowest_carried(&self) -> &[BoundaryTensor] {
        &self.layers.narrowest_carried
    }

    /// A solver for a similar request, with the same deadline, that shares tables and solutions where the requests
    /// are equal.
    pub(crate) fn for_request<'b>(&self, request: &'b Request) -> SegmentSolver<'b> {
        SegmentSolver::with_cache(request, self.deadline.clone(), &self.cache)
    }

    /// Lowered plans of this and other searches.
    pub(crate) fn lowered(&self) -> &LoweredPlans {
        self.cache.lowered()
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

    /// The times of a segment's ops in the step phase of a context.
    pub(super) fn step_phases(
        &self,
        prepared: &PreparedSegment,
        (spec, grouping): (SegmentSpec, Grouping),
        context: &Context,
    ) -> Arc<StepPhases> {
        let key = (ops_key(spec, grouping), self.step_phase_key(spec, context));
        if let Some(cached) = lock(&self.priced.step_phases).get(&key) {
            return cached.clone();
        }
        let kernel_price = self.price(context);
        let prices = self.prices(context).streams(&kernel_price);
        let step_phases = StepPhases::new(&prepared.priced.space, context, prices);
        let step_phases = Arc::new(step_phases);
        lock(&self.priced.step_phases).insert(key, step_phases.clone());
        step_phases
    }

    /// The groupings that lead to different op graphs.
    pub(super) fn groupings(&self, spec: SegmentSpec) -> Vec<Grouping> {
        if spec.kind != SegmentKind::Block {
            return vec![Grouping::ALL[0]];
        }
        let mut groupings = vec![];
        for requested in self.request.grouping.groupings() {
            let grouping = effective_grouping(&self.layers.shapes[spec.shape], *requested);
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
            SegmentKind::Block => block_segment(model, &self.layers.shapes[spec.shape], grouping),
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
        let pass_key = self.pass_key(context);
        let (shared, _) = pass_key;
        let key = (spec, grouping, pass_key);
        if let Some(cached) = lock(&self.priced.prepared).get(&key) {
            return cached.clone();
        }
        let ops_key = (ops_key(spec, grouping), pass_key);
        let op_times = lock(&self.priced.op_times).get(&ops_key).cloned();
        let alternatives_key = (spec, grouping, AlternativesContext::of(&shared));
        let similar = lock(&self.alternatives.prepared).get(&alternatives_key).cloned();
        let [forward, backward, recompute] = self.pass_prices(context);
        let prices = self.prices(context).streams(&forward).with_backward(&backward, &recompute);
        let prepared = match similar {
            Some(similar) => {
                let priced = similar.priced.in_context(shared, op_times, prices);
                PreparedSegment::new(priced, similar.order.clone())
            }
            None => {
                let space = self.space(spec, grouping, shared);
                let priced = PricedSpace::new(space, op_times, prices);
                let order_key = (SegmentSpec { shape: 0, ..spec }, grouping);
                let order = self.alternatives.elimination_orders.order(order_key, &priced);
                PreparedSegment::new(priced, order)
            }
        };
        let prepared = Arc::new(prepared);
        let alternatives = &self.alternatives.prepared;
        lock(alternatives).entry(alternatives_key).or_insert_with(|| prepared.clone());
        lock(&self.priced.op_times).entry(ops_key).or_insert_with(|| prepared.priced.op_times());
        lock(&self.priced.prepared).insert(key, prepared.clone());
        prepared
    }

    /// The times of a segment's ops for one microbatch, whatever its boundary layout.
    pub(super) fn op_times(
        &self,
        spec: SegmentSpec,
        grouping: Grouping,
        context: &Context,
    ) -> OpTimes {
        let pass_key = self.pass_key(context);
        let key = (ops_key(spec, grouping), pass_key);
        if let Some(cached) = lock(&self.priced.op_times).get(&key) {
            return cached.clone();
        }
        let [forward, backward, recompute] = self.pass_prices(&pass_key.0);
        let prices = self.prices(context).streams(&forward).with_backward(&backward, &recompute);
        let times = OpTimes::new(&self.space(spec, grouping, pass_key.0), prices);
        lock(&self.priced.op_times).entry(key).or_insert(times).clone()
    }

    /// The alternatives of a segment.
    fn space(&self, spec: SegmentSpec, grouping: Grouping, context: Context) -> SegmentSpace {
        let key = (spec, grouping, AlternativesContext::of(&context));
        if let Some(similar) = lock(&self.alternatives.spaces).get(&key) {
            return similar.in_context(context);
        }
        let Request { model, rules, .. } = self.request;
        let segment = Arc::new(self.segment(spec, grouping));
        let (boundary, tied) = (spec.boundary, spec.tied_weight);
        let space = SegmentSpace::new(segment, boundary, context, rules, model.tied, tied);
        lock(&self.alternatives.spaces).entry(key).or_insert(space).in_context(context)
    }

    /// Prices of a context's mesh.
    pub(crate) fn prices(&self, context: &Context) -> &Prices {
        &self.prices[usize::from(context.mesh.tensor > 1)]
    }

    pub(super) fn price(&self, context: &Context) -> impl Fn(&Kernel) -> Seconds + Sync {
        |kernel| self.prices(context).kernel_time(kernel)
    }

    /// Prices of kernels in forward and in backward passes, and of those that recompute values in the latter. Where passes run two
    /// microbatches, a collective of one overlaps with the computation of the other: how much of that there is depends on all choices.
    pub(super) fn pass_prices(&self, context: &Context) -> [impl Fn(&Kernel) -> Seconds + Sync; 3] {
        let prices = self.prices(context);
        let slowdown = prices.overlap_slowdown().filter(|_| context.overlap_microbatch_pairs);
        [PassWork::Forward, PassWork::Backward, PassWork::Recompute].map(|work| {
            move |kernel: &Kernel| match slowdown {
                Some(slowdown) => self.pair_prices.kernel_time(kernel, work, slowdown, prices),
                None => prices.kernel_time(kernel),
            }
        })
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
