//! Additions (residual, crossing latents) and the product of gate and up.

use crate::model::GatedProduct;
use crate::program::PassOp;

use super::{Site, Slot, Template, pass};

pub(super) fn forward(site: &Site, op: PassOp) -> Template {
    pass(op, site.inputs(Slot::Input), vec![site.activation(Slot::Output(0))])
}

/// The gradient of a sum is the gradient of each summand: the same buffer, unless others have
/// contributed already.
pub(super) fn sum_backward(site: &Site) -> Vec<Template> {
    let ports = (0..site.node.inputs.len()).filter(|port| site.accumulates(*port));
    let onto = |port: usize| {
        let held = site.activation(Slot::InputGradient(port as u8));
        let dy = site.activation(Slot::OutputGradient(0));
        pass(PassOp::AddInto, vec![dy, held], vec![held])
    };
    ports.map(onto).collect()
}

pub(super) fn product_backward(site: &Site, product: GatedProduct) -> Template {
    let mut reads = vec![site.activation(Slot::OutputGradient(0))];
    reads.extend(site.inputs(Slot::Input));
    pass(PassOp::GatedProductBackward { product }, reads, site.inputs(Slot::InputGradient))
}
