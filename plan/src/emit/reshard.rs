//! Reshards: the collectives that turn one layout into another, with the packing they need.
//!
//! A collective moves contiguous memory. Shards along the features of a row-major `[tokens, features]`
//! tensor are strided, so a reduce-scatter or all-to-all onto features packs first and an all-gather
//! from features unpacks afterwards; so do positions when several sequences are in the microbatch.

use crate::context::Context;
use crate::mesh::Axis;
use crate::program::{Action, CollectiveFunction, CollectiveOp, Extent, FusedOp, Reduction};
use crate::{Bytes, DType, Dim, Layout};

use super::{InstrTemplate, OperandSlot, TemplateOperand};

/// Format of the statistic that is reduced in the launch of a latent's all-reduce: one fp32 per token.
const STATISTIC: DType = DType::F32;

/// Layouts before and after an all-reduce.
const SUM: (Layout, Layout) = (Layout::Partial, Layout::Replicated);

/// Bytes of the shard of a `[tokens, width]` activation in `layout` on one device.
pub fn activation_bytes(width: u64, layout: Layout, context: &Context) -> Bytes {
    activation(width, layout, context).bytes()
}

/// Extent of the shard of a `[tokens, width]` activation in `layout` on one device.
pub(super) fn activation(width: u64, layout: Layout, context: &Context) -> Extent {
    Extent {
        rows: context.rows(layout),
        columns: context.columns(width, layout),
        dtype: context.compute_dtype(),
    }
}

/// The instructions that turn a `[tokens, width]` activation from one layout into another: none for
/// equal layouts, and `None` for a partial target, which no reshard produces.
///
/// With `statistic`, the all-reduce reduces the statistic of an online norm in the same launch. An
/// all-reduce works in place: `Before` and `After` are then one buffer.
pub(super) fn reshard(
    width: u64,
    from: Layout,
    to: Layout,
    statistic: bool,
    context: &Context,
) -> Option<Vec<InstrTemplate>> {
    use Layout::{Partial, Replicated, Sharded};
    if from == to {
        return Some(vec![]);
    }
    let before = operand(OperandSlot::Before, width, from, context);
    let after = operand(OperandSlot::After, width, to, context);
    let function = match (from, to) {
        (_, Partial) => return None,
        (Replicated, Sharded(dim)) => {
            return Some(vec![fused(FusedOp::Slice { dim }, before, after)]);
        }
        (Partial, Replicated) => CollectiveFunction::AllReduce(Reduction::Sum),
        (Partial, Sharded(_)) => CollectiveFunction::ReduceScatter,
        (Sharded(_), Replicated) => CollectiveFunction::AllGather,
        (Sharded(_), Sharded(_)) => CollectiveFunction::AllToAll,
        (Replicated, Replicated) => return Some(vec![]),
    };
    if let CollectiveFunction::AllReduce(_) = function {
        return Some(vec![all_reduce(before, after, statistic, context)]);
    }
    let pack = packed_dim(to, function, context);
    let unpack = packed_dim(from, function, context);
    let mut templates = vec![];
    let mut source = before;
    if let Some(dim) = pack {
        let packed = TemplateOperand { slot: OperandSlot::Temporary(0), ..before };
        templates.push(fused(FusedOp::Pack { dim }, before, packed));
        source = packed;
    }
    let target = if unpack.is_some() {
        TemplateOperand { slot: OperandSlot::Temporary(1), ..after }
    } else {
        after
    };
    let payload = (activation_bytes(width, Replicated, context), Bytes(0));
    templates.push(collective(function, (from, to), payload, vec![source], vec![target], context));
    if let Some(dim) = unpack {
        templates.push(fused(FusedOp::Unpack { dim }, target, after));
    }
    Some(templates)
}

/// The dimension to pack by before the collective, or to unpack by after it; `None` for shards that are
/// contiguous already.
fn packed_dim(layout: Layout, function: CollectiveFunction, context: &Context) -> Option<Dim> {
    let Layout::Sharded(dim) = layout else { return None };
    let contiguous = dim != Dim::Feature && context.tokens_contiguous(dim);
    (function == CollectiveFunction::AllToAll || !contiguous).then_some(dim)
}

fn all_reduce(
    before: TemplateOperand,
    after: TemplateOperand,
    statistic: bool,
    context: &Context,
) -> InstrTemplate {
    let mut reads = vec![before];
    let mut writes = vec![after];
    if statistic {
        let extent = Extent { rows: before.extent.rows, columns: 1, dtype: STATISTIC };
        reads.push(TemplateOperand { slot: OperandSlot::NormStatistic, extent });
        writes.push(TemplateOperand { slot: OperandSlot::NormStatistic, extent });
    }
    let statistics = reads[1..].iter().map(|operand| operand.extent.bytes()).sum();
    let payload = (before.extent.bytes(), statistics);
    collective(CollectiveFunction::AllReduce(Reduction::Sum), SUM, payload, reads, writes, context)
}

fn collective(
    function: CollectiveFunction,
    (from, to): (Layout, Layout),
    (payload, statistic): (Bytes, Bytes),
    reads: Vec<TemplateOperand>,
    writes: Vec<TemplateOperand>,
    context: &Context,
) -> InstrTemplate {
    let group = context.mesh.group(Axis::Tensor);
    let action = Action::Collective(CollectiveOp {
        function,
        axis: Axis::Tensor,
        from,
        to,
        payload,
        statistic,
        group,
    });
    InstrTemplate { action, reads, writes }
}

/// All-reduces a small fp32 buffer over the tensor axis, in place.
pub(super) fn all_reduce_statistic(operand: TemplateOperand, context: &Context) -> InstrTemplate {
    let payload = (Bytes(0), operand.extent.bytes());
    let operands = vec![operand];
    collective(
        CollectiveFunction::AllReduce(Reduction::Sum),
        SUM,
        payload,
        operands.clone(),
        operands,
        context,
    )
}

/// Zeroes a gradient whose consumers all accumulate.
pub(super) fn gradient_fill(width: u64, layout: Layout, context: &Context) -> InstrTemplate {
    let after = operand(OperandSlot::After, width, layout, context);
    InstrTemplate { action: Action::Fused(FusedOp::Fill), reads: vec![], writes: vec![after] }
}

/// Adds one gradient to another of the same layout.
pub(super) fn gradient_sum(width: u64, layout: Layout, context: &Context) -> InstrTemplate {
    let before = operand(OperandSlot::Before, width, layout, context);
    let after = operand(OperandSlot::After, width, layout, context);
    InstrTemplate {
        action: Action::Fused(FusedOp::AddInto),
        reads: vec![before, after],
        writes: vec![after],
    }
}

fn operand(slot: OperandSlot, width: u64, layout: Layout, context: &Context) -> TemplateOperand {
    TemplateOperand { slot, extent: activation(width, layout, context) }
}

fn fused(op: FusedOp, read: TemplateOperand, write: TemplateOperand) -> InstrTemplate {
    InstrTemplate { action: Action::Fused(op), reads: vec![read], writes: vec![write] }
}
