//! Transfer functions of gates and norms of crossing latents (LaX), which need whole rows.

use crate::DType;
use crate::program::FusedOp;

use super::super::error::{CheckResult, ensure};
use super::super::lattice::{AbstractState, AbstractValue, OperandWrite, PendingSum, WriteTarget};
use super::super::operands::InstrOperands;
use super::super::values::ForwardOpKind;

/// The operation of a pass, and how many parameters it has for rows of this width.
fn kind_of(op: FusedOp, width: u64) -> (ForwardOpKind, u64) {
    match op {
        FusedOp::TensorGate { a, b } | FusedOp::TensorGateBackward { a, b } => {
            (ForwardOpKind::TensorGate { a, b }, a * a + b * b)
        }
        FusedOp::LatentNorm { activation } | FusedOp::LatentNormBackward { activation } => {
            (ForwardOpKind::LatentNorm { activation }, 2 * width)
        }
        // No other pass is dispatched here.
        _ => (ForwardOpKind::Loss, 0),
    }
}

/// The row at `port` is whole, and the parameters after it are those of this operation.
fn fits(operands: &InstrOperands, op: FusedOp, port: usize) -> CheckResult<ForwardOpKind> {
    let (x, weight) = (&operands.reads[port], &operands.reads[port + 1]);
    let (kind, parameters) = kind_of(op, x.columns.size);
    ensure(x.columns.cut.is_none(), || {
        format!("needs whole rows, but reads a shard of their features ({x})")
    })?;
    if let ForwardOpKind::TensorGate { a, b } = kind {
        ensure(a.checked_mul(b) == Some(x.columns.size), || {
            format!("treats rows of {} features as {a}×{b} matrices", x.columns.size)
        })?;
    }
    let whole = weight.rows.size == 1 && weight.columns.cut.is_none();
    ensure(whole && weight.columns.size == parameters, || {
        format!("needs {parameters} parameters in one row, but reads {weight}")
    })?;
    Ok(kind)
}

pub(super) fn forward(operands: &mut InstrOperands, op: FusedOp) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(2..=2, 1)?;
    operands.all_summed()?;
    operands.none_owes_norm()?;
    let kind = fits(operands, op, 0)?;
    let inputs = vec![operands.value(0)?, operands.value(1)?];
    let value = operands.apply(kind, inputs)?[0];
    let state = operands.reads[0].with(AbstractValue::Value(value));
    Ok(vec![OperandWrite { state, target: WriteTarget::Fresh }])
}

pub(super) fn backward(
    operands: &mut InstrOperands,
    op: FusedOp,
) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(4..=5, 2)?;
    for port in [0, 1, 2].into_iter().chain(4..operands.reads.len()) {
        operands.summed(port)?;
    }
    operands.none_owes_norm()?;
    operands.same_layout(0, 1)?;
    let kind = fits(operands, op, 1)?;
    let (dy, x, weight) = (operands.reads[0].meaning, operands.value(1)?, operands.value(2)?);
    let node = operands.check.values.user(x, 0, dy, |found| found == kind)?;
    let values = &operands.check.values;
    ensure(values.inputs(node)[1] == weight, || {
        format!("uses {}, not the parameters of its forward pass", values.name(weight))
    })?;
    let dx = operands.reads[1].with(values.contribution(node, 0));
    let owed = if dx.rows.cut.is_some() { PendingSum::Owed } else { PendingSum::Done };
    let parameters = AbstractState { dtype: DType::F32, ..operands.reads[2] };
    let parameters = parameters.with(values.contribution(node, 1)).owing(owed);
    let onto = (operands.reads.len() > 4).then_some(4);
    Ok(vec![operands.accumulated(onto, dx)?, operands.accumulated(Some(3), parameters)?])
}
