//! The residual addition and the product of gate and up.

use crate::program::PassOp;

use super::{Site, Slot, Template, pass};

pub(super) fn forward(site: &Site, op: PassOp) -> Template {
    pass(op, site.inputs(Slot::Input), vec![site.activation(Slot::Output(0))])
}

pub(super) fn product_backward(site: &Site) -> Template {
    let mut reads = vec![site.activation(Slot::OutputGradient(0))];
    reads.extend(site.inputs(Slot::Input));
    pass(PassOp::GatedProductBackward, reads, site.inputs(Slot::InputGradient))
}
