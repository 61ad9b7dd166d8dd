//! Additions (residual, crossing latents) and the product of gate and up.

use crate::model::GatedProduct;
use crate::program::FusedOp;

use super::{InstrTemplate, OpEmitter, OperandSlot, fused};

pub(super) fn forward(emitter: &OpEmitter, op: FusedOp) -> InstrTemplate {
    fused(op, emitter.inputs(OperandSlot::Input), vec![emitter.activation(OperandSlot::Output(0))])
}

/// The gradient of a sum is the gradient of each summand. It needs an instruction only where it is
/// accumulated onto other contributions; elsewhere lowering binds both to one buffer.
pub(super) fn sum_backward(emitter: &OpEmitter) -> Vec<InstrTemplate> {
    let accumulated = (0..emitter.node.inputs.len()).filter(|port| emitter.accumulates(*port));
    let add_into = |port: usize| {
        let dx = emitter.activation(OperandSlot::InputGradient(port as u8));
        let dy = emitter.activation(OperandSlot::OutputGradient(0));
        fused(FusedOp::AddInto, vec![dy, dx], vec![dx])
    };
    accumulated.map(add_into).collect()
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
