//! Hulls of segments: the fastest decisions for each number of bytes.

use std::sync::Arc;

use narrows_cost_model::InFlight;
use narrows_plan::graph::Grouping;
use narrows_plan::{Bytes, Context};
use rayon::prelude::*;

use super::hull_cache::{CachedHull, HullKey, VertexSolutions};
use super::prepared::WeightedTables;
use super::solver::SegmentSolver;
use super::spec::{SegmentSpec, SolvedSegment};
use crate::lock::lock;
use crate::solve::{Hull, RowWeights, SupportingLine, Vertex, WeightedTable};

impl SegmentSolver<'_> {
    /// Vertices of the lower convex hull of time against bytes with `in_flight` microbatches, over all
    /// groupings, from the fastest to the smallest. The edge over `average` bytes is exact; without
    /// `average`, every edge is.
    pub(crate) fn hull(
        &self,
        spec: SegmentSpec,
        context: &Context,
        in_flight: InFlight,
        average: Option<Bytes>,
    ) -> Vec<Arc<SolvedSegment>> {
        let weighted_tables = self.weighted_tables(spec, context);
        let vertices = self.with_hull((spec, *context, in_flight), |hull, solutions| {
            match average {
                Some(bytes) => hull.refine(bytes.as_f64()),
                None => hull.refine_all(),
            }
            let solved = |vertex: &Vertex| {
                let solve = || {
                    let grouping = weighted_tables[vertex.table].0;
                    Arc::new(self.solution(spec, grouping, context, &vertex.assignment))
                };
                solutions.entry(vertex.id).or_insert_with(solve).clone()
            };
            hull.vertices().iter().map(solved).collect()
        });
        vertices.unwrap_or_default()
    }

    /// Supporting line of a segment's hull along the edge that spans `average` bytes; `None` for a segment without legal
    /// decisions.
    pub(crate) fn supporting_line(
        &self,
        spec: SegmentSpec,
        context: &Context,
        in_flight: InFlight,
        average: Bytes,
    ) -> Option<SupportingLine> {
        let key = (spec, *context, in_flight);
        self.with_hull(key, |hull, _| hull.supporting_line(average.as_f64()))
    }

    /// Supporting line of a segment's hull at a multiplier of bytes, in seconds; `None` for a segment without legal decisions.
    pub(crate) fn line_at_multiplier(
        &self,
        spec: SegmentSpec,
        context: &Context,
        in_flight: InFlight,
        multiplier: f64,
    ) -> Option<SupportingLine> {
        let weighted_tables = self.weighted_tables(spec, context);
        self.count_solves(weighted_tables.len() as u64);
        let tables = weighted_tables.iter().map(|(_, weighted)| &**weighted);
        SupportingLine::at_multiplier(tables, row_weights(in_flight), multiplier)
    }

    /// The multipliers of bytes for one microbatch that a search stored for this stage, with other links or batches.
    pub(crate) fn byte_multipliers(
        &self,
        spec: SegmentSpec,
        context: &Context,
        stage: usize,
    ) -> Option<[f64; 2]> {
        lock(&self.priced.byte_multipliers)
            .get(&self.byte_multipliers_key(spec, context, stage))
            .copied()
    }

    /// Stores multipliers of bytes for other searches.
    pub(crate) fn store_byte_multipliers(
        &self,
        spec: SegmentSpec,
        context: &Context,
        stage: usize,
        multipliers: [f64; 2],
    ) {
        let key = self.byte_multipliers_key(spec, context, stage);
        lock(&self.priced.byte_multipliers).insert(key, multipliers);
    }

    /// Calls `read` with a hull, which is prepared by the first call; `None` for a segment without legal decisions.
    fn with_hull<T>(
        &self,
        key: HullKey,
        read: impl FnOnce(&mut Hull, &mut VertexSolutions) -> T,
    ) -> Option<T> {
        let (spec, context, in_flight) = &key;
        let entry = lock(&self.hulls.by_key).entry(key).or_default().clone();
        // Tables are prepared in parallel: a lock held meanwhile could be taken again by stolen work.
        let weighted_tables = lock(&entry).is_none().then(|| self.weighted_tables(*spec, context));
        let mut cached = lock(&entry);
        let CachedHull { hull, solutions } = cached.get_or_insert_with(|| {
            let weighted_tables =
                weighted_tables.iter().flat_map(|weighted_tables| weighted_tables.iter());
            let weighted_tables = weighted_tables.map(|(_, weighted)| weighted.clone()).collect();
            let hull = Hull::new(weighted_tables, row_weights(*in_flight));
            CachedHull { hull, solutions: VertexSolutions::default() }
        });
        let hull = hull.as_mut()?;
        let before = hull.eliminations();
        let value = read(hull, solutions);
        self.count_solves(hull.eliminations() - before);
        Some(value)
    }

    /// The tables of all groupings, ready for eliminations.
    fn weighted_tables(&self, spec: SegmentSpec, context: &Context) -> WeightedTables {
        let key = (spec, self.step_key(spec, context));
        let cached = lock(&self.priced.weighted_tables).get(&key).cloned();
        let groupings = self.groupings(spec);
        let weighted_tables = cached.unwrap_or_else(|| {
            let weighted = |grouping: &Grouping| {
                let prepared = self.prepare(spec, *grouping, context);
                let order = prepared.order.clone()?;
                let step_phases = self.step_phases(&prepared, (spec, *grouping), context);
                let own_times = prepared.priced.op_step_times(context, &step_phases);
                let own_bytes = prepared.priced.op_resident_bytes(&step_phases);
                let microbatches = context.workload.microbatches(&context.mesh) as f64;
                let shared = prepared.shared_costs();
                let weighted =
                    WeightedTable::new(order, &own_times, &own_bytes, shared, microbatches);
                Some((*grouping, Arc::new(weighted)))
            };
            let weighted_tables: WeightedTables =
                Arc::new(groupings.par_iter().filter_map(weighted).collect());
            lock(&self.priced.weighted_tables).entry(key).or_insert(weighted_tables).clone()
        });
        if weighted_tables.len() < groupings.len() {
            // The hull lacks the decisions of a grouping, so it proves nothing.
            self.record_unproven();
        }
        weighted_tables
    }
}

/// Microbatches in flight multiply the rows of kept activations and of deferred weight gradients.
fn row_weights(in_flight: InFlight) -> RowWeights {
    in_flight.weights().map(|microbatches| microbatches as f64)
}

#[cfg(test)]
mod tests {
    use narrows_cost_model::profile;
    use narrows_plan::model::presets;

    use super::*;
    use crate::context_space::contexts;
    use crate::deadline::Deadline;
    use crate::request::Request;

    const ONE: InFlight = InFlight { kept: 1, deferred: 0, written: 0 };

    #[test]
    fn a_hull_without_all_groupings_is_unproven() {
        let model = presets::find("cola-60m").expect("a preset");
        let profile = profile::preset("a100-80gb").expect("a preset");
        let request = Request { tensor: Some(2), ..Request::new(model, profile, 2, 2, 1024) };
        let context = contexts(&request)[0];
        let complete = SegmentSolver::new(&request, Deadline::none());
        let spec = SegmentSpec::block(0, complete.boundary_layouts(&context)[0]);
        assert!(!complete.hull(spec, &context, ONE, None).is_empty() && !complete.has_unproven());

        let partial = SegmentSolver::new(&request, Deadline::none());
        let grouping = complete.groupings(spec)[0];
        let links = complete.prepare(spec, grouping, &context).priced.links().to_vec();
        let key = (SegmentSpec { shape: 0, ..spec }, grouping);
        partial.alternatives.elimination_orders.forbid(key, links);
        assert!(!partial.hull(spec, &context, ONE, None).is_empty(), "other groupings remain");
        assert!(partial.has_unproven());
    }
}
