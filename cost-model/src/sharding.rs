//! Work that ZeRO-2 and ZeRO-3 add to the passes of a block: all-gathers of its weights, reduce-scatters of its gradients
//! with the casts before them, and the addition of the reduced parts.
//!
//! A block has one collective of each kind for all of its parameters, so its price is not a sum over ops. Each op
//! counts a share of a [`BytesBound`] below it, which is exact where all choices have the same bytes, as on one device of the
//! tensor axis. A collective overlapped with computation counts the least time it can add. The additions count for none of the
//! ops; a step of one microbatch has them only with rounded gradients.

use narrows_plan::emit::{
    accumulate_gradient_part, all_gather, reduce_scatter, round_microbatch_gradient,
    zero_microbatch_gradient,
};
use narrows_plan::graph::Op;
use narrows_plan::program::{Action, CollectiveOp, Extent};
use narrows_plan::strategy::OpParameters;
use narrows_plan::{Bytes, Context, Seconds};

use crate::bytes_bound::BytesBound;
use crate::price::{KernelPrice, StreamPrices};
use crate::segment_time::StepWeights;

/// Work that the sharded parameters of an op add to the passes of one microbatch, without the additions of reduced parts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ShardingTime {
    /// The op's share of a gather of the block's weights, alone.
    gather: Seconds,
    /// The op's share of the reduction of the block's gradients, alone.
    reduction: Seconds,
    /// Casts around the reduction.
    casts: Seconds,
    /// The part of a collective's time that it adds to the pass at least.
    counted: f64,
}

impl ShardingTime {
    /// The op's shares of collectives beside a forward and a backward pass, alone.
    pub(crate) fn collectives(&self) -> [Seconds; 2] {
        [self.gather, self.gather + self.reduction]
    }

    /// The least that the op adds to a forward pass.
    pub(crate) fn forward(&self) -> Seconds {
        self.collectives()[0] * self.counted
    }

    /// The least that the op adds to a backward pass.
    pub(crate) fn backward(&self) -> Seconds {
        self.collectives()[1] * self.counted + self.casts
    }

    /// The weighted time.
    pub(crate) fn weighted(&self, weights: &StepWeights) -> Seconds {
        self.gather * weights.sharded_gathers
            + self.reduction * weights.sharded_reductions
            + self.casts * (weights.backward + weights.weight_gradient)
    }
}

/// Lower bounds on the work that sharded parameters of a segment add to the passes of one microbatch.
#[derive(Clone, Copy, Debug, Default)]
pub struct ShardingMin {
    /// A gather of the weights, alone.
    pub gather: Seconds,
    /// The reduction of the gradients, alone.
    pub reduction: Seconds,
    /// The additions of the reduced parts to the parts of earlier microbatches.
    pub additions: Seconds,
}

impl ShardingMin {
    /// The smaller value of each field.
    pub fn min(self, other: ShardingMin) -> ShardingMin {
        let least = |a: Seconds, b: Seconds| Seconds(a.0.min(b.0));
        ShardingMin {
            gather: least(self.gather, other.gather),
            reduction: least(self.reduction, other.reduction),
            additions: least(self.additions, other.additions),
        }
    }
}

/// Prices of the sharded parameters of a block.
pub(crate) struct ShardingPrices<'a> {
    context: &'a Context,
    price: KernelPrice<'a>,
    /// The part of a collective's time that it adds to the pass at least.
    counted: f64,
    /// The gather of the weights, and the reduction of the gradients.
    bounds: [BytesBound; 2],
    pub least: ShardingMin,
}

/// The bytes of an op's parameters in a collective.
type CollectiveBytes = fn(&OpParameters, &Context) -> Bytes;

impl<'a> ShardingPrices<'a> {
    /// The prices of a block with these parameters, for each op under each of its strategies.
    pub(crate) fn new(
        ops: &[Vec<OpParameters>],
        context: &'a Context,
        prices: StreamPrices<'a>,
    ) -> ShardingPrices<'a> {
        let counted = match prices.overlap {
            Some(slowdown) if context.overlap_grad_reduce => slowdown.hidden_cost(),
            _ => 1.0,
        };
        let bound = |bytes: CollectiveBytes, collective: fn(Bytes, &Context) -> CollectiveOp| {
            let of_op = |op: &Vec<OpParameters>| op.iter().map(|of| bytes(of, context)).collect();
            let of_ops: Vec<Vec<Bytes>> = ops.iter().map(of_op).collect();
            BytesBound::below(&of_ops, |payload| {
                let action = Action::Collective(collective(payload, context));
                (prices.kernel)(&action.kernel(&[], &[])).0
            })
        };
        let bounds = [bound(gathered_bytes, all_gather), bound(reduced_bytes, reduce_scatter)];
        let least = ShardingMin {
            gather: bounds[0].least(),
            reduction: bounds[1].least(),
            additions: ops.iter().map(|op| additions_min(op, context, prices)).sum(),
        };
        ShardingPrices { context, price: prices.kernel, counted, bounds, least }
    }

    /// The least that the parameters of an op add, by its index among the ops.
    pub(crate) fn of(&self, at: usize, op: &Op, parameters: &OpParameters) -> ShardingTime {
        let [gather, reduction] = [
            self.bounds[0].share(at, gathered_bytes(parameters, self.context)),
            self.bounds[1].share(at, reduced_bytes(parameters, self.context)),
        ];
        let casts = match parameters.has_sharded_gradient(self.context) {
            true => [
                zero_microbatch_gradient(op, parameters, self.context),
                round_microbatch_gradient(op, parameters, self.context),
            ],
            false => [None, None],
        };
        ShardingTime {
            gather,
            reduction,
            casts: casts.iter().flatten().map(|template| (self.price)(&template.kernel())).sum(),
            counted: self.counted,
        }
    }
}

/// Lower bound on the addition of an op's reduced parts, over its strategies; zero where replicas do not shard its gradient.
fn additions_min(strategies: &[OpParameters], context: &Context, prices: StreamPrices) -> Seconds {
    let time = |parameters: &OpParameters| match parameters.has_sharded_gradient(context) {
        true => (prices.kernel)(&accumulate_gradient_part(parameters, context).kernel()).0,
        false => 0.0,
    };
    Seconds(strategies.iter().map(time).reduce(f64::min).unwrap_or(0.0))
}

/// Bytes of the gathered weight of an op; none where replicas do not shard it.
pub(crate) fn gathered_bytes(parameters: &OpParameters, context: &Context) -> Bytes {
    match parameters.has_sharded_weight(context) {
        true => parameters.whole_weight_extent(context).bytes(),
        false => Bytes(0),
    }
}

/// Bytes of an op's gradient for one microbatch, in the format of its reduction; none where replicas do not shard it.
pub(crate) fn reduced_bytes(parameters: &OpParameters, context: &Context) -> Bytes {
    let Extent { rows, columns, .. } = parameters.whole_gradient_extent(context);
    match parameters.has_sharded_gradient(context) {
        true => context.grad_reduce_dtype.dtype().bytes(rows * columns),
        false => Bytes(0),
    }
}
