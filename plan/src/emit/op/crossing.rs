//! Ops of a latent that crosses between blocks (LaX): the tensor gate before the addition and, in the
//! released form, the LayerNorm with φ after it. Both need whole rows.

use crate::DType;
use crate::model::Activation;
use crate::program::{Extent, FusedOp};

use super::{InstrTemplate, OpEmitter, OperandSlot, TemplateOperand, fused};

pub(super) fn norm(emitter: &OpEmitter, width: u64, activation: Activation) -> Vec<InstrTemplate> {
    unary(emitter, FusedOp::LatentNorm { activation }, 2 * width)
}

pub(super) fn norm_backward(
    emitter: &OpEmitter,
    width: u64,
    activation: Activation,
) -> Vec<InstrTemplate> {
    unary_backward(emitter, FusedOp::LatentNormBackward { activation }, 2 * width)
}

pub(super) fn gate(emitter: &OpEmitter, a: u64, b: u64) -> Vec<InstrTemplate> {
    unary(emitter, FusedOp::TensorGate { a, b }, a * a + b * b)
}

pub(super) fn gate_backward(emitter: &OpEmitter, a: u64, b: u64) -> Vec<InstrTemplate> {
    unary_backward(emitter, FusedOp::TensorGateBackward { a, b }, a * a + b * b)
}

fn unary(emitter: &OpEmitter, op: FusedOp, parameters: u64) -> Vec<InstrTemplate> {
    let weight = weight(OperandSlot::Weight(0), parameters, emitter.context.compute_dtype());
    let reads = vec![emitter.activation(OperandSlot::Input(0)), weight];
    vec![fused(op, reads, vec![emitter.activation(OperandSlot::Output(0))])]
}

fn unary_backward(emitter: &OpEmitter, op: FusedOp, parameters: u64) -> Vec<InstrTemplate> {
    let gradient = weight(OperandSlot::WeightGradient(0), parameters, DType::F32);
    let mut reads = vec![
        emitter.activation(OperandSlot::OutputGradient(0)),
        emitter.activation(OperandSlot::Input(0)),
        weight(OperandSlot::Weight(0), parameters, emitter.context.compute_dtype()),
        gradient,
    ];
    let dx = emitter.input_gradient(0, &mut reads);
    vec![fused(op, reads, vec![dx, gradient])]
}

/// All parameters of the op in one row.
fn weight(slot: OperandSlot, elements: u64, dtype: DType) -> TemplateOperand {
    TemplateOperand { slot, extent: Extent { rows: 1, columns: elements, dtype } }
}
