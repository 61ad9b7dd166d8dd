//! Transfer functions of element-wise and per-row ops, and of copies.

use crate::mesh::Axis;
use crate::model::GatedProduct;
use crate::{Dim, Layout};

use super::super::error::{CheckResult, ensure, fault};
use super::super::lattice::{
    AbstractState, AbstractValue, ContextPart, OperandWrite, PackedParts, PendingReduction,
    ShardedExtent, WriteTarget,
};
use super::super::operands::InstrOperands;
use super::super::values::ForwardOpKind;

fn fresh(state: AbstractState) -> CheckResult<Vec<OperandWrite>> {
    Ok(vec![OperandWrite { state, target: WriteTarget::Fresh }])
}

/// Features that the op rotates on all devices together: the first ones of every shard.
fn rotated_width(operands: &InstrOperands, head_dim: u64) -> CheckResult<u64> {
    operands.check_arity(1..=1, 1)?;
    operands.check_no_pending_norm()?;
    let (read, written) = (operands.instr.reads[0].extent, operands.instr.writes[0].extent);
    ensure(read == written, || format!("rotates in place, but reads {read} and writes {written}"))?;
    ensure(operands.reads[0].pending != PendingReduction::Maximum, || "rotates a maximum".into())?;
    let whole_heads = head_dim > 0 && head_dim.is_multiple_of(2);
    ensure(whole_heads && read.columns.is_multiple_of(head_dim), || {
        format!("rotates {} features, which are not whole heads of {head_dim}", read.columns)
    })?;
    let shards = if operands.reads[0].columns.sharded.is_some() { operands.devices() } else { 1 };
    Ok(read.columns * shards)
}

/// The rotation is linear, so a partial sum may be rotated.
pub(super) fn rope(operands: &mut InstrOperands, head_dim: u64) -> CheckResult<Vec<OperandWrite>> {
    let width = rotated_width(operands, head_dim)?;
    let input = operands.value(0)?;
    let value = operands.apply(ForwardOpKind::Rope { width, head_dim }, vec![input])?[0];
    let state = operands.reads[0].with_value(AbstractValue::Value(value));
    Ok(vec![OperandWrite { state, target: WriteTarget::InPlace(0) }])
}

pub(super) fn rope_backward(
    operands: &mut InstrOperands,
    head_dim: u64,
) -> CheckResult<Vec<OperandWrite>> {
    let width = rotated_width(operands, head_dim)?;
    let graph = &operands.checker.graph;
    let gradient = operands.reads[0].value;
    let node = match gradient {
        AbstractValue::Gradient { of, .. } if graph.is_complete(gradient, of) => graph.producer(of),
        _ => None,
    };
    match node.filter(|node| graph.kind(*node) == ForwardOpKind::Rope { width, head_dim }) {
        Some(node) => {
            let state = operands.reads[0].with_value(graph.contribution(node, 0));
            Ok(vec![OperandWrite { state, target: WriteTarget::InPlace(0) }])
        }
        None => fault(format!(
            "rotates {width} features of {} back, which is not the complete gradient of a value rotated the same way",
            graph.describe(gradient)
        )),
    }
}

/// State of the product of gate and up, which are one operand or two in the same layout.
fn product_state(
    operands: &InstrOperands,
    first: usize,
    count: usize,
) -> CheckResult<AbstractState> {
    let mut size = 0;
    for port in first..first + count {
        let (state, other) = (&operands.reads[port], &operands.reads[first]);
        ensure(state.rows == other.rows && state.columns == other.columns, || {
            format!("multiplies {other} by {state}: their layouts differ")
        })?;
        size += state.columns.size;
    }
    let state = operands.reads[first];
    Ok(AbstractState { columns: ShardedExtent { size: size / 2, ..state.columns }, ..state })
}

pub(super) fn gated(
    operands: &mut InstrOperands,
    product: GatedProduct,
) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(1..=2, 1)?;
    operands.check_all_reduced()?;
    operands.check_no_pending_norm()?;
    let state = product_state(operands, 0, operands.reads.len())?;
    operands.check_sections(0..operands.reads.len(), &[state.columns.size; 2])?;
    let inputs =
        (0..operands.reads.len()).map(|port| operands.value(port)).collect::<CheckResult<_>>()?;
    let value = operands.apply(ForwardOpKind::Gated { product }, inputs)?[0];
    fresh(state.with_value(AbstractValue::Value(value)))
}

pub(super) fn gated_backward(
    operands: &mut InstrOperands,
    product: GatedProduct,
) -> CheckResult<Vec<OperandWrite>> {
    let inputs = operands.instr.writes.len();
    operands.check_arity(inputs + 1..=inputs + 1, inputs)?;
    ensure((1..=2).contains(&inputs), || "needs one or two inputs".into())?;
    operands.check_all_reduced()?;
    operands.check_no_pending_norm()?;
    let state = product_state(operands, 1, inputs)?;
    let dy = operands.reads[0];
    ensure(dy.same_layout(&state), || {
        format!("reads the gradient {dy} for the product {state}: their layouts differ")
    })?;
    let first = operands.value(1)?;
    let graph = &operands.checker.graph;
    let node = graph
        .differentiated_op(first, 0, dy.value, |kind| kind == ForwardOpKind::Gated { product })?;
    let mut writes = vec![];
    for port in 0..inputs {
        ensure(operands.value(1 + port)? == graph.inputs(node)[port], || {
            format!("reads {}, not the input of its forward pass", operands.operand_name(1 + port))
        })?;
        let state = operands.reads[1 + port].with_value(graph.contribution(node, port));
        writes.push(OperandWrite { state, target: WriteTarget::FreshOrInPlace(1 + port) });
    }
    Ok(writes)
}

pub(super) fn add(operands: &mut InstrOperands) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(2..=2, 1)?;
    operands.check_no_pending_norm()?;
    operands.check_same_layout(0, 1)?;
    ensure(operands.reads[0].pending != PendingReduction::Maximum, || "adds maxima".into())?;
    let inputs = vec![operands.value(0)?, operands.value(1)?];
    let value = operands.apply(ForwardOpKind::Add, inputs)?[0];
    fresh(operands.reads[0].with_value(AbstractValue::Value(value)))
}

pub(super) fn add_into(operands: &mut InstrOperands) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(2..=2, 1)?;
    let added = operands.reads[0];
    ensure(matches!(added.value, AbstractValue::Gradient { .. }), || {
        format!("adds {}, which is not a gradient", operands.checker.graph.describe(added.value))
    })?;
    Ok(vec![operands.accumulate(Some(1), added)?])
}

/// Zeros in any layout: the first contribution decides the layout.
pub(super) fn fill(operands: &mut InstrOperands) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(0..=0, 1)?;
    let extent = operands.instr.writes[0].extent;
    let Some(rows) = operands.checker.tokens(extent.rows) else {
        return fault(format!(
            "fills {} rows, which is not a shard of the microbatch's tokens",
            extent.rows
        ));
    };
    fresh(AbstractState::new(
        AbstractValue::Zero,
        rows,
        ShardedExtent::whole(extent.columns),
        extent.dtype,
    ))
}

/// Packs the parts along a dimension that is not sharded.
pub(super) fn pack(
    operands: &mut InstrOperands,
    parts: PackedParts,
) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(1..=1, 1)?;
    let state = operands.reads[0];
    ensure(state.packed.is_none(), || {
        format!("reads {}, which is already packed", operands.operand_name(0))
    })?;
    let is_divided = match parts.axis {
        Axis::Context => match state.over_context {
            ContextPart::Positions => parts.dim == Dim::Position,
            ContextPart::Features => parts.dim == Dim::Feature,
            ContextPart::Whole | ContextPart::Summand => false,
        },
        _ => state.layout() == Layout::Sharded(parts.dim),
    };
    ensure(!is_divided, || {
        format!(
            "packs {} along a dimension that is already sharded ({state})",
            operands.operand_name(0)
        )
    })?;
    check_parts(operands, &state, parts)?;
    fresh(AbstractState { packed: Some(parts), ..state })
}

/// Checks that a part of the features is an equal part of each section.
fn check_parts(operands: &InstrOperands, state: &AbstractState, parts: PackedParts) -> CheckResult {
    let context = operands.checker.context;
    if parts.dim != Dim::Feature {
        return Ok(());
    }
    let whole = state.columns.size / state.columns.local(operands.devices()).max(1);
    let divisor = whole * context.axis_size(parts.axis);
    let sections = operands.operand_sections(0);
    ensure(sections.iter().all(|width| width.is_multiple_of(divisor)), || {
        format!("packs sections of {sections:?} features into {divisor} parts of each")
    })
}

/// Unpacks the parts along the dimension that was sharded before the collective.
pub(super) fn unpack(
    operands: &mut InstrOperands,
    parts: PackedParts,
) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(1..=1, 1)?;
    let state = operands.reads[0];
    ensure(state.packed == Some(parts), || match state.packed {
        None => format!("reads {}, which is not packed", operands.operand_name(0)),
        Some(other) => {
            format!("reads a tensor packed by {other}, but unpacks by {parts}")
        }
    })?;
    fresh(AbstractState { packed: None, ..state })
}

/// This device's shard of a replicated tensor.
pub(super) fn slice(operands: &mut InstrOperands, dim: Dim) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(1..=1, 1)?;
    let state = operands.reads[0];
    ensure(state.layout() == Layout::Replicated, || {
        format!("slices {}, which is not replicated ({state})", operands.operand_name(0))
    })?;
    ensure(dim == Dim::Feature || operands.checker.context.token_dim() == Some(dim), || {
        format!("slices tokens by {}, but this mesh does not shard tokens so", Layout::Sharded(dim))
    })?;
    let shard = |applies: bool, side: ShardedExtent| {
        if applies { ShardedExtent { sharded: Some(dim), ..side } } else { side }
    };
    let features = dim == Dim::Feature;
    let (rows, columns) = (shard(!features, state.rows), shard(features, state.columns));
    fresh(AbstractState { rows, columns, ..state })
}
