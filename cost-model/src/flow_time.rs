//! Prices of the flows of a value: its reshards, forward and backward.

use std::sync::Arc;

use narrows_plan::emit::{
    InstrTemplate, ResidualSum, copy_forward, copy_recompute, flow_forward, flow_recompute,
    gradient_backward, may_defer_weight_gradient, op_backward, op_forward,
    overlapped_weight_gradient,
};
use narrows_plan::graph::{OpId, Value, ValueId};
use narrows_plan::program::{Action, FusedOp};
use narrows_plan::strategy::{Flow, OpOption, Save, SegmentSpace};
use narrows_plan::{Layout, Seconds};

use crate::price::{KernelPrice, StreamPrices};
use crate::segment_time::{SegmentTime, sum};

/// Times of each flow of a value for one microbatch.
#[derive(Clone, Debug)]
pub(crate) struct FlowTimes {
    /// Forward plus backward.
    pub both: Arc<[Seconds]>,
    /// Backward alone.
    pub backward: Arc<[Seconds]>,
    /// Weight gradients that could have passes of their own if they did not overlap with the collective of the gradient.
    pub overlapped_gemms: Arc<[Seconds]>,
}

/// Prices the flows of one value.
pub(crate) struct FlowPrices<'a> {
    space: &'a SegmentSpace,
    id: ValueId,
    value: &'a Value,
    prices: StreamPrices<'a>,
    /// Times so far. Flows share them.
    known: Vec<(FlowWork, Vec<Seconds>)>,
}

/// A reshard of a value, or a residual sum in its GEMM: all that the times depend on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FlowWork {
    /// From the producer's layout to that of a copy; whether a division by a norm is pending.
    Forward(Layout, Layout, bool),
    /// The same in the backward pass.
    Recompute(Layout, Layout),
    /// From the layout of gradient contributions to the producer's; whether it is the first sum, and whether there is
    /// another.
    Backward(Layout, Layout, [bool; 2]),
    /// The residual sum in a layout.
    ResidualSum(Layout),
    /// The GEMM beside the collective from a layout of gradient contributions to the producer's.
    OverlappedGemm(Layout, Layout),
}

impl<'a> FlowPrices<'a> {
    pub(crate) fn new(
        space: &'a SegmentSpace,
        id: ValueId,
        prices: StreamPrices<'a>,
    ) -> FlowPrices<'a> {
        FlowPrices { space, id, value: space.segment.value(id), prices, known: vec![] }
    }

    /// The times of a flow for one microbatch.
    pub(crate) fn time(&self, flow: &Flow) -> SegmentTime {
        let (value, context) = (self.value, &self.space.context);
        let backward = self.gradients(flow);
        let [in_gemm, again] = self.residual_sum_times(flow);
        let recompute = sum(&flow_recompute(value, flow, context), self.prices.recompute);
        SegmentTime {
            forward: sum(&flow_forward(value, flow, context), self.prices.kernel) + in_gemm,
            backward: backward + recompute + if_recomputed(flow, again),
            ..SegmentTime::default()
        }
    }

    /// Time that sums the gradient contributions of a value.
    pub(crate) fn gradients(&self, flow: &Flow) -> Seconds {
        let gradients = 0..flow.gradients().len();
        gradients.flat_map(|gradient| self.gradient_times(flow, gradient)).sum()
    }

    /// Times of each flow of the value for one microbatch.
    pub(crate) fn times(mut self) -> FlowTimes {
        let flows = &self.space.flows[self.id.0 as usize];
        let same = |a: &Flow, b: &Flow| {
            (a.producer, a.primary, a.second) == (b.producer, b.primary, b.second)
        };
        let [mut both_times, mut backward_times, mut overlapped_gemms] =
            [(); 3].map(|()| Vec::with_capacity(flows.len()));
        let may_sum = ResidualSum::of_some_flow(&self.space.segment, self.id).is_some();
        // Flows that differ only in their saves are adjacent.
        for group in flows.chunk_by(same) {
            let flow = &group[0];
            let (copies, gradients) = (flow.copies(), flow.gradients());
            let mut forward = Seconds(0.0);
            let mut recompute = vec![Seconds(0.0); copies.len()];
            for (copy, recompute) in recompute.iter_mut().enumerate().skip(1) {
                self.forward(flow, &copies, copy).iter().for_each(|time| forward += *time);
                *recompute = self.recompute(flow, &copies, copy).iter().copied().sum();
            }
            let mut backward = Seconds(0.0);
            for gradient in 0..gradients.len() {
                let times = self.backward(flow, &gradients, gradient);
                times.iter().for_each(|time| backward += *time);
            }
            let overlapped_gemm = self.deferrable_gemm(flow);
            for flow in group {
                let saves = flow.saves.iter().zip(&recompute);
                let recomputed = saves.filter(|(save, _)| **save == Save::Recomputed);
                let recomputed: Seconds = recomputed.map(|(_, time)| *time).sum();
                let [in_gemm, again] = match may_sum {
                    true => self.residual_sum(flow),
                    false => [Seconds(0.0); 2],
                };
                let backward = backward + recomputed + if_recomputed(flow, again);
                both_times.push(forward + backward + in_gemm);
                backward_times.push(backward);
                overlapped_gemms.push(overlapped_gemm);
            }
        }
        FlowTimes {
            both: both_times.into(),
            backward: backward_times.into(),
            overlapped_gemms: overlapped_gemms.into(),
        }
    }

    fn forward(&mut self, flow: &Flow, copies: &[Layout], copy: usize) -> &[Seconds] {
        let producer = flow.producer;
        let key = FlowWork::Forward(producer.forward, copies[copy], producer.norm_pending);
        let templates = |of: &Self| copy_forward(of.value, flow, copy, &of.space.context);
        self.known(key, |of| kernel_times(&templates(of), of.prices.kernel))
    }

    fn recompute(&mut self, flow: &Flow, copies: &[Layout], copy: usize) -> &[Seconds] {
        let key = FlowWork::Recompute(flow.producer.forward, copies[copy]);
        let templates = |of: &Self| copy_recompute(of.value, flow, copy, &of.space.context);
        self.known(key, |of| kernel_times(&templates(of), of.prices.recompute))
    }

    fn backward(&mut self, flow: &Flow, gradients: &[Layout], gradient: usize) -> &[Seconds] {
        let order = [gradient == 0, gradients.len() > 1];
        let key = FlowWork::Backward(gradients[gradient], flow.producer.backward, order);
        self.known(key, |of| of.gradient_times(flow, gradient))
    }

    /// Time of the weight gradient that overlaps with the collective of the flow's gradient, where only that keeps it from a
    /// pass of its own; zero without one.
    fn deferrable_gemm(&mut self, flow: &Flow) -> Seconds {
        let (segment, context) = (&self.space.segment, &self.space.context);
        let op = overlapped_weight_gradient(segment, self.id, flow, context)
            .filter(|op| may_defer_weight_gradient(segment, *op, context));
        if op.is_none() {
            return Seconds(0.0);
        }
        let key = FlowWork::OverlappedGemm(flow.gradients()[0], flow.producer.backward);
        self.known(key, |of| of.overlapped_gemm_time(flow).into_iter().collect())
            .first()
            .copied()
            .unwrap_or_default()
    }

    fn residual_sum(&mut self, flow: &Flow) -> [Seconds; 2] {
        match ResidualSum::of(&self.space.segment, self.id, flow) {
            Some(_) => {
                let key = FlowWork::ResidualSum(flow.producer.forward);
                let times = self.known(key, |of| of.residual_sum_times(flow).to_vec());
                [times[0], times[1]]
            }
            None => [Seconds(0.0); 2],
        }
    }

    fn known(&mut self, key: FlowWork, times: impl FnOnce(&Self) -> Vec<Seconds>) -> &[Seconds] {
        let index = self.known.iter().position(|(known, _)| *known == key).unwrap_or_else(|| {
            let times = times(self);
            self.known.push((key, times));
            self.known.len() - 1
        });
        &self.known[index].1
    }

    /// Times of the kernels that bring the gradient contributions of one layout to the producer. A collective that
    /// overlaps with a weight-gradient GEMM counts with its exposed time.
    fn gradient_times(&self, flow: &Flow, gradient: usize) -> Vec<Seconds> {
        let (value, context) = (self.value, &self.space.context);
        let templates = gradient_backward(value, flow, gradient, context);
        let StreamPrices { backward, recompute, .. } = self.prices;
        let price = |template: &InstrTemplate| match template.action {
            Action::Fused(FusedOp::Fill) => recompute(&template.kernel()),
            _ => backward(&template.kernel()),
        };
        let mut times: Vec<Seconds> = templates.iter().map(price).collect();
        let is_collective =
            |template: &InstrTemplate| matches!(template.action, Action::Collective(_));
        if let Some(slowdown) = self.prices.overlap
            && let Some(collective) = templates.iter().position(is_collective)
            && let Some(gemm) = self.overlapped_gemm_time(flow)
        {
            times[collective] = slowdown.exposed(times[collective], gemm);
        }
        times
    }

    /// The difference that a residual addition in the GEMM of the value makes to the forward times of the linear and of the
    /// addition, and to their times in the backward pass where they are recomputed; zero for flows without such an addition. It is
    /// negative: the product is neither written nor read.
    fn residual_sum_times(&self, flow: &Flow) -> [Seconds; 2] {
        let Some(sum) = ResidualSum::of(&self.space.segment, self.id, flow) else {
            return [Seconds(0.0); 2];
        };
        let layout = flow.producer.forward;
        [self.prices.kernel, self.prices.recompute]
            .map(|price| residual_sum_time(self.space, sum, layout, price).unwrap_or_default())
    }

    /// Time of the weight-gradient GEMM that overlaps with the collective of a flow's gradient. Options of a linear that
    /// contribute to the gradient in the same layout have the same GEMM.
    fn overlapped_gemm_time(&self, flow: &Flow) -> Option<Seconds> {
        let (segment, context) = (&self.space.segment, &self.space.context);
        let op = overlapped_weight_gradient(segment, self.id, flow, context)?;
        let layout = flow.gradients()[0];
        let contributes = |option: &&OpOption| {
            option.choice.inputs.first().is_some_and(|input| input.backward == layout)
        };
        let option = self.space.ops[op.0 as usize].iter().find(contributes)?;
        let templates = op_backward(segment, op, &option.choice, context);
        let gemm = templates.iter().find(|template| template.action.is_weight_gradient())?;
        Some((self.prices.backward)(&gemm.kernel()))
    }
}

/// The time where the value is recomputed.
fn if_recomputed(flow: &Flow, time: Seconds) -> Seconds {
    if flow.saves[0] == Save::Recomputed { time } else { Seconds(0.0) }
}

fn kernel_times(templates: &[InstrTemplate], price: KernelPrice) -> Vec<Seconds> {
    templates.iter().map(|template| price(&template.kernel())).collect()
}

/// The time of a residual sum in a GEMM in a layout, less those of the linear and of the addition. Their options in this
/// layout have the same kernels. `None` where one has no such option.
pub(crate) fn residual_sum_time(
    space: &SegmentSpace,
    residual: ResidualSum,
    layout: Layout,
    price: KernelPrice,
) -> Option<Seconds> {
    let (segment, context) = (&space.segment, &space.context);
    let choice = |op: OpId| {
        let mut options = space.ops[op.0 as usize].iter().map(|option| &option.choice);
        options.find(|choice| choice.outputs[0].forward == layout)
    };
    let (of_linear, of_add) = (choice(residual.linear)?, choice(residual.add)?);
    let alone = |op, choice| sum(&op_forward(segment, op, choice, context), price);
    let gemm = price(&residual.gemm(segment, of_linear, context).kernel());
    Some(gemm - alone(residual.linear, of_linear) - alone(residual.add, of_add))
}
