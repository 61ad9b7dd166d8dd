//! Times of a block's passes up to each of its ops.

use narrows_plan::Seconds;
use narrows_plan::emit::{
    InstrTemplate, OperandSlot, is_weight_gradient_deferrable, op_backward, op_forward,
};
use narrows_plan::graph::{OpId, ValueId};
use narrows_plan::strategy::{Flow, SegmentChoice, SegmentSpace};

use crate::flow_time::FlowPrices;
use crate::price::{KernelPrice, StreamPrices};
use crate::segment_time::sum;

/// The ops of a block in the order of its passes.
pub(crate) struct OpOrder {
    before_weight: Vec<Seconds>,
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
        let flow = |value: &ValueId| {
            (FlowPrices::new(space, *value, prices), &choice.flows[value.0 as usize])
        };
        let flows = |op: OpId| segment.op(op).outputs.iter().map(flow);
        let reshards = |(prices, flow): (FlowPrices, &Flow)| prices.time(flow).forward;
        let mut before_weight = vec![];
        let mut forward: Seconds = segment.inputs.iter().map(flow).map(reshards).sum();
        for op in segment.op_ids() {
            let instructions = op_forward(segment, op, choice_of(op), context);
            before_weight.push(forward + time_before_weight(&instructions, prices.kernel));
            forward += sum(&instructions, prices.kernel);
            forward += flows(op).map(reshards).sum();
        }
        let mut gradient_complete = vec![[Seconds(0.0); 2]; before_weight.len()];
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
        OpOrder { before_weight, gradient_complete }
    }

    /// Time of the forward pass before an op reads its weight.
    pub(crate) fn before_weight(&self, op: OpId) -> Seconds {
        self.before_weight[op.0 as usize]
    }

    /// Times before the gradient of an op's parameters is complete: of the backward pass with all weight gradients, and of the
    /// weight-gradient pass. Recomputation is left out: it runs before the op that reads its results, so that the time of the
    /// backward pass is a lower bound.
    pub(crate) fn gradient_complete(&self, op: OpId) -> [Seconds; 2] {
        self.gradient_complete[op.0 as usize]
    }
}

/// Time of the forward instructions of an op before the first that reads its weight.
pub(crate) fn time_before_weight(instructions: &[InstrTemplate], price: KernelPrice) -> Seconds {
    let reads_weight = |instr: &InstrTemplate| {
        instr.reads.iter().any(|operand| matches!(operand.slot, OperandSlot::Weight(_)))
    };
    let reader = instructions.iter().position(reads_weight).unwrap_or(instructions.len());
    sum(&instructions[..reader], price)
}
