//! Bounds on the times of a segment over all of its choices.

use narrows_cost_model::{PassTimesMin, ShardingMin};
use narrows_plan::Context;
use narrows_plan::graph::Grouping;

use super::cache::StepPhaseBounds;
use super::solver::SegmentSolver;
use super::spec::SegmentSpec;
use crate::lock::lock;

impl SegmentSolver<'_> {
    /// Bounds on the time of a segment in the step phase: `[min, max]` in seconds.
    pub(crate) fn step_phase_range(&self, spec: SegmentSpec, context: &Context) -> [f64; 2] {
        self.step_phase_bounds(spec, context).range
    }

    /// Lower bound on the segment's reductions during the last backward pass, in seconds.
    pub(crate) fn overlapped_min(&self, spec: SegmentSpec, context: &Context) -> f64 {
        match context.overlap_grad_reduce {
            true => self.step_phase_bounds(spec, context).overlapped_min,
            false => 0.0,
        }
    }

    /// Lower bound on the gathers of the segment's updated weights during the next forward pass, in seconds.
    pub(crate) fn gathered_min(&self, spec: SegmentSpec, context: &Context) -> f64 {
        match context.gathers_in_forward() {
            true => self.step_phase_bounds(spec, context).gathered_min,
            false => 0.0,
        }
    }

    /// Lower bounds on the passes of a segment with sharded parameters; zero where replicas do not shard them.
    pub(crate) fn sharding_min(&self, spec: SegmentSpec, context: &Context) -> ShardingMin {
        match context.shards_gradients() {
            true => self.step_phase_bounds(spec, context).sharding_min,
            false => ShardingMin::default(),
        }
    }

    fn step_phase_bounds(&self, spec: SegmentSpec, context: &Context) -> StepPhaseBounds {
        let key = (spec, self.step_phase_key(spec, context));
        if let Some(cached) = lock(&self.priced.step_phase_bounds).get(&key) {
            return *cached;
        }
        let of_grouping = |grouping: &Grouping| {
            let prepared = self.prepare(spec, *grouping, context);
            let step_phases = self.step_phases(&prepared, (spec, *grouping), context);
            StepPhaseBounds {
                range: step_phases.bounds().map(|seconds| seconds.0),
                overlapped_min: step_phases.overlapped_min().0,
                gathered_min: step_phases.gathered_min().0,
                sharding_min: step_phases.sharding_min(),
            }
        };
        let widest = |a: StepPhaseBounds, b: StepPhaseBounds| StepPhaseBounds {
            range: [a.range[0].min(b.range[0]), a.range[1].max(b.range[1])],
            overlapped_min: a.overlapped_min.min(b.overlapped_min),
            gathered_min: a.gathered_min.min(b.gathered_min),
            sharding_min: a.sharding_min.min(b.sharding_min),
        };
        let bounds = self.groupings(spec).iter().map(of_grouping).reduce(widest);
        let bounds = bounds.unwrap_or_else(|| unreachable!("every segment has a grouping"));
        lock(&self.priced.step_phase_bounds).insert(key, bounds);
        bounds
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
