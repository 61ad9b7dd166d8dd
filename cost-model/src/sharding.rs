//! Work that ZeRO-2 and ZeRO-3 add to the passes of a block: all-gathers of its weights, reduce-scatters of its gradients
//! with the casts before them, and the addition of the reduced parts.
//!
//! A block has one collective of each kind for all of its parameters, so its price is not a sum over ops. Each op
//! counts with its bytes at the least time per byte that the block's choices allow: exact where all choices have the same
//! bytes, as on one device of the tensor axis, and a lower bound otherwise. A collective overlapped with computation
//! counts the least time it can add. The additions count for none of the ops; a step of one microbatch has them only
//! with rounded gradients.

use narrows_plan::emit::{
    accumulate_gradient_part, all_gather, reduce_scatter, round_microbatch_gradient,
    zero_microbatch_gradient,
};
use narrows_plan::graph::Op;
use narrows_plan::program::{Action, CollectiveOp, Extent};
use narrows_plan::strategy::OpParameters;
use narrows_plan::{Bytes, Context, Seconds};

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
    /// Seconds per byte of gathered weights and of reduced gradients.
    per_byte: [f64; 2],
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
        let [gather, reduction] = [
            CollectiveRange::new(ops, (gathered_bytes, all_gather), context, prices),
            CollectiveRange::new(ops, (reduced_bytes, reduce_scatter), context, prices),
        ];
        let least = ShardingMin {
            gather: gather.least,
            reduction: reduction.least,
            additions: ops.iter().map(|op| additions_min(op, context, prices)).sum(),
        };
        let per_byte = [gather.per_byte, reduction.per_byte];
        ShardingPrices { context, price: prices.kernel, counted, per_byte, least }
    }

    /// The least that the parameters of an op add.
    pub(crate) fn of(&self, op: &Op, parameters: &OpParameters) -> ShardingTime {
        let gather = self.per_byte[0] * gathered_bytes(parameters, self.context).as_f64();
        let reduction = self.per_byte[1] * reduced_bytes(parameters, self.context).as_f64();
        let casts = match parameters.has_sharded_gradient(self.context) {
            true => [
                zero_microbatch_gradient(op, parameters, self.context),
                round_microbatch_gradient(op, parameters, self.context),
            ],
            false => [None, None],
        };
        ShardingTime {
            gather: Seconds(gather),
            reduction: Seconds(reduction),
            casts: casts.iter().flatten().map(|template| (self.price)(&template.kernel())).sum(),
            counted: self.counted,
        }
    }
}

/// The collective of a block over all choices of its ops.
#[derive(Default)]
struct CollectiveRange {
    /// Lower bound on its time.
    least: Seconds,
    /// Lower bound on its time per byte, in seconds.
    per_byte: f64,
}

impl CollectiveRange {
    fn new(
        ops: &[Vec<OpParameters>],
        (bytes, collective): (CollectiveBytes, fn(Bytes, &Context) -> CollectiveOp),
        context: &Context,
        prices: StreamPrices,
    ) -> CollectiveRange {
        let total = |pick: fn(u64, u64) -> u64| -> Bytes {
            let of_op = |strategies: &Vec<OpParameters>| {
                let bytes = strategies.iter().map(|op| bytes(op, context).0).reduce(pick);
                Bytes(bytes.unwrap_or(0))
            };
            ops.iter().map(of_op).sum()
        };
        let [least, most] = [total(u64::min), total(u64::max)];
        if least.0 == 0 {
            return CollectiveRange::default();
        }
        let time = |payload| {
            let action = Action::Collective(collective(payload, context));
            (prices.kernel)(&action.kernel(&[], &[])).0
        };
        let [shortest, longest] = [time(least), time(most)];
        CollectiveRange {
            least: Seconds(shortest.min(longest)),
            // A time per byte falls with the bytes: latency is shared by more of them.
            per_byte: (shortest / least.as_f64()).min(longest / most.as_f64()),
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
