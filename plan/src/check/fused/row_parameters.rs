//! Transfer functions of ops of one input with all their parameters in one row.

use crate::DType;

use super::super::error::{CheckResult, ensure};
use super::super::lattice::{
    AbstractState, AbstractValue, OperandWrite, PendingReduction, WriteTarget,
};
use super::super::operands::InstrOperands;
use super::super::values::ForwardOpKind;

/// Input and parameters give an output in the layout of the input. `check` returns the operation of an input at a port and
/// the parameters after it.
pub(super) fn forward(
    operands: &mut InstrOperands,
    check: impl Fn(&InstrOperands, usize) -> CheckResult<ForwardOpKind>,
) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(2..=2, 1)?;
    operands.check_all_reduced()?;
    operands.check_no_pending_norm()?;
    let kind = check(operands, 0)?;
    let inputs = vec![operands.value(0)?, operands.value(1)?];
    let value = operands.apply(kind, inputs)?[0];
    let state = operands.reads[0].with_value(AbstractValue::Value(value));
    Ok(vec![OperandWrite { state, target: WriteTarget::Fresh }])
}

/// Reads the gradient of the output, the input and the parameters, and writes the gradients of the input and of the
/// parameters. A device that has a shard of the input has a partial sum of the latter.
pub(super) fn backward(
    operands: &mut InstrOperands,
    check: impl Fn(&InstrOperands, usize) -> CheckResult<ForwardOpKind>,
) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(4..=5, 2)?;
    for port in [0, 1, 2].into_iter().chain(4..operands.reads.len()) {
        operands.check_reduced(port)?;
    }
    operands.check_no_pending_norm()?;
    operands.check_same_layout(0, 1)?;
    let kind = check(operands, 1)?;
    let (dy, x, weight) = (operands.reads[0].value, operands.value(1)?, operands.value(2)?);
    let node = operands.checker.graph.differentiated_op(x, 0, dy, |candidate| candidate == kind)?;
    let graph = &operands.checker.graph;
    ensure(graph.inputs(node)[1] == weight, || {
        format!("uses {}, not the parameters of its forward pass", graph.name(weight))
    })?;
    let dx = operands.reads[1].with_value(graph.contribution(node, 0));
    let is_part = dx.rows.sharded.is_some() || dx.columns.sharded.is_some();
    let pending = if is_part { PendingReduction::Sum } else { PendingReduction::None };
    let parameters = AbstractState { dtype: DType::F32, ..operands.reads[2] };
    let parameters = parameters.with_value(graph.contribution(node, 1)).with_pending(pending);
    let onto = (operands.reads.len() > 4).then_some(4);
    Ok(vec![operands.accumulate(onto, dx)?, operands.accumulate(Some(3), parameters)?])
}
