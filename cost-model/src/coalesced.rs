//! Prices of the collectives and fused ops that the parameters of a segment share in the step phase.
//!
//! A segment has one collective of each kind for all of its parameters, one sum of squares and one update, so the time f(b)
//! of each depends on the sum b of their bytes and is no sum over ops. Tables count a line below f, which is such a sum:
//!
//! ```text
//! fixed + per_byte·b ≤ f(b)    for all b that the choices of the ops allow
//! ```
//! Each op counts `per_byte` for its bytes, and one op that always takes part counts `fixed` too. The line is exact where
//! all choices have the same bytes, as on one device of the tensor axis. Gradients that are reduced during the last backward
//! pass and the others have collectives of their own, as have weights that are gathered during the next forward pass and
//! the others.

use narrows_plan::emit::{
    CoalescedCollective, MultiTensorOp, count_square, is_gathered_in_forward,
    is_gradient_overwritten, is_reduced_in_backward, update_parameter,
};
use narrows_plan::graph::{Op, SegmentKind};
use narrows_plan::program::Action;
use narrows_plan::strategy::OpParameters;
use narrows_plan::{Bytes, Context, Seconds};

use crate::price::StreamPrices;

/// Points between the fewest and the most bytes at which a line is compared with prices. Between them, prices are
/// concave but for corrections by measurements.
const SAMPLES: u32 = 16;

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

/// The lines of a segment's collectives and fused ops.
#[derive(Clone, Debug, Default)]
pub(crate) struct CoalescedLines {
    /// Reductions: during the last backward pass, after it.
    reductions: [[CoalescedLine; 2]; 2],
    /// Gathers: during the next forward pass, in the step phase.
    gathers: [CoalescedLine; 2],
    squares: CoalescedLine,
    update: CoalescedLine,
}

/// A line below the time of a collective or of a fused op.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct CoalescedLine {
    /// The op that counts `fixed`, by index.
    carrier: Option<usize>,
    /// Seconds.
    fixed: f64,
    /// Seconds per byte.
    per_byte: f64,
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

impl CoalescedLines {
    /// The lines of a segment; of each op, the bytes under each of its strategies.
    pub(crate) fn new(
        ops: &[Vec<CoalescedBytes>],
        context: &Context,
        prices: StreamPrices,
    ) -> CoalescedLines {
        let of_ops = |bytes: &dyn Fn(&CoalescedBytes) -> Bytes| -> Vec<Vec<Bytes>> {
            ops.iter().map(|strategies| strategies.iter().map(bytes).collect()).collect()
        };
        let line = |collective, bytes: &dyn Fn(&CoalescedBytes) -> Bytes| {
            let time = |payload| collective_time(collective, payload, context, prices);
            CoalescedLine::below(&of_ops(bytes), time)
        };
        let fused_op = |op, traffic: &dyn Fn(&CoalescedBytes) -> Bytes| {
            let of_ops = of_ops(traffic);
            let takes_part = |bytes: &&Vec<Bytes>| bytes.iter().all(|bytes| bytes.0 > 0);
            let parameters = of_ops.iter().filter(takes_part).count();
            let time = |traffic| multi_tensor_time((op, parameters), traffic, prices);
            CoalescedLine::below(&of_ops, time)
        };
        let reductions = |overlaps: bool| {
            [0, 1].map(|at| {
                let collective = CoalescedCollective::REDUCTIONS[at];
                line(collective, &|op| op.reduced(overlaps, at))
            })
        };
        CoalescedLines {
            reductions: [true, false].map(reductions),
            gathers: [0, 1].map(|at| line(CoalescedCollective::AllGather, &|op| op.gathers[at])),
            squares: fused_op(MultiTensorOp::SquareSum, &|op| op.squares),
            update: fused_op(MultiTensorOp::AdamW, &|op| op.update),
        }
    }

    /// The share of the op with this index.
    pub(crate) fn share(&self, op: usize, bytes: &CoalescedBytes) -> CoalescedTime {
        let reductions = |overlaps: bool| -> Seconds {
            let lines = self.reductions[usize::from(!overlaps)].iter().enumerate();
            lines.map(|(at, line)| line.share(op, bytes.reduced(overlaps, at))).sum()
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

impl CoalescedLine {
    /// A line below `time`, for any choice of one of the bytes of each op.
    fn below(ops: &[Vec<Bytes>], time: impl Fn(Bytes) -> f64) -> CoalescedLine {
        let extreme = |op: &Vec<Bytes>, pick: fn(Bytes, Bytes) -> Bytes| {
            op.iter().copied().reduce(pick).unwrap_or_default()
        };
        let most: Bytes = ops.iter().map(|op| extreme(op, Bytes::max)).sum();
        let least: Bytes = ops.iter().map(|op| extreme(op, Bytes::min)).sum();
        if most.0 == 0 {
            return CoalescedLine::default();
        }
        let carrier = ops.iter().position(|op| extreme(op, Bytes::min).0 > 0);
        // Without an op that always takes part, any nonzero choice may be alone.
        let nonzero = ops.iter().flatten().copied().filter(|bytes| bytes.0 > 0);
        let least = if carrier.is_some() { least } else { nonzero.min().unwrap_or(most) };
        let ratio = (most.as_f64() / least.as_f64()).powf(1.0 / f64::from(SAMPLES));
        let between = (1..SAMPLES).map(|at| Bytes((least.as_f64() * ratio.powi(at as i32)) as u64));
        let points: Vec<(f64, f64)> = [least, most]
            .into_iter()
            .chain(between.filter(|_| least < most))
            .map(|payload| (payload.as_f64(), time(payload)))
            .collect();
        let minimum =
            |of: &dyn Fn(&(f64, f64)) -> f64| points.iter().map(of).fold(f64::MAX, f64::min);
        let chord = (points[1].1 - points[0].1) / (points[1].0 - points[0].0).max(1.0);
        let per_byte = chord.max(0.0);
        let fixed = minimum(&|(bytes, time)| time - per_byte * bytes);
        if carrier.is_some() && least < most && fixed > 0.0 {
            return CoalescedLine { carrier, fixed, per_byte };
        }
        CoalescedLine {
            carrier: None,
            fixed: 0.0,
            per_byte: minimum(&|(bytes, time)| time / bytes),
        }
    }

    fn share(&self, op: usize, bytes: Bytes) -> Seconds {
        let fixed = if self.carrier == Some(op) { self.fixed } else { 0.0 };
        Seconds(fixed + self.per_byte * bytes.as_f64())
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

#[cfg(test)]
mod tests {
    use narrows_plan::random::SplitMix64;

    use super::*;

    /// The time of a collective with a latency and two protocols.
    fn time(payload: Bytes) -> f64 {
        let bytes = payload.as_f64();
        (20.0 + bytes / 10.0).min(60.0 + bytes / 100.0)
    }

    fn counted(line: &CoalescedLine, chosen: &[Bytes]) -> f64 {
        chosen.iter().enumerate().map(|(op, bytes)| line.share(op, *bytes).0).sum()
    }

    #[test]
    fn equal_bytes_are_priced_exactly() {
        let ops = [vec![Bytes(300), Bytes(300)], vec![Bytes(5000)], vec![Bytes(0)]];
        let line = CoalescedLine::below(&ops, time);
        let chosen = [Bytes(300), Bytes(5000), Bytes(0)];
        assert!((counted(&line, &chosen) - time(Bytes(5300))).abs() < 1e-9);
    }

    #[test]
    fn no_choice_counts_more_than_its_collective() {
        let mut random = SplitMix64::new(5);
        let mut closest = 0.0_f64;
        for _ in 0..2000 {
            let mut draw = |below: u64| random.next_u64() % below;
            let always = draw(2);
            let ops: Vec<Vec<Bytes>> = (0..4)
                .map(|op| {
                    let whole = 1 << draw(16);
                    let least = if op == 0 { always * whole / 4 } else { draw(2) * whole / 2 };
                    vec![Bytes(whole), Bytes(least)]
                })
                .collect();
            let line = CoalescedLine::below(&ops, time);
            for mask in 0..16_usize {
                let chosen: Vec<Bytes> =
                    ops.iter().enumerate().map(|(op, of)| of[mask >> op & 1]).collect();
                let total: Bytes = chosen.iter().copied().sum();
                if total.0 == 0 {
                    continue;
                }
                let (counted, exact) = (counted(&line, &chosen), time(total));
                assert!(counted <= exact * (1.0 + 1e-9), "{chosen:?}: {counted} > {exact}");
                closest = closest.max(counted / exact);
            }
        }
        assert!(closest > 0.999, "{closest}");
    }
}
