//! Ops of one input with all their parameters in one row.

use crate::DType;
use crate::program::{Extent, FusedOp};

use super::{InstrTemplate, OpEmitter, OperandSlot, TemplateOperand, fused};

/// Reads the input and the parameters, and writes the output.
pub(super) fn forward(emitter: &OpEmitter, op: FusedOp, parameters: u64) -> InstrTemplate {
    let weight = parameter_row(OperandSlot::Weight(0), parameters, emitter.context.compute_dtype());
    let reads = vec![emitter.activation(OperandSlot::Input(0)), weight];
    fused(op, reads, vec![emitter.activation(OperandSlot::Output(0))])
}

/// Reads the gradient of the output, the input and the parameters. Writes the gradient of the input, and adds to that of the
/// parameters.
pub(super) fn backward(emitter: &OpEmitter, op: FusedOp, parameters: u64) -> InstrTemplate {
    let gradient = parameter_row(OperandSlot::WeightGradient(0), parameters, DType::F32);
    let mut reads = vec![
        emitter.activation(OperandSlot::OutputGradient(0)),
        emitter.activation(OperandSlot::Input(0)),
        parameter_row(OperandSlot::Weight(0), parameters, emitter.context.compute_dtype()),
        gradient,
    ];
    let dx = emitter.input_gradient(0, &mut reads);
    fused(op, reads, vec![dx, gradient])
}

/// All parameters of the op on this device, or their gradients.
pub(super) fn parameter_row(slot: OperandSlot, elements: u64, dtype: DType) -> TemplateOperand {
    TemplateOperand { slot, extent: Extent { rows: 1, columns: elements, dtype } }
}
