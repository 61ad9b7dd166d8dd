//! Transfer functions of the norms of heads of queries and keys.

use crate::program::QkHeads;

use super::super::error::{CheckResult, ensure};
use super::super::lattice::{OperandWrite, ShardedExtent};
use super::super::operands::InstrOperands;
use super::super::values::ForwardOpKind;
use super::row_parameters;

/// Checks that the operand at `port` begins with these heads, on all devices together, and that the next operand has their
/// scales.
fn check_heads_and_scales(
    operands: &InstrOperands,
    heads: QkHeads,
    port: usize,
) -> CheckResult<ForwardOpKind> {
    let QkHeads { head_dim, queries, keys } = heads;
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
    let expected = ShardedExtent::whole(heads.scale_count());
    ensure(scales.rows == ShardedExtent::whole(1) && scales.columns == expected, || {
        format!("needs the {} scales of its heads in one row, but reads {scales}", expected.size)
    })?;
    Ok(ForwardOpKind::QkNorm { head_dim, queries: widths[0], keys: widths[1] })
}

pub(super) fn forward(
    operands: &mut InstrOperands,
    heads: QkHeads,
) -> CheckResult<Vec<OperandWrite>> {
    row_parameters::forward(operands, |operands, port| {
        operands.check_split_sections(port, &[operands.reads[port].columns.size])?;
        check_heads_and_scales(operands, heads, port)
    })
}

pub(super) fn backward(
    operands: &mut InstrOperands,
    heads: QkHeads,
) -> CheckResult<Vec<OperandWrite>> {
    row_parameters::backward(operands, |operands, port| {
        check_heads_and_scales(operands, heads, port)
    })
}
