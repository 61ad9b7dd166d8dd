//! Transfer functions of the gates and norms of crossing latents (LaX), which need whole rows.

use crate::DType;
use crate::program::FusedOp;

use super::super::error::{CheckResult, ensure};
use super::super::lattice::{
    AbstractState, AbstractValue, OperandWrite, PendingReduction, WriteTarget,
};
use super::super::operands::InstrOperands;
use super::super::values::ForwardOpKind;

/// The operation of a fused op, and its number of parameters for rows of this width.
fn kind_and_parameter_count(op: FusedOp, width: u64) -> (ForwardOpKind, u64) {
    match op {
        FusedOp::TensorGate { a, b } | FusedOp::TensorGateBackward { a, b } => {
            (ForwardOpKind::TensorGate { a, b }, a * a + b * b)
        }
        FusedOp::LatentNorm { activation } | FusedOp::LatentNormBackward { activation } => {
            (ForwardOpKind::LatentNorm { activation }, 2 * width)
        }
        // No other op is dispatched here.
        _ => (ForwardOpKind::Loss, 0),
    }
}

/// Checks that the row at `port` is whole and that the next operand has the parameters of the op.
fn check_row_and_parameters(
    operands: &InstrOperands,
    op: FusedOp,
    port: usize,
) -> CheckResult<ForwardOpKind> {
    let (x, weight) = (&operands.reads[port], &operands.reads[port + 1]);
    let (kind, parameters) = kind_and_parameter_count(op, x.columns.size);
    ensure(x.columns.sharded.is_none(), || {
        format!("needs whole rows, but reads a shard of their features ({x})")
    })?;
    if let ForwardOpKind::TensorGate { a, b } = kind {
        ensure(a.checked_mul(b) == Some(x.columns.size), || {
            format!("treats rows of {} features as {a}×{b} matrices", x.columns.size)
        })?;
    }
    let whole = weight.rows.size == 1 && weight.columns.sharded.is_none();
    ensure(whole && weight.columns.size == parameters, || {
        format!("needs {parameters} parameters in one row, but reads {weight}")
    })?;
    Ok(kind)
}

pub(super) fn forward(operands: &mut InstrOperands, op: FusedOp) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(2..=2, 1)?;
    operands.check_all_reduced()?;
    operands.check_no_pending_norm()?;
    let kind = check_row_and_parameters(operands, op, 0)?;
    let inputs = vec![operands.value(0)?, operands.value(1)?];
    let value = operands.apply(kind, inputs)?[0];
    let state = operands.reads[0].with_value(AbstractValue::Value(value));
    Ok(vec![OperandWrite { state, target: WriteTarget::Fresh }])
}

pub(super) fn backward(
    operands: &mut InstrOperands,
    op: FusedOp,
) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(4..=5, 2)?;
    for port in [0, 1, 2].into_iter().chain(4..operands.reads.len()) {
        operands.check_reduced(port)?;
    }
    operands.check_no_pending_norm()?;
    operands.check_same_layout(0, 1)?;
    let kind = check_row_and_parameters(operands, op, 1)?;
    let (dy, x, weight) = (operands.reads[0].value, operands.value(1)?, operands.value(2)?);
    let node = operands.checker.graph.differentiated_op(x, 0, dy, |candidate| candidate == kind)?;
    let graph = &operands.checker.graph;
    ensure(graph.inputs(node)[1] == weight, || {
        format!("uses {}, not the parameters of its forward pass", graph.name(weight))
    })?;
    let dx = operands.reads[1].with_value(graph.contribution(node, 0));
    let pending =
        if dx.rows.sharded.is_some() { PendingReduction::Sum } else { PendingReduction::None };
    let parameters = AbstractState { dtype: DType::F32, ..operands.reads[2] };
    let parameters = parameters.with_value(graph.contribution(node, 1)).with_pending(pending);
    let onto = (operands.reads.len() > 4).then_some(4);
    Ok(vec![operands.accumulate(onto, dx)?, operands.accumulate(Some(3), parameters)?])
}
