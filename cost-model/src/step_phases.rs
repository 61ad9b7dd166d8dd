//! Prices of parameters in a context: the step phase with its gradient reductions and updates, and the collectives
//! that ZeRO-2 and ZeRO-3 add to the passes.

use narrows_plan::emit::{
    InstrTemplate, SplitBucket, reduce_over_tensor, round_gradient, split_bucket, widen_gradient,
};
use narrows_plan::graph::{OpId, Segment, SegmentKind};
use narrows_plan::strategy::{OpParameters, SegmentChoice, SegmentSpace, Strategy};
use narrows_plan::{BucketSplit, Bytes, Context, Seconds};

use crate::coalesced::{CoalescedBounds, CoalescedBytes, CoalescedTime};
use crate::memory::SegmentBytes;
use crate::op_order::OpOrder;
use crate::overlap::{EarlyBucket, GatherTime, OverlapSlowdown, SplitBucketTime};
use crate::price::{KernelPrice, StreamPrices};
use crate::segment_time::{SegmentTime, StepWeights};
use crate::sharding::{ShardingMin, ShardingPrices, ShardingTime};

/// The step phase of an op under one strategy, with its share of what the ops of its segment do together.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OpStep {
    /// Gradient reductions and updates.
    pub time: Seconds,
    /// The updates.
    pub update: Seconds,
    /// Gradient reductions during the last backward pass, of which `time` has the least that they add to a step.
    pub overlapped: Seconds,
    /// Gathers of updated weights during the next forward pass, of which `time` has the least that they add to a step.
    pub gathered: Seconds,
    /// The gathers of a stage's first block in buckets: the first alone, and the least that the others add to a step.
    split_gathers: [Seconds; BucketSplit::SPLITS.len()],
    /// The reductions of a stage's first block in buckets: the last alone, and the least that the others add to a step.
    split_reductions: [Seconds; BucketSplit::SPLITS.len()],
    /// Bytes of the parameters with their gradients and optimizer states.
    pub resident: Bytes,
    /// The least that a sharded parameter adds to the passes of one microbatch.
    pub sharding: ShardingTime,
    /// Work of the op alone.
    own: OwnStep,
    /// Operands of collectives and fused ops that the ops of a segment share.
    coalesced: CoalescedBytes,
}

/// Work of an op in the step phase that it does not share with other ops.
#[derive(Clone, Copy, Debug, Default)]
struct OwnStep {
    /// The reduction over the tensor axis.
    reduction: Seconds,
    /// Casts around the reductions over the data axis.
    casts: Seconds,
}

/// The step phases of a segment's ops in one context, by strategy. They depend on neither the boundary layout nor the
/// workload.
#[derive(Clone, Debug)]
pub struct StepPhases {
    ops: Vec<Vec<(Strategy, OpStep)>>,
    sharding_min: ShardingMin,
}

impl StepPhases {
    /// Prices the step phases of all ops of `space` in a context with the same tensor axis, with the least that
    /// reductions during the last backward pass add to a step.
    pub fn new(space: &SegmentSpace, context: &Context, prices: StreamPrices) -> StepPhases {
        let of_op = |id: OpId| {
            let mut steps: Vec<(Strategy, OpStep)> = vec![];
            for option in &space.ops[id.0 as usize] {
                let strategy = option.choice.strategy;
                if steps.iter().all(|(known, _)| *known != strategy) {
                    steps.push((strategy, op_step(space, (context, id, strategy), prices.kernel)));
                }
            }
            steps
        };
        let mut ops: Vec<_> = space.segment.op_ids().map(of_op).collect();
        let bounds = coalesced_bounds(&ops, context, prices);
        for (op, steps) in ops.iter_mut().enumerate() {
            for (_, step) in steps {
                step.count(bounds.share(op, &step.coalesced), prices.overlap);
            }
        }
        let can_split = context.gathers_in_forward() || context.can_split_gradient_bucket();
        if let (SegmentKind::Block, Some(slowdown), true) =
            (space.segment.kind, prices.overlap, can_split)
        {
            for (at, split) in BucketSplit::SPLITS.into_iter().enumerate() {
                count_split(&mut ops, (at, split), &space.segment, (context, prices, slowdown));
            }
        }
        let sharding_min = match context.shards_gradients() {
            true => add_sharding_times(space, context, prices, &mut ops),
            false => ShardingMin::default(),
        };
        StepPhases { ops, sharding_min }
    }

    pub(crate) fn of(&self, id: OpId, strategy: Strategy) -> OpStep {
        let step = self.ops[id.0 as usize].iter().find(|(known, _)| *known == strategy);
        step.map(|(_, step)| *step).unwrap_or_default()
    }

    /// Adds the step phase, the least that sharded parameters add to the passes, and the resident bytes of a choice in
    /// this context.
    pub fn add_to(
        &self,
        choice: &SegmentChoice,
        (context, prices): (&Context, StreamPrices),
        time: &mut SegmentTime,
        bytes: &mut SegmentBytes,
    ) {
        let chosen = choice.ops.iter().enumerate();
        let steps: Vec<OpStep> =
            chosen.map(|(op, option)| self.of(OpId(op as u32), option.choice.strategy)).collect();
        let mut exact = OpStep::default();
        for step in &steps {
            time.step_phase += step.time;
            time.forward += step.sharding.forward();
            time.backward += step.sharding.backward();
            bytes.resident += step.resident;
            exact.own.reduction += step.own.reduction;
        }
        let coalesced: Vec<CoalescedBytes> = steps.iter().map(|step| step.coalesced).collect();
        let mut shared = CoalescedTime::of_ops(&coalesced, context, prices);
        for step in &steps {
            let casts = if step.coalesced.overlaps {
                &mut shared.overlapped
            } else {
                &mut shared.reduction
            };
            *casts += step.own.casts;
        }
        exact.count(shared, prices.overlap);
        time.update += exact.update;
        time.overlapped += exact.overlapped;
        time.gathered += exact.gathered;
        time.uncounted += exact.time - steps.iter().map(|step| step.time).sum();
    }

    /// The buckets of a choice of a block that is the first of a stage, for each of [`BucketSplit::SPLITS`].
    pub fn split_buckets(
        &self,
        space: &SegmentSpace,
        choice: &SegmentChoice,
        (context, prices): (&Context, StreamPrices),
    ) -> [SplitBucketTime; BucketSplit::SPLITS.len()] {
        let order = OpOrder::new(space, choice, prices);
        BucketSplit::SPLITS
            .map(|split| self.split_bucket(split, (space, choice), &order, (context, prices)))
    }

    fn split_bucket(
        &self,
        split: BucketSplit,
        (space, choice): (&SegmentSpace, &SegmentChoice),
        order: &OpOrder,
        (context, prices): (&Context, StreamPrices),
    ) -> SplitBucketTime {
        let segment = &space.segment;
        let ops = || {
            let strategy = |op: OpId| choice.ops[op.0 as usize].choice.strategy;
            segment.op_ids().map(move |op| (op, self.of(op, strategy(op))))
        };
        let coalesced = |ops: &[(OpId, OpStep)]| {
            let bytes: Vec<CoalescedBytes> = ops.iter().map(|(_, step)| step.coalesced).collect();
            CoalescedTime::of_ops(&bytes, context, prices)
        };
        let reduction = |ops: &[(OpId, OpStep)]| -> Seconds {
            let casts: Seconds = ops.iter().map(|(_, step)| step.own.casts).sum();
            coalesced(ops).overlapped + casts
        };
        let gradients =
            split_bucket(split, segment, ops().filter(|(_, step)| step.coalesced.overlaps));
        let early = |ops: &Vec<(OpId, OpStep)>| {
            let last = ops.last().map(|(op, _)| *op);
            let [backward, weight_gradient] =
                last.map_or_else(Default::default, |last| order.gradient_complete(last));
            EarlyBucket { backward, weight_gradient, reduction: reduction(ops) }
        };
        let early = gradients.rest.iter().map(early).collect();
        let gathered = ops().filter(|(_, step)| step.coalesced.is_gathered_in_forward());
        let weights = split_bucket(split, segment, gathered);
        let gather = |ops: &Vec<(OpId, OpStep)>| {
            let reader = ops.iter().map(|(op, _)| *op).min()?;
            let needed = order.before_weight(reader);
            Some(GatherTime { needed, gather: coalesced(ops).gather_in_forward })
        };
        let in_order = [&weights.first].into_iter().chain(weights.rest.iter().rev());
        let gathers = in_order.filter_map(gather).collect();
        SplitBucketTime { early, late: reduction(&gradients.first), gathers }
    }

    /// Lower bound over all choices on the time that the gradient reductions of a stage's first block add to a step, beyond the
    /// least that other blocks add, with the bucket whole or split.
    pub fn first_block_min(
        &self,
        segment: &Segment,
        context: &Context,
        prices: StreamPrices,
    ) -> Seconds {
        let Some(slowdown) = prices.overlap else { return Seconds(0.0) };
        let hidden = slowdown.hidden_cost();
        let [least, most] = self.range(|step| step.overlapped);
        let split = |split| {
            let [first, rest] =
                self.split_min(split, segment, &|ops| reduction_min(ops, context, prices));
            // The step phase of an op counts the hidden time of the whole bucket. Several buckets take no less time.
            (first * (1.0 - hidden)).0.max((first + (rest - most) * hidden).0)
        };
        let whole = (least * (1.0 - hidden)).0;
        let splits =
            BucketSplit::SPLITS.into_iter().filter(|_| context.can_split_gradient_bucket());
        Seconds(splits.map(split).fold(whole, f64::min).max(0.0))
    }

    /// Lower bounds over all choices on the gathers of a stage's first block, for each of [`BucketSplit::ALL`]: the first bucket,
    /// and the time of all buckets beyond that of a whole one.
    pub fn first_gathers_min(
        &self,
        segment: &Segment,
        context: &Context,
        prices: StreamPrices,
    ) -> [[Seconds; 2]; BucketSplit::ALL.len()] {
        let [_, most] = self.range(|step| step.gathered);
        BucketSplit::ALL.map(|split| {
            let [first, rest] =
                self.split_min(split, segment, &|ops| gather_min(ops, context, prices));
            [first, Seconds((first + rest - most).0.max(0.0))]
        })
    }

    /// The first op whose updated weight is gathered during the next forward pass under every strategy.
    pub(crate) fn first_gathered(&self) -> Option<OpId> {
        let is_gathered = |steps: &Vec<(Strategy, OpStep)>| {
            let mut steps = steps.iter().map(|(_, step)| step.coalesced.is_gathered_in_forward());
            steps.next() == Some(true) && steps.all(|is_gathered| is_gathered)
        };
        self.ops.iter().position(is_gathered).map(|op| OpId(op as u32))
    }

    /// Lower bounds on the first and on the other parts of a bucket.
    fn split_min(
        &self,
        split: BucketSplit,
        segment: &Segment,
        least: &dyn Fn(&[OpAlternatives]) -> Seconds,
    ) -> [Seconds; 2] {
        let ops = segment.op_ids().map(|op| (op, &self.ops[op.0 as usize]));
        let parts = split_bucket(split, segment, ops);
        [least(&parts.first), parts.rest.iter().map(|part| least(part)).sum()]
    }

    /// The sums over the ops of their least and of their largest times.
    fn range(&self, time: impl Fn(&OpStep) -> Seconds) -> [Seconds; 2] {
        let extreme = |pick: fn(f64, f64) -> f64| -> Seconds {
            let of_op = |steps: &Vec<(Strategy, OpStep)>| {
                let times = steps.iter().map(|(_, step)| time(step).0);
                Seconds(times.reduce(pick).unwrap_or(0.0))
            };
            self.ops.iter().map(of_op).sum()
        };
        [extreme(f64::min), extreme(f64::max)]
    }

    /// Lower bounds on the time that sharded parameters add to the passes of one microbatch.
    pub fn sharding_min(&self) -> ShardingMin {
        self.sharding_min
    }

    /// Lower and upper bound of the segment's reductions during the last backward pass.
    pub fn overlapped_range(&self) -> [Seconds; 2] {
        self.range(|step| step.overlapped)
    }

    /// Upper bound on the segment's gathers during the next forward pass.
    pub fn gathered_max(&self) -> Seconds {
        self.range(|step| step.gathered)[1]
    }

    /// Upper bounds on the collectives of sharded parameters beside a forward and a backward pass of one microbatch, alone.
    pub fn sharded_max(&self) -> [Seconds; 2] {
        [0, 1].map(|at| self.range(|step| step.sharding.collectives()[at])[1])
    }

    /// Lower and upper bound of the segment's time in the step phase: sums of each op's least and largest time.
    pub fn bounds(&self) -> [Seconds; 2] {
        self.range(|step| step.time)
    }
}

/// An op with its step phase under each strategy.
type OpAlternatives<'a> = (OpId, &'a Vec<(Strategy, OpStep)>);

/// Lower bound on the reductions of a bucket over the strategies of its ops.
fn reduction_min(ops: &[OpAlternatives], context: &Context, prices: StreamPrices) -> Seconds {
    shared_min(ops, context, prices, |step, shared| shared.overlapped + step.overlapped_casts())
}

/// Lower bound on the gather of a bucket over the strategies of its ops.
fn gather_min(ops: &[OpAlternatives], context: &Context, prices: StreamPrices) -> Seconds {
    shared_min(ops, context, prices, |_, shared| shared.gather_in_forward)
}

fn shared_min(
    ops: &[OpAlternatives],
    context: &Context,
    prices: StreamPrices,
    time: impl Fn(&OpStep, CoalescedTime) -> Seconds,
) -> Seconds {
    let bounds = coalesced_bounds(ops.iter().map(|(_, steps)| *steps), context, prices);
    let of_op = |(at, (_, steps)): (usize, &OpAlternatives)| {
        let shared = |step: &OpStep| bounds.share(at, &step.coalesced);
        let times = steps.iter().map(|(_, step)| time(step, shared(step)).0);
        Seconds(times.reduce(f64::min).unwrap_or(0.0))
    };
    ops.iter().enumerate().map(of_op).sum()
}

/// Lower bounds on the collectives and fused ops that ops share; of each op, the steps under each of its strategies.
fn coalesced_bounds<'a>(
    ops: impl IntoIterator<Item = &'a Vec<(Strategy, OpStep)>>,
    context: &Context,
    prices: StreamPrices,
) -> CoalescedBounds {
    let bytes =
        |steps: &Vec<(Strategy, OpStep)>| steps.iter().map(|(_, step)| step.coalesced).collect();
    CoalescedBounds::new(&ops.into_iter().map(bytes).collect::<Vec<_>>(), context, prices)
}

impl OpStep {
    /// The weighted time of the step phase, and of what the op adds to passes where parameters are sharded.
    pub(crate) fn weighted(&self, weights: &StepWeights) -> Seconds {
        self.time * weights.step_phase
            + self.update * weights.update
            + self.gathered * weights.gathered
            + self.overlapped * weights.overlapped
            + self.sharding.weighted(weights)
            + self.of_splits(weights)
    }

    fn of_splits(&self, weights: &StepWeights) -> Seconds {
        let gathers = self.split_gathers.iter().zip(weights.split_gathers);
        let reductions = self.split_reductions.iter().zip(weights.split_reductions);
        gathers.chain(reductions).map(|(time, weight)| *time * weight).sum()
    }

    /// Casts around a reduction during the last backward pass: other gradients are reduced in the step phase.
    fn overlapped_casts(&self) -> Seconds {
        if self.coalesced.overlaps { self.own.casts } else { Seconds(0.0) }
    }

    /// Counts times in the collectives and fused ops that the ops of a segment share, after the op's own work.
    fn count(&mut self, shared: CoalescedTime, slowdown: Option<OverlapSlowdown>) {
        let OwnStep { reduction, casts } = self.own;
        let overlapped_casts = self.overlapped_casts();
        let other_casts = casts - overlapped_casts;
        let overlapped = shared.overlapped + overlapped_casts;
        self.update = shared.update + shared.gather;
        self.time = reduction + other_casts + shared.reduction + shared.squares;
        match slowdown {
            Some(slowdown) => {
                (self.overlapped, self.gathered) = (overlapped, shared.gather_in_forward);
                self.time += (self.overlapped + self.gathered) * slowdown.hidden_cost();
            }
            None => {
                self.time += overlapped;
                self.update += shared.gather_in_forward;
            }
        }
        self.time += self.update;
    }
}

/// Counts the gathers and the reductions of a stage's first block whose buckets are split. Several buckets take no less time than
/// one, so all but the first count as one.
fn count_split(
    ops: &mut [Vec<(Strategy, OpStep)>],
    (at, split): (usize, BucketSplit),
    segment: &Segment,
    (context, prices, slowdown): (&Context, StreamPrices, OverlapSlowdown),
) {
    let SplitBucket { first, rest } =
        split_bucket(split, segment, segment.op_ids().map(|op| (op, ())));
    for (bucket, part) in [(first, 1.0), (rest.concat(), slowdown.hidden_cost())] {
        let of_bucket = bucket.iter().map(|(op, ())| op.0 as usize);
        let bounds = coalesced_bounds(of_bucket.clone().map(|op| &ops[op]), context, prices);
        for (index, op) in of_bucket.enumerate() {
            for (_, step) in &mut ops[op] {
                let shared = bounds.share(index, &step.coalesced);
                step.split_gathers[at] = shared.gather_in_forward * part;
                step.split_reductions[at] = (shared.overlapped + step.overlapped_casts()) * part;
            }
        }
    }
}

/// The step phase of an op without the collectives and fused ops that it shares.
fn op_step(
    space: &SegmentSpace,
    (context, id, strategy): (&Context, OpId, Strategy),
    price: KernelPrice,
) -> OpStep {
    let Some(parameters) = space.parameters(id, strategy, context) else {
        return OpStep::default();
    };
    let sum = |templates: &[Option<InstrTemplate>]| -> Seconds {
        templates.iter().flatten().map(|template| price(&template.kernel())).sum()
    };
    let casts = [round_gradient(&parameters, context), widen_gradient(&parameters, context)];
    let own =
        OwnStep { reduction: sum(&[reduce_over_tensor(&parameters, context)]), casts: sum(&casts) };
    let segment = (space.segment.kind, &space.segment.op(id).op);
    OpStep {
        own,
        resident: parameters.resident_bytes(context),
        coalesced: CoalescedBytes::new(segment, &parameters, space.tied, context),
        ..OpStep::default()
    }
}

/// Adds the times of the collectives of sharded parameters, by strategy of each op. Returns lower bounds.
fn add_sharding_times(
    space: &SegmentSpace,
    context: &Context,
    prices: StreamPrices,
    steps: &mut [Vec<(Strategy, OpStep)>],
) -> ShardingMin {
    let parameters = |op: usize, strategy| space.parameters(OpId(op as u32), strategy, context);
    let of_ops: Vec<Vec<OpParameters>> = steps
        .iter()
        .enumerate()
        .map(|(op, steps)| steps.iter().filter_map(|(of, _)| parameters(op, *of)).collect())
        .collect();
    let sharding = ShardingPrices::new(&of_ops, context, prices);
    for (op, steps) in steps.iter_mut().enumerate() {
        for (strategy, step) in steps {
            if let Some(parameters) = parameters(op, *strategy) {
                let node = space.segment.op(OpId(op as u32));
                step.sharding = sharding.of(op, &node.op, &parameters);
            }
        }
    }
    sharding.least
}
