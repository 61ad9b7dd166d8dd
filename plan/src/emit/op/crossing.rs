//! What a latent that crosses between blocks passes through (LaX): a tensor gate before it is
//! added, and in the released form a LayerNorm with φ after. Both need whole rows.

use crate::DType;
use crate::model::Activation;
use crate::program::{Extent, PassOp};

use super::{Operand, Site, Slot, Template, pass};

pub(super) fn norm(site: &Site, width: u64, activation: Activation) -> Vec<Template> {
    unary(site, PassOp::LatentNorm { activation }, 2 * width)
}

pub(super) fn norm_backward(site: &Site, width: u64, activation: Activation) -> Vec<Template> {
    unary_backward(site, PassOp::LatentNormBackward { activation }, 2 * width)
}

pub(super) fn gate(site: &Site, a: u64, b: u64) -> Vec<Template> {
    unary(site, PassOp::TensorGate { a, b }, a * a + b * b)
}

pub(super) fn gate_backward(site: &Site, a: u64, b: u64) -> Vec<Template> {
    unary_backward(site, PassOp::TensorGateBackward { a, b }, a * a + b * b)
}

fn unary(site: &Site, op: PassOp, parameters: u64) -> Vec<Template> {
    let weight = weight(Slot::Weight(0), parameters, site.context.compute());
    let reads = vec![site.activation(Slot::Input(0)), weight];
    vec![pass(op, reads, vec![site.activation(Slot::Output(0))])]
}

fn unary_backward(site: &Site, op: PassOp, parameters: u64) -> Vec<Template> {
    let gradient = weight(Slot::WeightGradient(0), parameters, DType::F32);
    let mut reads = vec![
        site.activation(Slot::OutputGradient(0)),
        site.activation(Slot::Input(0)),
        weight(Slot::Weight(0), parameters, site.context.compute()),
        gradient,
    ];
    let dx = site.input_gradient(0, &mut reads);
    vec![pass(op, reads, vec![dx, gradient])]
}

/// All parameters of the op in one row.
fn weight(slot: Slot, elements: u64, dtype: DType) -> Operand {
    Operand { slot, extent: Extent { rows: 1, columns: elements, dtype } }
}
