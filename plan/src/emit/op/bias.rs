//! Biases of linears: y = x + b, followed by RoPE where the linears are those of queries and keys. Backward db += Σ dy over
//! the tokens of this device; lowering binds dx and dy to one buffer.

use crate::DType;
use crate::graph::BiasOp;
use crate::program::{Extent, FusedOp};

use super::{InstrTemplate, OpEmitter, OperandSlot, TemplateOperand, fused, rotary};

pub(super) fn forward(emitter: &OpEmitter, bias: &BiasOp) -> Vec<InstrTemplate> {
    let output = emitter.activation(OperandSlot::Output(0));
    let weight = row(emitter, OperandSlot::Weight(0), emitter.context.compute_dtype());
    let reads = vec![emitter.activation(OperandSlot::Input(0)), weight];
    let mut templates = vec![fused(FusedOp::Bias, reads, vec![output])];
    templates.extend(rotary::rotary(emitter, rotated(bias), false, output));
    templates
}

pub(super) fn backward(emitter: &OpEmitter, bias: &BiasOp) -> Vec<InstrTemplate> {
    let dy = emitter.activation(OperandSlot::OutputGradient(0));
    let db = row(emitter, OperandSlot::WeightGradient(0), DType::F32);
    let mut templates: Vec<InstrTemplate> =
        rotary::rotary(emitter, rotated(bias), true, dy).into_iter().collect();
    templates.push(fused(FusedOp::BiasBackward, vec![dy, db], vec![db]));
    templates
}

/// Width of the rotated sections, and of a head.
fn rotated(bias: &BiasOp) -> (u64, u64) {
    (bias.rotary_sections.iter().map(|section| bias.members[*section].1).sum(), bias.head_dim)
}

/// All biases of the op on this device, in one row.
fn row(emitter: &OpEmitter, slot: OperandSlot, dtype: DType) -> TemplateOperand {
    let columns = emitter.shard(emitter.width(OperandSlot::Input(0)));
    TemplateOperand { slot, extent: Extent { rows: 1, columns, dtype } }
}
