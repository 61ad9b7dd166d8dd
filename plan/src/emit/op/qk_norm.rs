//! RMSNorm of the heads of queries and keys, followed by RoPE where these are rotated. The scales are the same for all
//! heads, so a device with a shard of the heads has all of them, and a part of their gradient.

use crate::DType;
use crate::graph::QkNormOp;
use crate::model::LinearKind;
use crate::program::{Extent, FusedOp};

use super::{InstrTemplate, OpEmitter, OperandSlot, TemplateOperand, fused, rotary};

pub(super) fn forward(emitter: &OpEmitter, norm: &QkNormOp) -> Vec<InstrTemplate> {
    let output = emitter.activation(OperandSlot::Output(0));
    let scales = scales(OperandSlot::Weight(0), norm, emitter.context.compute_dtype());
    let reads = vec![emitter.activation(OperandSlot::Input(0)), scales];
    let (head_dim, queries, keys) = local_heads(emitter, norm);
    let op = FusedOp::QkNorm { head_dim, queries, keys };
    let mut templates = vec![fused(op, reads, vec![output])];
    templates.extend(rotary::rotary(emitter, rotated(norm), false, output));
    templates
}

pub(super) fn backward(emitter: &OpEmitter, norm: &QkNormOp) -> Vec<InstrTemplate> {
    let dy = emitter.activation(OperandSlot::OutputGradient(0));
    let dscales = scales(OperandSlot::WeightGradient(0), norm, DType::F32);
    let mut templates: Vec<InstrTemplate> =
        rotary::rotary(emitter, rotated(norm), true, dy).into_iter().collect();
    let mut reads = vec![
        dy,
        emitter.activation(OperandSlot::Input(0)),
        scales(OperandSlot::Weight(0), norm, emitter.context.compute_dtype()),
        dscales,
    ];
    let dx = emitter.input_gradient(0, &mut reads);
    let (head_dim, queries, keys) = local_heads(emitter, norm);
    let op = FusedOp::QkNormBackward { head_dim, queries, keys };
    templates.push(fused(op, reads, vec![dx, dscales]));
    templates
}

/// Features of a head, and heads of queries and keys on this device.
fn local_heads(emitter: &OpEmitter, norm: &QkNormOp) -> (u64, u64, u64) {
    let heads = |linear| emitter.shard(norm.heads_of(linear));
    (norm.head_dim, heads(LinearKind::Q), heads(LinearKind::K))
}

/// Width of the rotated sections, and of a head.
fn rotated(norm: &QkNormOp) -> (u64, u64) {
    (norm.rotary_sections.iter().map(|section| norm.members[*section].1).sum(), norm.head_dim)
}

/// All scales of the op, in one row.
fn scales(slot: OperandSlot, norm: &QkNormOp, dtype: DType) -> TemplateOperand {
    let columns = norm.normed().count() as u64 * norm.head_dim;
    TemplateOperand { slot, extent: Extent { rows: 1, columns, dtype } }
}
