//! Times of a block's passes up to one of its ops.

use narrows_plan::Seconds;
use narrows_plan::emit::{is_weight_gradient_deferrable, op_backward, op_forward};
use narrows_plan::graph::OpId;
use narrows_plan::strategy::{SegmentChoice, SegmentSpace};

use crate::flow_time::FlowPrices;
use crate::price::StreamPrices;
use crate::segment_time::sum;

/// The ops of a block in the order of its passes.
pub(crate) struct OpOrder<'a> {
    space: &'a SegmentSpace,
    choice: &'a SegmentChoice,
    prices: StreamPrices<'a>,
}

impl<'a> OpOrder<'a> {
    pub(crate) fn new(
        space: &'a SegmentSpace,
        choice: &'a SegmentChoice,
        prices: StreamPrices<'a>,
    ) -> OpOrder<'a> {
        OpOrder { space, choice, prices }
    }

    /// Time of the forward pass before an op.
    pub(crate) fn forward_before(&self, op: OpId) -> Seconds {
        let segment = &self.space.segment;
        let of_op = |op: OpId| {
            let choice = &self.choice.ops[op.0 as usize].choice;
            let own =
                sum(&op_forward(segment, op, choice, &self.space.context), self.prices.kernel);
            let outputs = segment.op(op).outputs.iter();
            let flow = |value| {
                let prices = FlowPrices::new(self.space, value, self.prices);
                prices.time(&self.choice.flows[value.0 as usize]).forward
            };
            own + outputs.map(|value| flow(*value)).sum::<Seconds>()
        };
        segment.op_ids().take_while(|before| *before < op).map(of_op).sum()
    }

    /// Times before the gradient of an op's parameters is complete: of the backward pass with all weight gradients, and of the
    /// weight-gradient pass. Recomputation is left out: it runs before the op that reads its results, so that the time of the
    /// backward pass is a lower bound.
    pub(crate) fn gradient_complete(&self, op: OpId) -> [Seconds; 2] {
        let segment = &self.space.segment;
        let (mut backward, mut weight_gradient) = (Seconds(0.0), Seconds(0.0));
        for op in segment.op_ids().rev().take_while(|after| *after >= op) {
            for value in &segment.op(op).outputs {
                let flow = &self.choice.flows[value.0 as usize];
                backward += FlowPrices::new(self.space, *value, self.prices).gradients(flow);
            }
            let choice = &self.choice.ops[op.0 as usize].choice;
            let instructions = op_backward(segment, op, choice, &self.space.context);
            backward += sum(&instructions, self.prices.kernel);
            if is_weight_gradient_deferrable(segment, op, self.choice, &self.space.context) {
                let gemms = instructions.iter().filter(|instr| instr.action.is_weight_gradient());
                weight_gradient +=
                    gemms.map(|instr| (self.prices.kernel)(&instr.kernel())).sum::<Seconds>();
            }
        }
        [backward, weight_gradient]
    }
}
