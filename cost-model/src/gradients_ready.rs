//! The time of a block's backward pass before the gradient of an op is complete.

use narrows_plan::Seconds;
use narrows_plan::emit::{is_weight_gradient_deferrable, op_backward};
use narrows_plan::graph::OpId;
use narrows_plan::strategy::{SegmentChoice, SegmentSpace};

use crate::flow_time::FlowPrices;
use crate::price::StreamPrices;
use crate::segment_time::sum;

/// Walks the ops of a block in the order of the backward pass. Recomputation is left out: it runs before the op that reads
/// its results, so that the times are lower bounds.
pub(crate) struct GradientsReady<'a> {
    space: &'a SegmentSpace,
    choice: &'a SegmentChoice,
    prices: StreamPrices<'a>,
    /// Ops whose backward passes are not counted yet.
    remaining: u32,
    /// The passes counted: the backward pass, and the weight-gradient pass.
    passed: [Seconds; 2],
}

impl<'a> GradientsReady<'a> {
    pub(crate) fn new(
        space: &'a SegmentSpace,
        choice: &'a SegmentChoice,
        prices: StreamPrices<'a>,
    ) -> GradientsReady<'a> {
        let remaining = space.segment.ops.len() as u32;
        GradientsReady { space, choice, prices, remaining, passed: [Seconds(0.0); 2] }
    }

    /// The times of the backward pass with all weight gradients, and of the weight-gradient pass, up to the last instruction of
    /// `op`. Each op comes after those of the calls before in the order of the backward pass.
    pub(crate) fn after(&mut self, op: OpId) -> [Seconds; 2] {
        while self.remaining > op.0 {
            self.remaining -= 1;
            self.count(OpId(self.remaining));
        }
        self.passed
    }

    fn count(&mut self, op: OpId) {
        let segment = &self.space.segment;
        for value in &segment.op(op).outputs {
            let flow = &self.choice.flows[value.0 as usize];
            self.passed[0] += FlowPrices::new(self.space, *value, self.prices).gradients(flow);
        }
        let choice = &self.choice.ops[op.0 as usize].choice;
        let backward = op_backward(segment, op, choice, &self.space.context);
        self.passed[0] += sum(&backward, self.prices.kernel);
        if is_weight_gradient_deferrable(segment, op, self.choice, &self.space.context) {
            let kernels = backward.iter().filter(|template| template.action.is_weight_gradient());
            let times = kernels.map(|template| (self.prices.kernel)(&template.kernel()));
            self.passed[1] += times.sum();
        }
    }
}
