//! The residual addition and the product of gate and up.

use crate::program::PassOp;

use super::{Operand, Site, Slot, Template, pass};

pub(super) fn forward(site: &Site, op: PassOp) -> Template {
    pass(op, inputs(site, Slot::Input), vec![site.activation(Slot::Output(0))])
}

pub(super) fn product_backward(site: &Site) -> Template {
    let mut reads = vec![site.activation(Slot::OutputGradient(0))];
    reads.extend(inputs(site, Slot::Input));
    pass(PassOp::GatedProductBackward, reads, inputs(site, Slot::InputGradient))
}

fn inputs(site: &Site, slot: impl Fn(u8) -> Slot) -> Vec<Operand> {
    (0..site.node.inputs.len()).map(|port| site.activation(slot(port as u8))).collect()
}
