//! Times of a block's passes up to each of its ops.

use narrows_plan::Seconds;
use narrows_plan::emit::{is_weight_gradient_deferrable, op_backward, op_forward};
use narrows_plan::graph::OpId;
use narrows_plan::strategy::{SegmentChoice, SegmentSpace};

use crate::flow_time::FlowPrices;
use crate::price::StreamPrices;
use crate::segment_time::sum;

/// The ops of a block in the order of its passes.
pub(crate) struct OpOrder {
    forward_before: Vec<Seconds>,
    gradient_complete: Vec<[Seconds; 2]>,
}

impl OpOrder {
    pub(crate) fn new(
        space: &SegmentSpace,
        choice: &SegmentChoice,
        prices: StreamPrices,
    ) -> OpOrder {
        let (segment, context) = (&space.segment, &space.context);
        let choice_of = |op: OpId| &choice.ops[op.0 as usize].choice;
        let flows = |op: OpId| {
            let outputs = segment.op(op).outputs.iter();
            outputs.map(|value| {
                (FlowPrices::new(space, *value, prices), &choice.flows[value.0 as usize])
            })
        };
        let mut forward_before = vec![];
        let mut forward = Seconds(0.0);
        for op in segment.op_ids() {
            forward_before.push(forward);
            let reshards: Seconds = flows(op).map(|(prices, flow)| prices.time(flow).forward).sum();
            let own = sum(&op_forward(segment, op, choice_of(op), context), prices.kernel);
            forward += own + reshards;
        }
        let mut gradient_complete = vec![[Seconds(0.0); 2]; forward_before.len()];
        let (mut backward, mut weight_gradient) = (Seconds(0.0), Seconds(0.0));
        for op in segment.op_ids().rev() {
            flows(op).for_each(|(prices, flow)| backward += prices.gradients(flow));
            let instructions = op_backward(segment, op, choice_of(op), context);
            backward += sum(&instructions, prices.backward);
            if is_weight_gradient_deferrable(segment, op, choice, context) {
                let gemms = instructions.iter().filter(|instr| instr.action.is_weight_gradient());
                weight_gradient +=
                    gemms.map(|instr| (prices.backward)(&instr.kernel())).sum::<Seconds>();
            }
            gradient_complete[op.0 as usize] = [backward, weight_gradient];
        }
        OpOrder { forward_before, gradient_complete }
    }

    /// Time of the forward pass before an op.
    pub(crate) fn forward_before(&self, op: OpId) -> Seconds {
        self.forward_before[op.0 as usize]
    }

    /// Times before the gradient of an op's parameters is complete: of the backward pass with all weight gradients, and of the
    /// weight-gradient pass. Recomputation is left out: it runs before the op that reads its results, so that the time of the
    /// backward pass is a lower bound.
    pub(crate) fn gradient_complete(&self, op: OpId) -> [Seconds; 2] {
        self.gradient_complete[op.0 as usize]
    }
}
