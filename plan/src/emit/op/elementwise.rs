//! Additions (residual, crossing latents) and the product of gate and up.

use crate::model::GatedProduct;
use crate::program::FusedOp;

use super::{InstrTemplate, OpEmitter, OperandSlot, fused};

pub(super) fn forward(emitter: &OpEmitter, op: FusedOp) -> InstrTemplate {
    fused(op, emitter.inputs(OperandSlot::Input), vec![emitter.activation(OperandSlot::Output(0))])
}

/// The gradient of a sum is the gradient of each summand: the same buffer, unless others have
/// contributed already.
pub(super) fn sum_backward(emitter: &OpEmitter) -> Vec<InstrTemplate> {
    let ports = (0..emitter.node.inputs.len()).filter(|port| emitter.accumulates(*port));
    let onto = |port: usize| {
        let held = emitter.activation(OperandSlot::InputGradient(port as u8));
        let dy = emitter.activation(OperandSlot::OutputGradient(0));
        fused(FusedOp::AddInto, vec![dy, held], vec![held])
    };
    ports.map(onto).collect()
}

pub(super) fn gated_product_backward(emitter: &OpEmitter, product: GatedProduct) -> InstrTemplate {
    let mut reads = vec![emitter.activation(OperandSlot::OutputGradient(0))];
    reads.extend(emitter.inputs(OperandSlot::Input));
    fused(
        FusedOp::GatedProductBackward { product },
        reads,
        emitter.inputs(OperandSlot::InputGradient),
    )
}
