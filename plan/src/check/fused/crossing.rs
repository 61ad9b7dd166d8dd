//! Transfer functions of the gates and norms of crossing latents (LaX), which need whole rows.

use crate::program::FusedOp;

use super::super::error::{CheckResult, ensure};
use super::super::lattice::OperandWrite;
use super::super::operands::InstrOperands;
use super::super::values::ForwardOpKind;
use super::row_parameters;

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
    row_parameters::forward(operands, |operands, port| check_row_and_parameters(operands, op, port))
}

pub(super) fn backward(
    operands: &mut InstrOperands,
    op: FusedOp,
) -> CheckResult<Vec<OperandWrite>> {
    row_parameters::backward(operands, |operands, port| {
        check_row_and_parameters(operands, op, port)
    })
}
