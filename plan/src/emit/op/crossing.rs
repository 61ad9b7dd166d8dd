//! What a latent that crosses between blocks passes through (LaX): a tensor gate before it is
//! added, and in the released form a LayerNorm with φ after. Both need whole rows.

use crate::DType;
use crate::model::Activation;
use crate::program::{Extent, FusedOp};

use super::{InstrTemplate, OpEmitter, OperandSlot, TemplateOperand, pass};

pub(super) fn norm(site: &OpEmitter, width: u64, activation: Activation) -> Vec<InstrTemplate> {
    unary(site, FusedOp::LatentNorm { activation }, 2 * width)
}

pub(super) fn norm_backward(
    site: &OpEmitter,
    width: u64,
    activation: Activation,
) -> Vec<InstrTemplate> {
    unary_backward(site, FusedOp::LatentNormBackward { activation }, 2 * width)
}

pub(super) fn gate(site: &OpEmitter, a: u64, b: u64) -> Vec<InstrTemplate> {
    unary(site, FusedOp::TensorGate { a, b }, a * a + b * b)
}

pub(super) fn gate_backward(site: &OpEmitter, a: u64, b: u64) -> Vec<InstrTemplate> {
    unary_backward(site, FusedOp::TensorGateBackward { a, b }, a * a + b * b)
}

fn unary(site: &OpEmitter, op: FusedOp, parameters: u64) -> Vec<InstrTemplate> {
    let weight = weight(OperandSlot::Weight(0), parameters, site.context.compute_dtype());
    let reads = vec![site.activation(OperandSlot::Input(0)), weight];
    vec![pass(op, reads, vec![site.activation(OperandSlot::Output(0))])]
}

fn unary_backward(site: &OpEmitter, op: FusedOp, parameters: u64) -> Vec<InstrTemplate> {
    let gradient = weight(OperandSlot::WeightGradient(0), parameters, DType::F32);
    let mut reads = vec![
        site.activation(OperandSlot::OutputGradient(0)),
        site.activation(OperandSlot::Input(0)),
        weight(OperandSlot::Weight(0), parameters, site.context.compute_dtype()),
        gradient,
    ];
    let dx = site.input_gradient(0, &mut reads);
    vec![pass(op, reads, vec![dx, gradient])]
}

/// All parameters of the op in one row.
fn weight(slot: OperandSlot, elements: u64, dtype: DType) -> TemplateOperand {
    TemplateOperand { slot, extent: Extent { rows: 1, columns: elements, dtype } }
}
