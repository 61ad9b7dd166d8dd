//! Prices of the collectives and fused ops that the parameters of a segment share in the step phase.
//!
//! A segment has one collective of each kind for all of its parameters, one sum of squares and one update, so the time of each
//! depends on the sum of their bytes and is no sum over ops. Tables count a [`BytesBound`] below it, which is such a sum, and
//! exact where all choices have the same bytes, as on one device of the tensor axis. Gradients that are reduced during the last
//! backward pass and the others have collectives of their own, as have weights that are gathered during the next forward pass
//! and the others.

use narrows_plan::emit::{
    CoalescedCollective, MultiTensorOp, count_square, is_gathered_in_forward,
    is_gradient_overwritten, is_reduced_in_backward, update_parameter,
};
use narrows_plan::graph::{Op, SegmentKind};
use narrows_plan::program::Action;
use narrows_plan::strategy::OpParameters;
use narrows_plan::{Bytes, Context, Seconds};

use crate::bytes_bound::BytesBound;
use crate::price::StreamPrices;

/// Bytes of an op's parameters in the collectives and in the fused ops of the step phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CoalescedBytes {
    /// Whether the gradient is reduced during the last backward pass.
    pub overlaps: bool,
    reductions: [Bytes; 2],
    /// Weights gathered during the next forward pass, and weights gathered in the step phase.
    gathers: [Bytes; 2],
    /// Traffic of the sum of squares.
    squares: Bytes,
    /// Traffic of the update.
    update: Bytes,
}

/// Times in the collectives and in the fused ops of the step phase.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct CoalescedTime {
    /// Reductions during the last backward pass.
    pub overlapped: Seconds,
    /// Other reductions.
    pub reduction: Seconds,
    /// Gathers of updated weights during the next forward pass.
    pub gather_in_forward: Seconds,
    /// Other gathers of updated weights.
    pub gather: Seconds,
    /// The sum of squares.
    pub squares: Seconds,
    /// The update.
    pub update: Seconds,
}

/// Lower bounds on the times of a segment's collectives and fused ops.
#[derive(Clone, Debug, Default)]
pub(crate) struct CoalescedBounds {
    /// Reductions: during the last backward pass, after it.
    reductions: [[BytesBound; 2]; 2],
    /// Gathers: during the next forward pass, in the step phase.
    gathers: [BytesBound; 2],
    squares: BytesBound,
    update: BytesBound,
}

impl CoalescedBytes {
    /// The bytes of the parameters of an op of a segment.
    pub(crate) fn new(
        (kind, op): (SegmentKind, &Op),
        parameters: &OpParameters,
        tied: bool,
        context: &Context,
    ) -> CoalescedBytes {
        let bytes = |collective: CoalescedCollective| {
            let operand = collective.operand(parameters, context);
            operand.map_or(Bytes(0), |operand| operand.extent.bytes())
        };
        let in_forward = is_gathered_in_forward(kind, parameters, tied, context);
        let gathered = bytes(CoalescedCollective::AllGather);
        let square = count_square(kind, parameters, tied, context);
        let is_overwritten = is_gradient_overwritten(op, parameters, context);
        CoalescedBytes {
            overlaps: is_reduced_in_backward(kind, parameters, tied, context),
            reductions: CoalescedCollective::REDUCTIONS.map(bytes),
            gathers: if in_forward { [gathered, Bytes(0)] } else { [Bytes(0), gathered] },
            squares: square.map_or(Bytes(0), |operands| operands.traffic()),
            update: update_parameter(parameters, is_overwritten, context).traffic(),
        }
    }

    /// Whether weights are gathered during the next forward pass.
    pub(crate) fn is_gathered_in_forward(&self) -> bool {
        self.gathers[0].0 > 0
    }

    fn reduced(&self, overlaps: bool, reduction: usize) -> Bytes {
        if self.overlaps == overlaps { self.reductions[reduction] } else { Bytes(0) }
    }
}

impl CoalescedTime {
    /// The exact times of a segment whose ops have these parameters.
    pub(crate) fn of_ops(
        ops: &[CoalescedBytes],
        context: &Context,
        prices: StreamPrices,
    ) -> CoalescedTime {
        let time = |collective, bytes: &dyn Fn(&CoalescedBytes) -> Bytes| {
            Seconds(collective_time(collective, ops.iter().map(bytes).sum(), context, prices))
        };
        let reductions = |overlaps: bool| -> Seconds {
            let indexed = CoalescedCollective::REDUCTIONS.into_iter().enumerate();
            indexed.map(|(at, kind)| time(kind, &|op| op.reduced(overlaps, at))).sum()
        };
        let [gather_in_forward, gather] =
            [0, 1].map(|at| time(CoalescedCollective::AllGather, &|op| op.gathers[at]));
        let fused_op = |op, traffic: &dyn Fn(&CoalescedBytes) -> Bytes| {
            let of_ops: Vec<Bytes> = ops.iter().map(traffic).collect();
            let parameters = of_ops.iter().filter(|bytes| bytes.0 > 0).count();
            Seconds(multi_tensor_time((op, parameters), of_ops.into_iter().sum(), prices))
        };
        CoalescedTime {
            overlapped: reductions(true),
            reduction: reductions(false),
            gather_in_forward,
            gather,
            squares: fused_op(MultiTensorOp::SquareSum, &|op| op.squares),
            update: fused_op(MultiTensorOp::AdamW, &|op| op.update),
        }
    }
}

impl CoalescedBounds {
    /// The bounds of a segment; of each op, the bytes under each of its strategies.
    pub(crate) fn new(
        ops: &[Vec<CoalescedBytes>],
        context: &Context,
        prices: StreamPrices,
    ) -> CoalescedBounds {
        let of_ops = |bytes: &dyn Fn(&CoalescedBytes) -> Bytes| -> Vec<Vec<Bytes>> {
            ops.iter().map(|strategies| strategies.iter().map(bytes).collect()).collect()
        };
        let bound = |collective, bytes: &dyn Fn(&CoalescedBytes) -> Bytes| {
            let time = |payload| collective_time(collective, payload, context, prices);
            BytesBound::below(&of_ops(bytes), time)
        };
        let fused_op = |op, traffic: &dyn Fn(&CoalescedBytes) -> Bytes| {
            let of_ops = of_ops(traffic);
            let takes_part = |bytes: &&Vec<Bytes>| bytes.iter().all(|bytes| bytes.0 > 0);
            let parameters = of_ops.iter().filter(takes_part).count();
            let time = |traffic| multi_tensor_time((op, parameters), traffic, prices);
            BytesBound::below(&of_ops, time)
        };
        let reductions = |overlaps: bool| {
            [0, 1].map(|at| {
                let collective = CoalescedCollective::REDUCTIONS[at];
                bound(collective, &|op| op.reduced(overlaps, at))
            })
        };
        CoalescedBounds {
            reductions: [true, false].map(reductions),
            gathers: [0, 1].map(|at| bound(CoalescedCollective::AllGather, &|op| op.gathers[at])),
            squares: fused_op(MultiTensorOp::SquareSum, &|op| op.squares),
            update: fused_op(MultiTensorOp::AdamW, &|op| op.update),
        }
    }

    /// The share of the op with this index.
    pub(crate) fn share(&self, op: usize, bytes: &CoalescedBytes) -> CoalescedTime {
        let reductions = |overlaps: bool| -> Seconds {
            let bounds = self.reductions[usize::from(!overlaps)].iter().enumerate();
            bounds.map(|(at, bound)| bound.share(op, bytes.reduced(overlaps, at))).sum()
        };
        let [gather_in_forward, gather] =
            [0, 1].map(|at| self.gathers[at].share(op, bytes.gathers[at]));
        CoalescedTime {
            overlapped: reductions(true),
            reduction: reductions(false),
            gather_in_forward,
            gather,
            squares: self.squares.share(op, bytes.squares),
            update: self.update.share(op, bytes.update),
        }
    }
}

/// The time of a collective of operands of this many bytes together, in seconds; zero without any.
fn collective_time(
    collective: CoalescedCollective,
    payload: Bytes,
    context: &Context,
    prices: StreamPrices,
) -> f64 {
    if payload.0 == 0 {
        return 0.0;
    }
    let action = Action::Collective(collective.op(payload, context));
    (prices.kernel)(&action.kernel(&[], &[])).0
}

/// The time of a fused op on so many parameters, whose operands have this traffic together, in seconds; zero without any.
fn multi_tensor_time(
    (op, parameters): (MultiTensorOp, usize),
    traffic: Bytes,
    prices: StreamPrices,
) -> f64 {
    if traffic.0 == 0 { 0.0 } else { (prices.kernel)(&op.kernel(traffic, parameters as u64)).0 }
}
