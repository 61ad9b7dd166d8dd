//! Times of the alternatives of ops in the passes of one microbatch.

use std::sync::{Arc, OnceLock};

use narrows_plan::emit::{
    ResidualSum, may_defer_weight_gradient, op_backward, op_forward, op_recompute,
};
use narrows_plan::graph::{OpId, ValueId};
use narrows_plan::strategy::{OpChoice, OpOption, SegmentSpace};
use narrows_plan::{Layout, Seconds};

use crate::flow_time::{FlowTimes, residual_sum_time};
use crate::price::{KernelPrice, StreamPrices};
use crate::segment_time::{SegmentTime, sum};

/// The times of every alternative of every op for one microbatch, and of the flows between ops of the segment. They do not
/// depend on the boundary layout. Clones share their contents.
#[derive(Clone, Debug)]
pub struct OpTimes {
    pub(crate) of_options: Arc<[Vec<SegmentTime>]>,
    /// The times of the flows of each value that is no input or output of the segment, once priced.
    pub(crate) of_flows: Arc<[OnceLock<FlowTimes>]>,
    /// Lower bound on the differences that residual sums in GEMMs make to the forward pass, at most 0.
    pub(crate) residual_sums_min: Seconds,
}

impl OpTimes {
    /// Prices every alternative of every op of a space.
    pub fn new(space: &SegmentSpace, prices: StreamPrices) -> OpTimes {
        let of_op = |id| times_of_op(space, id, prices);
        let of_value = |id| residual_sum_min(space, id, prices.kernel);
        OpTimes {
            of_options: space.segment.op_ids().map(of_op).collect(),
            of_flows: space.segment.value_ids().map(|_| OnceLock::new()).collect(),
            residual_sums_min: space.segment.value_ids().map(of_value).sum(),
        }
    }

    /// Lower bound on the forward plus backward time of one microbatch: each op's least. Of flows, it counts the most that
    /// residual sums in GEMMs save in the forward pass: where a sum is recomputed, its linear and its addition take more than
    /// that again. `None` where an op has no alternative.
    pub fn min_pass_time(&self) -> Option<Seconds> {
        let time = |time: &SegmentTime| (time.forward + time.backward).0;
        let of_op = |times: &Vec<SegmentTime>| times.iter().map(time).reduce(f64::min).map(Seconds);
        let ops: Option<Seconds> = self.of_options.iter().map(of_op).sum();
        Some(ops? + self.residual_sums_min)
    }
}

/// The times of options that differ only in whether they are recomputed, for one microbatch; the step phase is left at
/// zero, and weight gradients count as deferrable as if none overlapped with a collective.
pub(crate) fn op_times<'a>(
    space: &'a SegmentSpace,
    id: OpId,
    options: &'a [OpOption],
    prices: StreamPrices<'a>,
) -> impl Iterator<Item = SegmentTime> + 'a {
    let passes = options.first().map(|option| op_passes(space, id, &option.choice, prices));
    let passes = passes.unwrap_or_default();
    options.iter().map(move |option| {
        let mut time = passes;
        if option.recompute {
            time.backward += recompute_time(space, id, &option.choice, prices.recompute);
        }
        time
    })
}

/// The forward and backward pass of one microbatch without recomputation.
fn op_passes(
    space: &SegmentSpace,
    id: OpId,
    choice: &OpChoice,
    prices: StreamPrices,
) -> SegmentTime {
    let (segment, context) = (&space.segment, &space.context);
    let backward = op_backward(segment, id, choice, context);
    let may_defer = may_defer_weight_gradient(segment, id, context);
    let weight_gradient =
        backward.iter().filter(|template| may_defer && template.action.is_weight_gradient());
    SegmentTime {
        forward: sum(&op_forward(segment, id, choice, context), prices.kernel),
        backward: sum(&backward, prices.backward),
        weight_gradient: weight_gradient
            .map(|template| (prices.backward)(&template.kernel()))
            .sum(),
        ..SegmentTime::default()
    }
}

fn recompute_time(
    space: &SegmentSpace,
    id: OpId,
    choice: &OpChoice,
    price: KernelPrice,
) -> Seconds {
    sum(&op_recompute(&space.segment, id, choice, &space.context), price)
}

fn times_of_op(space: &SegmentSpace, id: OpId, prices: StreamPrices) -> Vec<SegmentTime> {
    let options = &space.ops[id.0 as usize];
    let mut times = Vec::with_capacity(options.len());
    // Options that differ only in whether they are recomputed are adjacent.
    for group in options.chunk_by(|a, b| a.choice == b.choice) {
        times.extend(op_times(space, id, group, prices));
    }
    times
}

/// Lower bound on the difference that a residual sum in the GEMM of a value makes to the forward pass; 0 for other values.
fn residual_sum_min(space: &SegmentSpace, id: ValueId, price: KernelPrice) -> Seconds {
    let Some(sum) = ResidualSum::of_some_flow(&space.segment, id) else { return Seconds(0.0) };
    let mut layouts: Vec<Layout> = space.ops[sum.linear.0 as usize]
        .iter()
        .map(|option| option.choice.outputs[0].forward)
        .filter(|layout| *layout != Layout::Partial)
        .collect();
    layouts.dedup();
    let times =
        layouts.into_iter().filter_map(|layout| residual_sum_time(space, sum, layout, price));
    Seconds(times.map(|time| time.0).fold(0.0, f64::min))
}
