//! Bounds on the times of a segment over all of its choices.

use narrows_cost_model::{PassTimesMin, ShardingMin};
use narrows_plan::Context;
use narrows_plan::graph::Grouping;

use super::solver::SegmentSolver;
use super::spec::SegmentSpec;
use crate::lock::lock;

impl SegmentSolver<'_> {
    /// Bounds on the time of a segment in the step phase: `[min, max]` in seconds.
    pub(crate) fn step_phase_range(&self, spec: SegmentSpec, context: &Context) -> [f64; 2] {
        let key = (spec, self.step_phase_key(spec, context));
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

    /// Lower bound on the segment's reductions beside the last backward pass, in seconds.
    pub(crate) fn overlapped_min(&self, spec: SegmentSpec, context: &Context) -> f64 {
        if !context.overlap_grad_reduce {
            return 0.0;
        }
        let of_grouping = |grouping: &Grouping| {
            let prepared = self.prepare(spec, *grouping, context);
            self.step_phases(&prepared, (spec, *grouping), context).overlapped_min().0
        };
        self.groupings(spec).iter().map(of_grouping).reduce(f64::min).unwrap_or(0.0)
    }

    /// Lower bounds on the passes of a segment with sharded parameters; zero where replicas do not shard them.
    pub(crate) fn sharding_min(&self, spec: SegmentSpec, context: &Context) -> ShardingMin {
        if !context.shards_gradients() {
            return ShardingMin::default();
        }
        let of_grouping = |grouping: &Grouping| {
            let prepared = self.prepare(spec, *grouping, context);
            self.step_phases(&prepared, (spec, *grouping), context).sharding_min()
        };
        let least = self.groupings(spec).iter().map(of_grouping).reduce(ShardingMin::min);
        least.unwrap_or_default()
    }

    /// Lower bounds on the passes of one microbatch.
    pub(crate) fn min_pass_times(&self, spec: SegmentSpec, context: &Context) -> PassTimesMin {
        let key = (spec, self.pass_key(context));
        if let Some(cached) = lock(&self.priced.pass_times).get(&key) {
            return *cached;
        }
        let of_grouping = |grouping: &Grouping| {
            let prepared = self.prepare(spec, *grouping, context);
            let times = prepared.priced.min_pass_times();
            let order = prepared.order.as_ref();
            let cheapest = order.and_then(|order| {
                order.cheapest(&prepared.priced.times_without_weight_gradients())
            });
            let without_weight_gradients =
                cheapest.map_or(times.without_weight_gradients, |cheapest| cheapest.cost);
            PassTimesMin { without_weight_gradients, ..times }
        };
        let least = |a: PassTimesMin, b: PassTimesMin| PassTimesMin {
            forward: a.forward.min(b.forward),
            backward: a.backward.min(b.backward),
            input_gradient: a.input_gradient.min(b.input_gradient),
            without_weight_gradients: a.without_weight_gradients.min(b.without_weight_gradients),
        };
        let times = self.groupings(spec).iter().map(of_grouping).reduce(least).unwrap_or_default();
        lock(&self.priced.pass_times).insert(key, times);
        times
    }
}
