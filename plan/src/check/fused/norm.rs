//! Transfer functions of RMSNorm: one kernel on whole rows; on sharded features, a partial statistic and
//! an application that needs it reduced; or the scaled input with its division pending (online).

use crate::DType;
use crate::program::FusedOp;

use super::super::error::{CheckResult, ensure};
use super::super::lattice::{
    AbstractState, AbstractValue, ForwardValueId, OperandWrite, PendingReduction, WriteTarget,
};
use super::super::operands::InstrOperands;
use super::super::values::{ForwardOpId, ForwardOpKind};

pub(super) fn forward(operands: &mut InstrOperands, op: FusedOp) -> CheckResult<Vec<OperandWrite>> {
    let (reads, writes) = match op {
        FusedOp::NormStatistic => (1, 1),
        FusedOp::NormApply => (3, 1),
        FusedOp::NormScale => (2, 1),
        _ => (2, 2),
    };
    operands.check_arity(reads..=reads, writes)?;
    operands.check_all_reduced()?;
    operands.check_no_pending_norm()?;
    let x = operands.reads[0];
    let input = operands.value(0)?;
    if op == FusedOp::NormForward {
        ensure(x.columns.sharded.is_none(), || {
            format!("needs whole rows, but reads a shard of their features ({x})")
        })?;
    }
    let statistic = match op {
        FusedOp::NormStatistic => operands.apply(ForwardOpKind::Statistic, vec![input])?[0],
        FusedOp::NormForward | FusedOp::NormOnline => {
            operands.apply_to(ForwardOpKind::Statistic, vec![input], 1..2)?[0]
        }
        _ => statistic_of(operands, input)?,
    };
    let sum =
        if x.columns.sharded.is_some() { PendingReduction::Sum } else { PendingReduction::None };
    let fresh = |state| OperandWrite { state, target: WriteTarget::Fresh };
    let statistics = fresh(x.per_row(statistic, 1).with_pending(sum));
    if op == FusedOp::NormStatistic {
        return Ok(vec![statistics]);
    }
    check_scale(operands, 1, 0)?;
    if op == FusedOp::NormApply {
        check_row_statistic(operands, 2, 0)?;
        let divisor = operands.value(2)?;
        ensure(divisor == statistic, || {
            format!("divides by {}, not by the input's own statistic", operands.operand_name(2))
        })?;
    }
    let inputs = vec![input, operands.value(1)?];
    let pending = matches!(op, FusedOp::NormOnline | FusedOp::NormScale);
    let kind = if pending { ForwardOpKind::Scaled } else { ForwardOpKind::Normed };
    let value = operands.apply_to(kind, inputs, 0..1)?[0];
    let state = AbstractState {
        pending_norm: pending.then_some(statistic),
        ..x.with_value(AbstractValue::Value(value))
    };
    let mut results = vec![fresh(state)];
    if writes == 2 {
        results.push(statistics);
    }
    Ok(results)
}

/// The statistic of a value, which an earlier instruction must have computed.
fn statistic_of(
    operands: &mut InstrOperands,
    input: ForwardValueId,
) -> CheckResult<ForwardValueId> {
    let op = operands.checker.graph.find(ForwardOpKind::Statistic, &[input]);
    match op {
        Some(node) => Ok(operands.checker.graph.outputs(node)[0]),
        None => super::super::error::fault(format!(
            "needs the statistic of {}, which nothing computed",
            operands.operand_name(0)
        )),
    }
}

/// Checks that γ is one row, sharded like the features of x.
fn check_scale(operands: &InstrOperands, scale: usize, x: usize) -> CheckResult {
    let (scale, x) = (&operands.reads[scale], &operands.reads[x]);
    ensure(scale.rows.size == 1 && scale.columns == x.columns, || {
        format!("cannot scale {x} by {scale}")
    })
}

/// Checks that an operand is one statistic per row of x.
fn check_row_statistic(operands: &InstrOperands, statistics: usize, x: usize) -> CheckResult {
    let (statistics, x) = (&operands.reads[statistics], &operands.reads[x]);
    ensure(statistics.rows == x.rows && statistics.columns.size == 1, || {
        format!("needs one statistic for each row of {x}, but reads {statistics}")
    })
}

pub(super) fn backward(
    operands: &mut InstrOperands,
    op: FusedOp,
) -> CheckResult<Vec<OperandWrite>> {
    if op == FusedOp::NormBackwardStatistic {
        operands.check_arity(3..=3, 1)?;
        operands.check_all_reduced()?;
        let (_, y) = differentiated_norm(operands, ForwardOpKind::Normed)?;
        let x = operands.reads[1];
        let value = operands.apply(ForwardOpKind::NormSum, vec![y])?[0];
        let sum = if x.columns.sharded.is_some() {
            PendingReduction::Sum
        } else {
            PendingReduction::None
        };
        let state = x.per_row(value, 1).with_pending(sum);
        return Ok(vec![OperandWrite { state, target: WriteTarget::Fresh }]);
    }
    let statistics = if op == FusedOp::NormBackwardApply { 2 } else { 1 };
    let onto_scale = 3 + statistics;
    operands.check_arity(onto_scale + 1..=onto_scale + 2, 2)?;
    for port in (0..onto_scale).chain(onto_scale + 1..operands.reads.len()) {
        operands.check_reduced(port)?;
    }
    let kind = if op == FusedOp::NormOnlineBackward {
        ForwardOpKind::Scaled
    } else {
        ForwardOpKind::Normed
    };
    let (node, y) = differentiated_norm(operands, kind)?;
    for port in 3..onto_scale {
        check_row_statistic(operands, port, 1)?;
    }
    let input = operands.value(1)?;
    let statistic = statistic_of(operands, input)?;
    check_statistics(operands, op, statistic, y)?;
    let x = operands.reads[1];
    if op == FusedOp::NormBackward {
        ensure(x.columns.sharded.is_none(), || {
            format!("needs whole rows, but reads a shard of their features ({x})")
        })?;
    }
    let dx = x.with_value(operands.checker.graph.contribution(node, 0));
    let dx = AbstractState { pending_norm: None, ..dx };
    let pending =
        if x.rows.sharded.is_some() { PendingReduction::Sum } else { PendingReduction::None };
    let scale = AbstractState { dtype: DType::F32, ..operands.reads[2] };
    let scale =
        scale.with_value(operands.checker.graph.contribution(node, 1)).with_pending(pending);
    let onto = (operands.reads.len() > onto_scale + 1).then_some(onto_scale + 1);
    Ok(vec![operands.accumulate(onto, dx)?, operands.accumulate(Some(onto_scale), scale)?])
}

/// The norm whose output gradient, input and scale are the first three operands, with its output.
fn differentiated_norm(
    operands: &mut InstrOperands,
    kind: ForwardOpKind,
) -> CheckResult<(ForwardOpId, ForwardValueId)> {
    operands.check_same_layout(0, 1)?;
    check_scale(operands, 2, 1)?;
    let (dy, x, scale) = (operands.reads[0].value, operands.value(1)?, operands.value(2)?);
    let node = operands.checker.graph.differentiated_op(x, 0, dy, |candidate| candidate == kind)?;
    let graph = &operands.checker.graph;
    ensure(graph.inputs(node)[1] == scale, || {
        format!("uses {}, not the scale of its forward pass", graph.name(scale))
    })?;
    Ok((node, graph.outputs(node)[0]))
}

fn check_statistics(
    operands: &InstrOperands,
    op: FusedOp,
    statistic: ForwardValueId,
    y: ForwardValueId,
) -> CheckResult {
    let graph = &operands.checker.graph;
    let operand = operands.reads[3].value;
    if op == FusedOp::NormOnlineBackward {
        return ensure(graph.is_complete(operand, statistic), || {
            format!(
                "needs the complete gradient of the statistic, but reads {}",
                graph.describe(operand)
            )
        });
    }
    ensure(operand == AbstractValue::Value(statistic), || {
        format!("reads {}, not the statistic of its input", graph.describe(operand))
    })?;
    if op == FusedOp::NormBackwardApply {
        let sum = graph.find(ForwardOpKind::NormSum, &[y]).map(|node| graph.outputs(node)[0]);
        let operand = operands.reads[4].value;
        return ensure(sum.map(AbstractValue::Value) == Some(operand), || {
            format!("reads {}, not the row sums of its gradient", graph.describe(operand))
        });
    }
    Ok(())
}
