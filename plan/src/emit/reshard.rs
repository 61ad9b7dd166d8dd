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

/// An all-reduce within a pass.
const SUM_OVER_TENSOR: (CollectiveFunction, Axis) =
    (CollectiveFunction::AllReduce(Reduction::Sum), Axis::Tensor);

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
///
/// The collectives of attention over the context axis run before or after the reshard over the tensor axis.
pub(super) fn reshard(
    width: u64,
    from: Layout,
    to: Layout,
    statistic: bool,
    context: &Context,
) -> Option<Vec<InstrTemplate>> {
    let by_position = context.heads_by_position();
    let over_context = |layout| matches!(layout, Layout::Heads | Layout::Gathered);
    if over_context(from) == over_context(to) || from == by_position || to == by_position {
        return single_reshard(width, (from, to), statistic, context);
    }
    let mut first = single_reshard(width, (from, by_position), false, context)?;
    let mut second = single_reshard(width, (by_position, to), false, context)?;
    rename_slots(&mut first, |slot| match slot {
        OperandSlot::After => BETWEEN,
        slot => slot,
    });
    rename_slots(&mut second, |slot| match slot {
        OperandSlot::Before => BETWEEN,
        OperandSlot::Temporary(index) => OperandSlot::Temporary(index + 2),
        slot => slot,
    });
    first.append(&mut second);
    Some(first)
}

/// The tensor between a reshard over the tensor axis and one over the context axis. Each has up to two other temporary
/// tensors.
const BETWEEN: OperandSlot = OperandSlot::Temporary(4);

fn rename_slots(templates: &mut [InstrTemplate], rename: impl Fn(OperandSlot) -> OperandSlot) {
    let operands = templates.iter_mut().flat_map(|t| t.reads.iter_mut().chain(&mut t.writes));
    operands.for_each(|operand| operand.slot = rename(operand.slot));
}

/// A reshard over one axis.
fn single_reshard(
    width: u64,
    (from, to): (Layout, Layout),
    statistic: bool,
    context: &Context,
) -> Option<Vec<InstrTemplate>> {
    use Layout::{Gathered, Heads, Partial, Replicated, Sharded};
    if from == to {
        return Some(vec![]);
    }
    let before = operand(OperandSlot::Before, width, from, context);
    let after = operand(OperandSlot::After, width, to, context);
    let (positions, heads) = (Sharded(Dim::Position), Sharded(Dim::Feature));
    let (axis, on_axis, function) = match (from, to) {
        (_, Partial) => return None,
        (Replicated, Sharded(dim)) => {
            return Some(vec![fused(FusedOp::Slice { dim }, before, after)]);
        }
        (Partial, Replicated) => return Some(vec![all_reduce(before, after, statistic, context)]),
        (_, Heads) => (Axis::Context, (positions, heads), CollectiveFunction::AllToAll),
        (Heads, _) => (Axis::Context, (heads, positions), CollectiveFunction::AllToAll),
        (_, Gathered) => (Axis::Context, (positions, Replicated), CollectiveFunction::AllGather),
        (Gathered, _) => (Axis::Context, (Partial, positions), CollectiveFunction::ReduceScatter),
        (Partial, Sharded(_)) => (Axis::Tensor, (from, to), CollectiveFunction::ReduceScatter),
        (Sharded(_), Replicated) => (Axis::Tensor, (from, to), CollectiveFunction::AllGather),
        (Sharded(_), Sharded(_)) => (Axis::Tensor, (from, to), CollectiveFunction::AllToAll),
        (Replicated, Replicated) => return Some(vec![]),
    };
    let pack = packed_dim(on_axis.1, axis, context);
    let unpack = packed_dim(on_axis.0, axis, context);
    let mut templates = vec![];
    let mut source = before;
    if let Some(dim) = pack {
        let packed = TemplateOperand { slot: OperandSlot::Temporary(0), ..before };
        templates.push(fused(FusedOp::Pack { dim, axis }, before, packed));
        source = packed;
    }
    let target = if unpack.is_some() {
        TemplateOperand { slot: OperandSlot::Temporary(1), ..after }
    } else {
        after
    };
    let payload = match axis {
        Axis::Context => before.extent.bytes().min(after.extent.bytes()) * context.mesh.context,
        _ => activation_bytes(width, Replicated, context),
    };
    let bytes = (payload, Bytes(0));
    templates.push(collective(
        (function, axis),
        on_axis,
        bytes,
        vec![source],
        vec![target],
        context,
    ));
    if let Some(dim) = unpack {
        templates.push(fused(FusedOp::Unpack { dim, axis }, target, after));
    }
    Some(templates)
}

/// The dimension to pack by before the collective, or to unpack by after it; `None` for shards that are
/// contiguous already.
fn packed_dim(layout: Layout, axis: Axis, context: &Context) -> Option<Dim> {
    let Layout::Sharded(dim) = layout else { return None };
    let contiguous = dim != Dim::Feature && context.tokens_contiguous(dim, axis);
    (!contiguous).then_some(dim)
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
    collective(SUM_OVER_TENSOR, SUM, payload, reads, writes, context)
}

fn collective(
    (function, axis): (CollectiveFunction, Axis),
    (from, to): (Layout, Layout),
    (payload, statistic): (Bytes, Bytes),
    reads: Vec<TemplateOperand>,
    writes: Vec<TemplateOperand>,
    context: &Context,
) -> InstrTemplate {
    let group = context.mesh.group(axis);
    let action =
        Action::Collective(CollectiveOp { function, axis, from, to, payload, statistic, group });
    InstrTemplate { action, reads, writes }
}

/// All-reduces a small fp32 buffer over the tensor axis, in place.
pub(super) fn all_reduce_statistic(operand: TemplateOperand, context: &Context) -> InstrTemplate {
    let payload = (Bytes(0), operand.extent.bytes());
    let operands = vec![operand];
    collective(SUM_OVER_TENSOR, SUM, payload, operands.clone(), operands, context)
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
