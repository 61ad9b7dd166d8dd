//! Additions (residual, crossing latents) and the product of gate and up.

use crate::model::GatedProduct;
use crate::program::FusedOp;

use super::{InstrTemplate, OpEmitter, OperandSlot, pass};

pub(super) fn forward(site: &OpEmitter, op: FusedOp) -> InstrTemplate {
    pass(op, site.inputs(OperandSlot::Input), vec![site.activation(OperandSlot::Output(0))])
}

/// The gradient of a sum is the gradient of each summand: the same buffer, unless others have
/// contributed already.
pub(super) fn sum_backward(site: &OpEmitter) -> Vec<InstrTemplate> {
    let ports = (0..site.node.inputs.len()).filter(|port| site.accumulates(*port));
    let onto = |port: usize| {
        let held = site.activation(OperandSlot::InputGradient(port as u8));
        let dy = site.activation(OperandSlot::OutputGradient(0));
        pass(FusedOp::AddInto, vec![dy, held], vec![held])
    };
    ports.map(onto).collect()
}

pub(super) fn product_backward(site: &OpEmitter, product: GatedProduct) -> InstrTemplate {
    let mut reads = vec![site.activation(OperandSlot::OutputGradient(0))];
    reads.extend(site.inputs(OperandSlot::Input));
    pass(FusedOp::GatedProductBackward { product }, reads, site.inputs(OperandSlot::InputGradient))
}
