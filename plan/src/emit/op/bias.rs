//! Biases of linears and of gates: y = x + b, followed by RoPE where the linears are those of queries and keys. Backward db += Σ dy over
//! the tokens of this device; lowering binds dx and dy to one buffer.

use crate::DType;
use crate::graph::QkvHeads;
use crate::program::FusedOp;

use super::{InstrTemplate, OpEmitter, OperandSlot, fused, rotary, row_parameters};

/// Adds the biases.
pub(super) fn add(emitter: &OpEmitter) -> InstrTemplate {
    row_parameters::forward(emitter, FusedOp::Bias, width(emitter))
}

/// Sums the gradient of the output into that of the biases.
pub(super) fn sum_gradient(emitter: &OpEmitter) -> InstrTemplate {
    let dy = emitter.activation(OperandSlot::OutputGradient(0));
    let db =
        row_parameters::parameter_row(OperandSlot::WeightGradient(0), width(emitter), DType::F32);
    fused(FusedOp::BiasBackward, vec![dy, db], vec![db])
}

pub(super) fn forward(emitter: &OpEmitter, heads: &QkvHeads) -> Vec<InstrTemplate> {
    let mut templates = vec![add(emitter)];
    templates.extend(rotary::of_heads(emitter, heads, false));
    templates
}

pub(super) fn backward(emitter: &OpEmitter, heads: &QkvHeads) -> Vec<InstrTemplate> {
    let mut templates: Vec<InstrTemplate> =
        rotary::of_heads(emitter, heads, true).into_iter().collect();
    templates.push(sum_gradient(emitter));
    templates
}

/// Elements of all biases of the op on this device.
fn width(emitter: &OpEmitter) -> u64 {
    emitter.shard(emitter.width(OperandSlot::Input(0)))
}
