//! Transfer functions of GEMMs. Contracted sides must match in size and sharding: two sides sharded
//! alike give a partial sum, one sharded side alone is an error. The result keeps the sharding of its
//! sides, and one axis either shards a tensor once or leaves a partial sum. A partial operand gives a
//! partial result where no operand is sharded.

use crate::Dim;
use crate::program::{Extent, GemmOp, GemmRole};

use super::error::{CheckResult, ensure, fault};
use super::lattice::{
    AbstractState, AbstractValue, OperandWrite, PendingSum, ShardedExtent, WriteTarget,
};
use super::operands::InstrOperands;
use super::values::ForwardOpKind;

pub(super) fn transfer(
    operands: &mut InstrOperands,
    gemm: &GemmOp,
) -> CheckResult<Vec<OperandWrite>> {
    let sizes = [gemm.m, gemm.n, gemm.k, gemm.batch];
    ensure(sizes.iter().all(|size| (1..1 << 31).contains(size)), || {
        format!("has an invalid shape: {}×{}×{}, batch {}", gemm.m, gemm.n, gemm.k, gemm.batch)
    })?;
    match gemm.role {
        GemmRole::Forward => forward(operands, gemm),
        GemmRole::InputGradient => input_gradient(operands, gemm),
        GemmRole::WeightGradient => weight_gradient(operands, gemm),
    }
}

fn forward(operands: &mut InstrOperands, p: &GemmOp) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(2..=2, 1)?;
    ensure(!p.accumulate, || "accumulates in the forward pass".into())?;
    let (x, w) = (operands.reads[0], operands.reads[1]);
    sizes(operands, [(p.m, p.k * p.batch), (p.k, p.n * p.batch), (p.m, p.n * p.batch)])?;
    let owed = contract(x.columns, w.rows.times(p.batch))?;
    let owed = linear(operands, owed, &[x.rows, w.columns])?;
    no_norm(operands, 1)?;
    operands.gemm_sections(p.batch)?;
    let inputs = vec![operands.value(0)?, operands.value(1)?];
    let value = operands.apply(ForwardOpKind::Gemm { batch: p.batch }, inputs)?[0];
    let state = AbstractState {
        norm: x.norm,
        ..AbstractState::new(AbstractValue::Value(value), x.rows, w.columns, x.dtype)
    };
    one(state.owing(owed))
}

fn input_gradient(operands: &mut InstrOperands, p: &GemmOp) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(2..=3, 1)?;
    let (dy, w) = (operands.reads[0], operands.reads[1]);
    sizes(operands, [(p.m, p.k * p.batch), (p.n, p.k * p.batch), (p.m, p.n * p.batch)])?;
    let owed = contract(dy.columns, w.columns)?;
    let owed = linear(operands, owed, &[dy.rows, w.rows])?;
    no_norm(operands, 0)?;
    let weight = operands.value(1)?;
    let kind = ForwardOpKind::Gemm { batch: p.batch };
    let node = operands.check.values.user(weight, 1, dy.meaning, |k| k == kind)?;
    let meaning = operands.check.values.contribution(node, 0);
    let state = AbstractState::new(meaning, dy.rows, w.rows.times(p.batch), dy.dtype).owing(owed);
    ensure(p.accumulate == (operands.reads.len() == 3), || accumulate_mismatch(p))?;
    Ok(vec![operands.accumulated(p.accumulate.then_some(2), state)?])
}

fn weight_gradient(operands: &mut InstrOperands, p: &GemmOp) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(2..=3, 1)?;
    let (x, dy) = (operands.reads[0], operands.reads[1]);
    sizes(operands, [(p.k, p.m * p.batch), (p.k, p.n * p.batch), (p.m, p.n * p.batch)])?;
    let owed = contract(x.rows, dy.rows)?;
    let owed = linear(operands, owed, &[x.columns, dy.columns])?;
    ensure(p.accumulate && operands.reads.len() == 3, || {
        "overwrites the weight gradient of earlier microbatches instead of accumulating".into()
    })?;
    ensure(x.columns.size.is_multiple_of(p.batch), || {
        "has a batch that does not divide the columns of its input".into()
    })?;
    let kind = ForwardOpKind::Gemm { batch: p.batch };
    let input = operands.value(0)?;
    let node = operands.check.values.user(input, 0, dy.meaning, |k| k == kind)?;
    let meaning = operands.check.values.contribution(node, 1);
    let rows = ShardedExtent { size: x.columns.size / p.batch, ..x.columns };
    let dtype = operands.reads[2].dtype;
    let state = AbstractState::new(meaning, rows, dy.columns, dtype).owing(owed);
    Ok(vec![operands.accumulated(Some(2), state)?])
}

fn accumulate_mismatch(p: &GemmOp) -> String {
    match p.accumulate {
        true => "accumulates but reads no sum".into(),
        false => "reads a sum but does not accumulate".into(),
    }
}

fn one(state: AbstractState) -> CheckResult<Vec<OperandWrite>> {
    Ok(vec![OperandWrite { state, target: WriteTarget::Fresh }])
}

/// Checks the shapes and formats of the operands and the result.
fn sizes(operands: &InstrOperands, wanted: [(u64, u64); 3]) -> CheckResult {
    let seen = [&operands.instr.reads[0], &operands.instr.reads[1], &operands.instr.writes[0]];
    for (access, (rows, columns)) in seen.into_iter().zip(wanted) {
        let Extent { rows: r, columns: c, .. } = access.extent;
        ensure((r, c) == (rows, columns), || {
            let name = &operands.check.stage.buffer(access.buffer).name;
            format!("expects `{name}` as {rows}×{columns}, but accesses {}", access.extent)
        })?;
    }
    let inputs = (operands.reads[0].dtype, operands.reads[1].dtype);
    ensure(inputs.0 == inputs.1, || {
        format!(
            "multiplies {} by {}: operands must have one format",
            inputs.0.name(),
            inputs.1.name()
        )
    })
}

/// Whether contracting two sides gives a partial sum.
fn contract(one: ShardedExtent, two: ShardedExtent) -> CheckResult<bool> {
    ensure(one.size == two.size, || format!("contracts {} elements with {}", one.size, two.size))?;
    let name = |cut: Option<Dim>| match cut {
        None => "whole".to_string(),
        Some(dim) => format!("sharded by {}", crate::Layout::Sharded(dim)),
    };
    ensure(one.cut == two.cut, || {
        format!(
            "contracts a side that is {} with one that is {}: devices would multiply shards that do not match",
            name(one.cut),
            name(two.cut)
        )
    })?;
    Ok(one.cut.is_some())
}

/// The pending sum of the result, given that of the contraction and the remaining sides.
fn linear(
    operands: &InstrOperands,
    contracted: bool,
    sides: &[ShardedExtent],
) -> CheckResult<PendingSum> {
    let partial: Vec<usize> =
        (0..2).filter(|port| operands.reads[*port].tensor != PendingSum::Done).collect();
    let cut = contracted || sides.iter().any(|side| side.cut.is_some());
    match partial[..] {
        [] => Ok(if contracted { PendingSum::Owed } else { PendingSum::Done }),
        [_, _] => {
            fault("multiplies two partial sums: a product of sums is not the sum of products")
        }
        [port] if cut || operands.reads[port].tensor != PendingSum::Owed => fault(format!(
            "reads the partial sum {} while another operand is sharded over the same devices",
            operands.operand_name(port)
        )),
        _ => Ok(PendingSum::Owed),
    }
}

fn no_norm(operands: &InstrOperands, port: usize) -> CheckResult {
    ensure(operands.reads[port].norm.is_none(), || {
        format!(
            "reads {} before the division by its norm's root mean square",
            operands.operand_name(port)
        )
    })
}
