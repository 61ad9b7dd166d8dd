//! Segments and their cost tables, prepared for solves and eliminations.

use std::sync::{Arc, Mutex, OnceLock};

use narrows_cost_model::{
    DeferredBytes, PricedSpace, SegmentTime, StreamPrices, decode_assignment, deferred_bytes,
    kept_bytes, pass_time,
};
use narrows_plan::Bytes;
use narrows_plan::graph::Grouping;
use narrows_plan::strategy::SegmentChoice;
use rustc_hash::FxHashMap;

use crate::lock::lock;
use crate::solve::{EliminationOrder, MinCostAssignment, SharedCosts, WeightedTable, chord};

/// A segment's priced space, usable in every context with the same tensor axis and microbatch.
pub(super) struct PreparedSegment {
    pub priced: PricedSpace,
    /// `None` when the links are too far from a tree for elimination.
    pub order: Option<Arc<EliminationOrder>>,
    /// Decoded assignments.
    solutions: Mutex<FxHashMap<Arc<[u32]>, Arc<PassSolution>>>,
    /// Costs that eliminations in all contexts share, once computed.
    shared_costs: OnceLock<Arc<SharedCosts>>,
    /// Least time of the passes with a multiplier of kept bytes, by multiplier, as far as they are known.
    pass_minima: Mutex<Vec<(f64, f64)>>,
}

/// An assignment of a segment's table, decoded, with all of its cost that does not depend on the step phase.
pub(super) struct PassSolution {
    pub choice: Arc<SegmentChoice>,
    /// Without the step phase.
    pub time: SegmentTime,
    /// Bytes kept for each microbatch in flight.
    pub kept: Bytes,
    pub deferred: DeferredBytes,
}

impl PreparedSegment {
    pub(super) fn new(
        priced: PricedSpace,
        order: Option<Arc<EliminationOrder>>,
    ) -> PreparedSegment {
        let (solutions, shared_costs) = (Mutex::default(), OnceLock::new());
        let pass_minima = Mutex::default();
        PreparedSegment { priced, order, solutions, shared_costs, pass_minima }
    }

    /// Lower bound on [`least_passes`](PreparedSegment::least_passes), in seconds, from those at other multipliers: the least
    /// time is concave in the multiplier, and does not fall. −∞ where none is known.
    pub(super) fn known_pass_minimum(&self, multiplier: f64) -> f64 {
        chord(&lock(&self.pass_minima), multiplier)
    }

    /// Least time of the passes of one microbatch with a multiplier of kept bytes, in seconds, and the bytes kept; `None`
    /// without legal decisions.
    pub(super) fn least_passes(&self, multiplier: f64) -> Option<(f64, f64)> {
        let cheapest = self.cheapest(&self.priced.pass_costs(multiplier))?;
        let kept = self.priced.kept_bytes();
        let chosen = cheapest.assignment.iter().zip(kept.iter());
        let kept_bytes = chosen.map(|(choice, kept)| kept[*choice as usize].as_f64()).sum();
        let cost = cheapest.cost;
        let mut minima = lock(&self.pass_minima);
        let at = minima.partition_point(|(other, _)| *other < multiplier);
        minima.insert(at, (multiplier, cost));
        Some((cost, kept_bytes))
    }

    /// The cheapest assignment at these costs, of which those of all nodes follow one after the other. Where the segment is too
    /// wide for elimination: an empty assignment, with the sum of each node's least cost, which is no larger. `None` without legal
    /// decisions.
    pub(super) fn cheapest(&self, costs: &[f64]) -> Option<MinCostAssignment> {
        if let Some(order) = &self.order {
            return order.cheapest_of_flat(costs);
        }
        let mut first = 0;
        let least = self.priced.choice_counts().into_iter().map(|count| {
            first += count;
            costs[first - count..first].iter().copied().reduce(f64::min)
        });
        Some(MinCostAssignment { cost: least.sum::<Option<f64>>()?, assignment: vec![] })
    }

    /// The costs that eliminations in all contexts share.
    pub(super) fn shared_costs(&self) -> Arc<SharedCosts> {
        let new = || {
            let [operands_kept, operands_written] = self.priced.deferred_bytes();
            let later_rows = [self.priced.kept_bytes(), operands_kept, operands_written];
            let later_rows = later_rows.each_ref().map(|row| &**row);
            Arc::new(SharedCosts::new(self.priced.flow_times(), later_rows))
        };
        self.shared_costs.get_or_init(new).clone()
    }

    /// The decoded assignment, priced once.
    pub(super) fn solution(&self, assignment: &[u32], prices: StreamPrices) -> Arc<PassSolution> {
        if let Some(known) = lock(&self.solutions).get(assignment) {
            return known.clone();
        }
        let space = &self.priced.space;
        let choice = Arc::new(decode_assignment(space, assignment));
        let time = pass_time(space, &choice, prices);
        let (kept, deferred) = (kept_bytes(space, &choice), deferred_bytes(space, &choice));
        let solution = Arc::new(PassSolution { choice, time, kept, deferred });
        lock(&self.solutions).insert(assignment.into(), solution.clone());
        solution
    }
}

/// The cost tables of a segment's groupings, ready for eliminations.
pub(super) type WeightedTables = Arc<Vec<(Grouping, Arc<WeightedTable>)>>;
