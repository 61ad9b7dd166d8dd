//! Solves segments: the fastest solutions, with and without a memory limit.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use narrows_cost_model::{
    Assignment, CostTable, InFlight, MemoryRow, MemoryRowId, MemoryRows, SegmentBytes,
};
use narrows_plan::graph::{Grouping, SegmentKind};
use narrows_plan::{Bytes, Context, GradReduceDtype, Zero};
use rayon::prelude::*;

use super::bounds::CheapestDecisions;
use super::prepared::PassSolution;
use super::solver::SegmentSolver;
use super::spec::{SegmentSpec, SolvedSegment};
use crate::lock::lock;
use crate::solve::{MinCostAssignment, SolveLimits, SolveOutcome, solve_table};

/// Number of microbatches at which the step phase is negligible, so that the fastest step has the fastest microbatch.
pub(crate) const ASYMPTOTIC_MICROBATCHES: u64 = 1 << 20;

/// The fastest assignment of one grouping; `None` without one, or when the solver failed.
struct GroupingSolve {
    cheapest: Option<MinCostAssignment>,
    is_proven: bool,
}

impl SegmentSolver<'_> {
    /// The fastest solution without a memory limit; `None` when the segment has no legal decisions.
    pub fn fastest(&self, spec: SegmentSpec, context: &Context) -> Option<Arc<SolvedSegment>> {
        let key = (spec, self.step_key(spec, context));
        if let Some(cached) = lock(&self.priced.fastest).get(&key) {
            return cached.clone();
        }
        if let Some(cached) = lock(&self.unproven).get(&key) {
            return cached.clone();
        }
        let is_proven = AtomicBool::new(true);
        let groupings = self.groupings(spec);
        let solved = groupings
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
        // Two threads may solve the same segment at once. It counts once, so that the count does not depend on threads.
        if lock(solutions).insert(key, solved.clone()).is_none() {
            self.count_solves(groupings.len() as u64);
        }
        solved
    }

    /// The context with [`ASYMPTOTIC_MICROBATCHES`]: minimising its step minimises the microbatch time.
    pub(crate) fn asymptotic(context: &Context) -> Context {
        Self::with_microbatches(context, ASYMPTOTIC_MICROBATCHES)
    }

    /// The context with another number of microbatches.
    pub(crate) fn with_microbatches(context: &Context, microbatches: u64) -> Context {
        let mut other = *context;
        other.workload.global_batch = other.mesh.data * other.workload.micro_batch * microbatches;
        other
    }

    /// Lower bound on the forward and backward time of one microbatch, for any step phase and without a memory
    /// limit; `None` when the segment has no legal decisions.
    pub(crate) fn min_microbatch_time(&self, spec: SegmentSpec, context: &Context) -> Option<f64> {
        let mut shared = *context;
        // Blocks do not depend on the number of stages. Embedding and head do: on two stages they have two
        // copies of a tied weight.
        if spec.kind == SegmentKind::Block && !context.shards_gradients() {
            shared.mesh.data *= shared.mesh.pipeline;
            shared.mesh.pipeline = 1;
        }
        // Without sharded gradients, the passes do not depend on ZeRO, the replicas and the format of reductions.
        if !context.shards_gradients() {
            shared.zero = Zero::Off;
            shared.grad_reduce_dtype = GradReduceDtype::Fp32;
            shared.shard_size = 1;
            (shared.overlap_grad_reduce, shared.overlap_param_gather) = (false, false);
        }
        let spec = SegmentSpec { tied_weight: None, ..spec };
        let many = Self::asymptotic(&shared);
        let solved = self.fastest(spec, &many)?;
        // With M microbatches M·t + u is minimal, so any other t' is at least t − (u' − u)/M.
        let [_, step_max] = self.step_phase_range(spec, &many);
        let once = (step_max - solved.time.step_phase.0).max(0.0) / ASYMPTOTIC_MICROBATCHES as f64;
        Some((solved.time.forward + solved.time.backward).0 - once)
    }

    /// The fastest solution of one grouping with at most `limit` bytes, solved exactly; `None` without one.
    pub(crate) fn fastest_within(
        &self,
        spec: SegmentSpec,
        context: &Context,
        in_flight: InFlight,
        grouping: Grouping,
        limit: Bytes,
    ) -> Option<Arc<SolvedSegment>> {
        let prepared = self.prepare(spec, grouping, context);
        let step_phases = self.step_phases(&prepared, (spec, grouping), context);
        let rows = MemoryRows::All;
        let with_memory_rows = prepared.priced.table(context, &step_phases, rows);
        let [kept, operands_kept, operands_written] = in_flight.weights();
        let weights = [1, kept, operands_kept, operands_written];
        let table = within_one_row(with_memory_rows, &weights, limit);
        let limits = SolveLimits { time: self.deadline().remaining(), gap: 0.0 };
        self.count_solves(1);
        let assignment = self.solve_table(&table, &limits)?.assignment?;
        Some(Arc::new(self.solution(spec, grouping, context, &assignment)))
    }

    fn solve(&self, spec: SegmentSpec, grouping: Grouping, context: &Context) -> GroupingSolve {
        let prepared = self.prepare(spec, grouping, context);
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
        let limits = SolveLimits { time: self.deadline().remaining(), gap: 0.0 };
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

    /// The solution with these decisions; `None` where values have layouts that nothing uses, as the cheapest decisions may where
    /// some weights are zero.
    pub(crate) fn solved(
        &self,
        spec: SegmentSpec,
        context: &Context,
        decisions: &CheapestDecisions,
    ) -> Option<Arc<SolvedSegment>> {
        let solved = self.solution(spec, decisions.grouping, context, &decisions.assignment);
        solved.choice.uses_all_layouts(&solved.segment).then(|| Arc::new(solved))
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
        let kernel_price = self.price(context);
        let prices = self.prices(context).streams(&kernel_price);
        let [forward, backward, recompute] = self.pass_prices(context);
        let pass_prices =
            self.prices(context).streams(&forward).with_backward(&backward, &recompute);
        let passes = prepared.solution(assignment, pass_prices);
        let choice = passes.choice.clone();
        let PassSolution { mut time, kept, deferred, .. } = *passes;
        let mut bytes = SegmentBytes { kept, deferred, ..SegmentBytes::default() };
        let step_phases = self.step_phases(&prepared, (spec, grouping), context);
        step_phases.add_to(&choice, (context, prices), &mut time, &mut bytes);
        let space = &prepared.priced.space;
        let may_split = context.can_split_gradient_bucket() || context.gathers_in_forward();
        let has_buckets = spec.kind == SegmentKind::Block && may_split;
        let split_buckets = match has_buckets {
            true => Arc::new(step_phases.split_buckets(space, &choice, (context, pass_prices))),
            false => Arc::default(),
        };
        let segment = space.segment.clone();
        SolvedSegment { grouping, choice, segment, time, bytes, split_buckets }
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
