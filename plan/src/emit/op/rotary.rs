//! RoPE on queries and keys, in place.

use crate::Layout;
use crate::graph::QkvHeads;
use crate::program::{Extent, FusedOp};

use super::{InstrTemplate, OpEmitter, OperandSlot, TemplateOperand, fused};

/// RoPE on the first `width` features of the output, or its inverse on their gradients; `None` without such features. The
/// rotation is linear, so it may be applied to partial sums; a feature shard has whole heads.
pub(super) fn rotary(
    emitter: &OpEmitter,
    (width, head_dim): (u64, u64),
    backward: bool,
) -> Option<InstrTemplate> {
    if width == 0 {
        return None;
    }
    let slot = if backward { OperandSlot::OutputGradient(0) } else { OperandSlot::Output(0) };
    let (tensor, layout) = (emitter.activation(slot), emitter.layout(slot));
    debug_assert!(layout != Layout::Partial || !backward);
    let op = if backward { FusedOp::RopeBackward { head_dim } } else { FusedOp::Rope { head_dim } };
    let columns = emitter.context.columns(width, layout);
    let rotated = TemplateOperand { extent: Extent { columns, ..tensor.extent }, ..tensor };
    Some(fused(op, vec![rotated], vec![rotated]))
}

/// [`rotary`] on the output of an op on heads.
pub(super) fn of_heads(
    emitter: &OpEmitter,
    heads: &QkvHeads,
    backward: bool,
) -> Option<InstrTemplate> {
    rotary(emitter, (heads.rotated_width(), heads.head_dim), backward)
}
