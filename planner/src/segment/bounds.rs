//! Bounds on the times of a segment over all of its choices.

use narrows_cost_model::{
    Assignment, InFlight, PartTimes, PassTimesMin, ShardingMin, StepPhases, StepWeights,
    WorkingBytes, WorkingSet,
};
use narrows_plan::graph::{Grouping, SegmentKind};
use narrows_plan::strategy::{BoundaryLayout, TiedWeightLayout};
use narrows_plan::{BucketSplit, Bytes, Context, Seconds};

use super::cache::{PassTimesCache, StepPhaseBounds};
use super::pass_parts::{PASSES, PassCosts};
use super::prepared::PreparedSegment;
use super::solver::SegmentSolver;
use super::spec::SegmentSpec;
use crate::lock::lock;
use crate::solve::MinCostAssignment;

/// The decisions of a segment that are cheapest at some weights.
#[derive(Clone, Debug)]
pub(crate) struct CheapestDecisions {
    /// In seconds.
    pub cost: f64,
    /// The bytes of these decisions: 0 where they were not asked for, and where the segment is too wide for elimination.
    pub bytes: f64,
    pub(super) grouping: Grouping,
    pub(super) assignment: Assignment,
}

impl CheapestDecisions {
    /// Whether both have the same decisions.
    pub(crate) fn are_those_of(&self, other: &CheapestDecisions) -> bool {
        self.grouping == other.grouping && self.assignment == other.assignment
    }
}

impl SegmentSolver<'_> {
    /// Bounds on the time of a segment in the step phase: `[min, max]` in seconds.
    pub(crate) fn step_phase_range(&self, spec: SegmentSpec, context: &Context) -> [f64; 2] {
        self.step_phase_bounds(spec, context).range
    }

    /// Bounds on the segment's reductions during the last backward pass: `[min, max]` in seconds.
    pub(crate) fn overlapped_range(&self, spec: SegmentSpec, context: &Context) -> [f64; 2] {
        match context.overlap_grad_reduce {
            true => self.step_phase_bounds(spec, context).overlapped,
            false => [0.0; 2],
        }
    }

    /// Lower bound on the time that the block's reductions add to a step, in seconds, beyond the least that other blocks add,
    /// where the block is the first of a stage.
    pub(crate) fn first_block_min(&self, spec: SegmentSpec, context: &Context) -> f64 {
        match context.overlap_grad_reduce {
            true => self.step_phase_bounds(spec, context).first_block_min,
            false => 0.0,
        }
    }

    /// Upper bound on the gathers of the segment's updated weights during the next forward pass, in seconds.
    pub(crate) fn gathered_max(&self, spec: SegmentSpec, context: &Context) -> f64 {
        match context.gathers_in_forward() {
            true => self.step_phase_bounds(spec, context).gathered_max,
            false => 0.0,
        }
    }

    /// Lower bound on the weighted time of the segment in a step, in seconds: the least, unless the segment is too wide for
    /// elimination. `None` when it has no legal decisions.
    pub(crate) fn min_weighted_time(
        &self,
        spec: SegmentSpec,
        context: &Context,
        weights: &StepWeights,
    ) -> Option<f64> {
        Some(self.min_weighted_cost(spec, context, (weights, None), None)?[0])
    }

    /// The same with other costs of passes, where there are such, and with `multiplier` seconds for each byte with these
    /// microbatches in flight; and the bytes of these decisions: 0 without a multiplier, and where the segment is too wide for elimination.
    pub(crate) fn min_weighted_cost(
        &self,
        spec: SegmentSpec,
        context: &Context,
        costs: (&StepWeights, Option<&PassCosts>),
        memory: Option<(f64, InFlight)>,
    ) -> Option<[f64; 2]> {
        let CheapestDecisions { cost, bytes, .. } =
            self.cheapest_decisions(spec, context, costs, memory)?;
        Some([cost, bytes])
    }

    /// The decisions that attain [`min_weighted_cost`](SegmentSolver::min_weighted_cost).
    pub(crate) fn cheapest_decisions(
        &self,
        spec: SegmentSpec,
        context: &Context,
        (weights, passes): (&StepWeights, Option<&PassCosts>),
        memory: Option<(f64, InFlight)>,
    ) -> Option<CheapestDecisions> {
        let of_grouping = |grouping: &Grouping| {
            let prepared = self.prepare(spec, *grouping, context);
            let step_phases = self.step_phases(&prepared, (spec, *grouping), context);
            let passes = passes.and_then(|costs| costs.get(&(spec, *grouping)));
            let besides = StepWeights { forward: 0.0, backward: 0.0, ..*weights };
            let weighted = if passes.is_some() { &besides } else { weights };
            let mut costs = prepared.priced.weighted_times(&step_phases, weighted).concat();
            let bytes = memory.map_or_else(Vec::new, |(multiplier, in_flight)| {
                let bytes = prepared.priced.bytes(&step_phases, in_flight);
                let of_choices = costs.iter_mut().zip(bytes.iter().flatten());
                of_choices.for_each(|(cost, bytes)| *cost += multiplier * bytes.as_f64());
                bytes
            });
            let cheapest = match passes {
                None => prepared.cheapest(&costs),
                Some(parts) => {
                    let with = |[forward, backward]: &[Vec<f64>; PASSES]| {
                        let of_passes = forward.iter().zip(backward).map(|(forward, backward)| {
                            // Decisions that are left out stay so where a pass does not count.
                            match forward.is_finite() && backward.is_finite() {
                                true => weights.forward * forward + weights.backward * backward,
                                false => f64::INFINITY,
                            }
                        });
                        let all = costs.iter().zip(of_passes).map(|(cost, passes)| cost + passes);
                        prepared.cheapest(&all.collect::<Vec<_>>())
                    };
                    parts.iter().filter_map(with).min_by(|a, b| a.cost.total_cmp(&b.cost))
                }
            }?;
            let chosen = cheapest.assignment.iter().zip(&bytes);
            let bytes: Bytes = chosen.map(|(choice, bytes)| bytes[*choice as usize]).sum();
            let MinCostAssignment { cost, assignment } = cheapest;
            Some(CheapestDecisions { cost, bytes: bytes.as_f64(), grouping: *grouping, assignment })
        };
        let groupings = self.groupings(spec);
        groupings.iter().filter_map(of_grouping).min_by(|a, b| a.cost.total_cmp(&b.cost))
    }

    /// Weighted costs of all choices of a segment with a grouping, with `multiplier` seconds for each byte with these microbatches in
    /// flight. Those of all nodes follow one after the other.
    pub(crate) fn choice_costs(
        &self,
        (spec, grouping): (SegmentSpec, Grouping),
        context: &Context,
        weights: &StepWeights,
        (multiplier, in_flight): (f64, InFlight),
    ) -> Vec<f64> {
        let prepared = self.prepare(spec, grouping, context);
        let step_phases = self.step_phases(&prepared, (spec, grouping), context);
        let mut costs = prepared.priced.weighted_times(&step_phases, weights).concat();
        let bytes = prepared.priced.bytes(&step_phases, in_flight);
        let of_choices = costs.iter_mut().zip(bytes.iter().flatten());
        of_choices.for_each(|(cost, bytes)| *cost += multiplier * bytes.as_f64());
        costs
    }

    /// The times of these decisions of a segment, with other costs of passes where there are such; `None` where the segment is too
    /// wide for elimination.
    pub(crate) fn part_times(
        &self,
        spec: SegmentSpec,
        context: &Context,
        decisions: &CheapestDecisions,
        passes: Option<&PassCosts>,
    ) -> Option<PartTimes> {
        let prepared = self.prepare(spec, decisions.grouping, context);
        let step_phases = self.step_phases(&prepared, (spec, decisions.grouping), context);
        prepared.order.as_ref()?;
        let passes = passes.and_then(|costs| costs.get(&(spec, decisions.grouping)));
        let counts = prepared.priced.choice_counts();
        // The costs of all nodes follow one after the other.
        let chosen = |costs: &[f64]| {
            let mut first = 0;
            let nodes = counts.iter().zip(&decisions.assignment);
            let of_node = |(count, choice): (&usize, &u32)| {
                first += count;
                costs[first - count + *choice as usize]
            };
            nodes.map(of_node).sum::<f64>()
        };
        // The cheapest part that has these decisions, if costs of passes are given.
        let of_passes = passes.map(|parts| {
            let of_part = |part: &[Vec<f64>; PASSES]| part.each_ref().map(|costs| chosen(costs));
            let least = |a: [f64; PASSES], b: [f64; PASSES]| [a[0].min(b[0]), a[1].min(b[1])];
            parts.iter().map(of_part).fold([f64::INFINITY; PASSES], least)
        });
        Some(PartTimes::of(|weights| match of_passes {
            Some([forward, _]) if weights.forward > 0.0 => weights.forward * forward,
            Some([_, backward]) if weights.backward > 0.0 => weights.backward * backward,
            _ => chosen(&prepared.priced.weighted_times(&step_phases, weights).concat()),
        }))
    }

    /// For each of [`BucketSplit::ALL`], lower bounds on the first gather of a block that is the first of a stage, and on the time
    /// of all of its gathers beyond that of a whole one, in seconds.
    pub(crate) fn first_gathers_min(
        &self,
        spec: SegmentSpec,
        context: &Context,
    ) -> [[f64; 2]; BucketSplit::ALL.len()] {
        match context.gathers_in_forward() {
            true => self.step_phase_bounds(spec, context).first_gathers_min,
            false => Default::default(),
        }
    }

    /// Upper bound on the forward pass of one microbatch through a block before it reads the first weight that is gathered during
    /// it, in seconds.
    pub(crate) fn forward_before_gathers_max(&self, spec: SegmentSpec, context: &Context) -> f64 {
        let kernel_price = self.price(context);
        let prices = self.prices(context).streams(&kernel_price);
        let of_grouping = |grouping: &Grouping| {
            let prepared = self.prepare(spec, *grouping, context);
            let step_phases = self.step_phases(&prepared, (spec, *grouping), context);
            prepared.priced.forward_before_gathers_max(&step_phases, prices).0
        };
        self.groupings(spec).iter().map(of_grouping).fold(0.0, f64::max)
    }

    /// Upper bounds on the collectives of sharded parameters beside a forward and a backward pass of one microbatch, in seconds.
    pub(crate) fn sharded_max(&self, spec: SegmentSpec, context: &Context) -> [f64; 2] {
        match context.shards_gradients() {
            true => self.step_phase_bounds(spec, context).sharded_max,
            false => [0.0; 2],
        }
    }

    /// Lower bounds on the passes of a segment with sharded parameters; zero where replicas do not shard them.
    pub(crate) fn sharding_min(&self, spec: SegmentSpec, context: &Context) -> ShardingMin {
        match context.shards_gradients() {
            true => self.step_phase_bounds(spec, context).sharding_min,
            false => ShardingMin::default(),
        }
    }

    /// Working sets of a stage with all blocks of the model.
    pub(crate) fn working_sets(
        &self,
        (boundary, tied_weight): (BoundaryLayout, Option<TiedWeightLayout>),
        context: &Context,
    ) -> Vec<WorkingSet> {
        let blocks = self.layer_shapes().len() as u64;
        let of_head = self.head_working_bytes((boundary, tied_weight), context);
        let least = self.block_working_bytes(boundary, context);
        least.map_or(vec![], |least| least.of_stage(context, blocks, of_head))
    }

    /// Least bytes that any block holds during its passes; `None` for models without gated products.
    pub(crate) fn block_working_bytes(
        &self,
        boundary: BoundaryLayout,
        context: &Context,
    ) -> Option<WorkingBytes> {
        let of_shape = |shape: usize| {
            let spec = SegmentSpec::block(shape, boundary);
            let of_grouping = |grouping: &Grouping| {
                let space = &self.prepare(spec, *grouping, context).priced.space;
                WorkingBytes::least(space, context)
            };
            let of_groupings: Option<Vec<WorkingBytes>> =
                self.groupings(spec).iter().map(of_grouping).collect();
            of_groupings?.into_iter().reduce(WorkingBytes::min)
        };
        let of_shapes: Option<Vec<WorkingBytes>> = (0..self.shape_count()).map(of_shape).collect();
        of_shapes?.into_iter().reduce(WorkingBytes::min)
    }

    /// Least bytes that the head holds during its backward pass.
    pub(crate) fn head_working_bytes(
        &self,
        (boundary, tied_weight): (BoundaryLayout, Option<TiedWeightLayout>),
        context: &Context,
    ) -> Bytes {
        let head = SegmentSpec::embedding_or_head(SegmentKind::Head, boundary, tied_weight);
        let of_grouping = |grouping: &Grouping| {
            let space = &self.prepare(head, *grouping, context).priced.space;
            WorkingBytes::least_of_head(space, context)
        };
        self.groupings(head).iter().map(of_grouping).min().unwrap_or_default()
    }

    fn step_phase_bounds(&self, spec: SegmentSpec, context: &Context) -> StepPhaseBounds {
        let key = (spec, self.step_phase_key(spec, context));
        if let Some(cached) = lock(&self.priced.step_phase_bounds).get(&key) {
            return *cached;
        }
        let kernel_price = self.price(context);
        let prices = self.prices(context).streams(&kernel_price);
        let has_buckets = spec.kind == SegmentKind::Block && context.overlap_grad_reduce;
        let first_block_min = |step_phases: &StepPhases, prepared: &PreparedSegment| {
            let segment = &prepared.priced.space.segment;
            let least = has_buckets.then(|| step_phases.first_block_min(segment, context, prices));
            least.unwrap_or_default().0
        };
        let first_gathers_min = |step_phases: &StepPhases, prepared: &PreparedSegment| {
            let segment = &prepared.priced.space.segment;
            let least = context
                .gathers_in_forward()
                .then(|| step_phases.first_gathers_min(segment, context, prices));
            least.unwrap_or_default().map(|of_split| of_split.map(|time| time.0))
        };
        let of_grouping = |grouping: &Grouping| {
            let prepared = self.prepare(spec, *grouping, context);
            let step_phases = self.step_phases(&prepared, (spec, *grouping), context);
            StepPhaseBounds {
                range: step_phases.bounds().map(|seconds| seconds.0),
                overlapped: step_phases.overlapped_range().map(|time| time.0),
                first_block_min: first_block_min(&step_phases, &prepared),
                first_gathers_min: first_gathers_min(&step_phases, &prepared),
                gathered_max: step_phases.gathered_max().0,
                sharded_max: step_phases.sharded_max().map(|time| time.0),
                sharding_min: step_phases.sharding_min(),
            }
        };
        let hull = |a: [f64; 2], b: [f64; 2]| [a[0].min(b[0]), a[1].max(b[1])];
        let widest = |a: StepPhaseBounds, b: StepPhaseBounds| StepPhaseBounds {
            range: hull(a.range, b.range),
            overlapped: hull(a.overlapped, b.overlapped),
            first_block_min: a.first_block_min.min(b.first_block_min),
            first_gathers_min: std::array::from_fn(|split| {
                let (a, b) = (a.first_gathers_min[split], b.first_gathers_min[split]);
                [a[0].min(b[0]), a[1].min(b[1])]
            }),
            gathered_max: a.gathered_max.max(b.gathered_max),
            sharded_max: [0, 1].map(|at| a.sharded_max[at].max(b.sharded_max[at])),
            sharding_min: a.sharding_min.min(b.sharding_min),
        };
        let bounds = self.groupings(spec).iter().map(of_grouping).reduce(widest);
        let bounds = bounds.unwrap_or_else(|| unreachable!("every segment has a grouping"));
        lock(&self.priced.step_phase_bounds).insert(key, bounds);
        bounds
    }

    /// Lower bounds on the passes of one microbatch, from the ops alone.
    pub(crate) fn min_pass_times(&self, spec: SegmentSpec, context: &Context) -> PassTimesMin {
        self.least_pass_times(&self.priced.pass_times, spec, context, |prepared| {
            prepared.priced.min_pass_times()
        })
    }

    /// As [`min_pass_times`](SegmentSolver::min_pass_times), with the flows between ops: each is the least without a memory
    /// limit.
    pub(crate) fn min_pass_times_with_flows(
        &self,
        spec: SegmentSpec,
        context: &Context,
    ) -> PassTimesMin {
        self.least_pass_times(&self.priced.pass_times_with_flows, spec, context, |prepared| {
            let of_ops = prepared.priced.min_pass_times();
            let least = |[forward, backward, weight_gradient]: [f64; 3], of_ops: f64| {
                let weights =
                    StepWeights { forward, backward, weight_gradient, ..StepWeights::default() };
                let times = prepared.priced.weighted_pass_times(&weights);
                let cheapest = prepared.order.as_ref().and_then(|order| order.cheapest(&times));
                cheapest.map_or(of_ops, |cheapest| cheapest.cost)
            };
            PassTimesMin {
                forward: least([1.0, 0.0, 0.0], of_ops.forward),
                backward: least([0.0, 1.0, 0.0], of_ops.backward),
                without_weight_gradients: least([1.0, 1.0, -1.0], of_ops.without_weight_gradients),
            }
        })
    }

    /// The longest forward and the longest backward pass of one microbatch, without collectives of sharded parameters; `None`
    /// where they are not known.
    pub(crate) fn max_pass_times(
        &self,
        spec: SegmentSpec,
        context: &Context,
    ) -> Option<[Seconds; 2]> {
        let mut most = [Seconds(0.0); 2];
        for grouping in self.groupings(spec) {
            let prepared = self.prepare(spec, grouping, context);
            let order = prepared.order.as_ref()?;
            for (at, most) in most.iter_mut().enumerate() {
                let [forward, backward] = [0, 1].map(|pass| if pass == at { -1.0 } else { 0.0 });
                let weights = StepWeights { forward, backward, ..StepWeights::default() };
                let times = prepared.priced.weighted_pass_times(&weights);
                *most = Seconds(most.0.max(-order.cheapest(&times)?.cost));
            }
        }
        Some(most)
    }

    /// The least of all groupings, cached.
    fn least_pass_times(
        &self,
        cache: &PassTimesCache,
        spec: SegmentSpec,
        context: &Context,
        of_prepared: impl Fn(&PreparedSegment) -> PassTimesMin,
    ) -> PassTimesMin {
        let key = (spec, self.pass_key(context));
        if let Some(cached) = lock(cache).get(&key) {
            return *cached;
        }
        let of_grouping =
            |grouping: &Grouping| of_prepared(&self.prepare(spec, *grouping, context));
        let least = |a: PassTimesMin, b: PassTimesMin| PassTimesMin {
            forward: a.forward.min(b.forward),
            backward: a.backward.min(b.backward),
            without_weight_gradients: a.without_weight_gradients.min(b.without_weight_gradients),
        };
        let times = self.groupings(spec).iter().map(of_grouping).reduce(least).unwrap_or_default();
        lock(cache).insert(key, times);
        times
    }
}
