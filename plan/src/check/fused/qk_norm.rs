//! Transfer functions of the norms of heads of queries and keys.

use crate::DType;

use super::super::error::{CheckResult, ensure};
use super::super::lattice::{
    AbstractState, AbstractValue, OperandWrite, PendingReduction, ShardedExtent, WriteTarget,
};
use super::super::operands::InstrOperands;
use super::super::values::ForwardOpKind;

/// Heads as an instruction states them: those on one device.
#[derive(Clone, Copy)]
pub(super) struct LocalHeads {
    pub head_dim: u64,
    pub queries: u64,
    pub keys: u64,
}

/// Checks that the operand at `port` begins with these heads, on all devices together, and that the next operand has their
/// scales.
fn check_heads_and_scales(
    operands: &InstrOperands,
    heads: LocalHeads,
    port: usize,
) -> CheckResult<ForwardOpKind> {
    let LocalHeads { head_dim, queries, keys } = heads;
    let (x, scales) = (&operands.reads[port], &operands.reads[port + 1]);
    let shards = if x.columns.sharded.is_some() { operands.devices() } else { 1 };
    let widths = [queries, keys]
        .map(|count| count.checked_mul(shards).and_then(|count| count.checked_mul(head_dim)));
    let widths: Vec<u64> = widths.into_iter().map(|width| width.unwrap_or(u64::MAX)).collect();
    let normed: Vec<u64> = widths.iter().copied().filter(|width| *width > 0).collect();
    let sections = operands.operand_sections(port);
    ensure(!normed.is_empty() && sections.starts_with(&normed), || {
        format!("norms heads in sections {normed:?} of an operand with sections {sections:?}")
    })?;
    ensure(x.columns.size.is_multiple_of(head_dim), || {
        format!("norms heads of {head_dim} features in rows of {}", x.columns.size)
    })?;
    let expected = ShardedExtent::whole(normed.len() as u64 * head_dim);
    ensure(scales.rows == ShardedExtent::whole(1) && scales.columns == expected, || {
        format!("needs the {} scales of its heads in one row, but reads {scales}", expected.size)
    })?;
    Ok(ForwardOpKind::QkNorm { head_dim, queries: widths[0], keys: widths[1] })
}

pub(super) fn forward(
    operands: &mut InstrOperands,
    heads: LocalHeads,
) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(2..=2, 1)?;
    operands.check_all_reduced()?;
    operands.check_no_pending_norm()?;
    let kind = check_heads_and_scales(operands, heads, 0)?;
    operands.check_split_sections(0, &[operands.reads[0].columns.size])?;
    let inputs = vec![operands.value(0)?, operands.value(1)?];
    let value = operands.apply(kind, inputs)?[0];
    let state = operands.reads[0].with_value(AbstractValue::Value(value));
    Ok(vec![OperandWrite { state, target: WriteTarget::Fresh }])
}

pub(super) fn backward(
    operands: &mut InstrOperands,
    heads: LocalHeads,
) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(4..=5, 2)?;
    for port in [0, 1, 2].into_iter().chain(4..operands.reads.len()) {
        operands.check_reduced(port)?;
    }
    operands.check_no_pending_norm()?;
    operands.check_same_layout(0, 1)?;
    let kind = check_heads_and_scales(operands, heads, 1)?;
    let (dy, x, scales) = (operands.reads[0].value, operands.value(1)?, operands.value(2)?);
    let node = operands.checker.graph.differentiated_op(x, 0, dy, |candidate| candidate == kind)?;
    let graph = &operands.checker.graph;
    ensure(graph.inputs(node)[1] == scales, || {
        format!("uses {}, not the scales of its forward pass", graph.name(scales))
    })?;
    let dx = operands.reads[1].with_value(graph.contribution(node, 0));
    // Every device adds the parts of its tokens, or of its heads.
    let is_part = dx.rows.sharded.is_some() || dx.columns.sharded.is_some();
    let pending = if is_part { PendingReduction::Sum } else { PendingReduction::None };
    let dscales = AbstractState { dtype: DType::F32, ..operands.reads[2] };
    let dscales = dscales.with_value(graph.contribution(node, 1)).with_pending(pending);
    let onto = (operands.reads.len() > 4).then_some(4);
    Ok(vec![operands.accumulate(onto, dx)?, operands.accumulate(Some(3), dscales)?])
}
