//! Transfer functions of norms: whole rows in one pass; a statistic that is partial where features are
//! sharded, and an application that needs it reduced; or the scaled input with the division pending.

use crate::DType;
use crate::program::FusedOp;

use super::super::error::{CheckResult, ensure};
use super::super::lattice::{
    AbstractState, AbstractValue, OperandWrite, PendingSum, SymbolId, WriteTarget,
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
    operands.all_summed()?;
    operands.none_owes_norm()?;
    let x = operands.reads[0];
    let input = operands.value(0)?;
    if op == FusedOp::NormForward {
        ensure(x.columns.cut.is_none(), || {
            format!("needs whole rows, but reads a shard of their features ({x})")
        })?;
    }
    let statistic = match op {
        FusedOp::NormStatistic => operands.apply(ForwardOpKind::Statistic, vec![input])?[0],
        FusedOp::NormForward | FusedOp::NormOnline => {
            operands.apply_to(ForwardOpKind::Statistic, vec![input], 1..2)?[0]
        }
        _ => known_statistic(operands, input)?,
    };
    let sum = if x.columns.cut.is_some() { PendingSum::Owed } else { PendingSum::Done };
    let fresh = |state| OperandWrite { state, target: WriteTarget::Fresh };
    let statistics = fresh(x.per_row(statistic, 1).owing(sum));
    if op == FusedOp::NormStatistic {
        return Ok(vec![statistics]);
    }
    scale_fits(operands, 1, 0)?;
    if op == FusedOp::NormApply {
        rows_fit(operands, 2, 0)?;
        let given = operands.value(2)?;
        ensure(given == statistic, || {
            format!("divides by {}, not by the input's own statistic", operands.operand_name(2))
        })?;
    }
    let inputs = vec![input, operands.value(1)?];
    let owed = matches!(op, FusedOp::NormOnline | FusedOp::NormScale);
    let kind = if owed { ForwardOpKind::Scaled } else { ForwardOpKind::Normed };
    let value = operands.apply_to(kind, inputs, 0..1)?[0];
    let state =
        AbstractState { norm: owed.then_some(statistic), ..x.with(AbstractValue::Value(value)) };
    let mut written = vec![fresh(state)];
    if writes == 2 {
        written.push(statistics);
    }
    Ok(written)
}

/// The statistic of a value, which an earlier pass must have computed.
fn known_statistic(operands: &mut InstrOperands, input: SymbolId) -> CheckResult<SymbolId> {
    let known = operands.check.values.find(ForwardOpKind::Statistic, &[input]);
    match known {
        Some(node) => Ok(operands.check.values.outputs(node)[0]),
        None => super::super::error::fault(format!(
            "needs the statistic of {}, which nothing computed",
            operands.operand_name(0)
        )),
    }
}

/// Checks that γ is one row, sharded as the features of x.
fn scale_fits(operands: &InstrOperands, scale: usize, x: usize) -> CheckResult {
    let (scale, x) = (&operands.reads[scale], &operands.reads[x]);
    ensure(scale.rows.size == 1 && scale.columns == x.columns, || {
        format!("cannot scale {x} by {scale}")
    })
}

/// Checks that an operand is one statistic per row of x.
fn rows_fit(operands: &InstrOperands, numbers: usize, x: usize) -> CheckResult {
    let (numbers, x) = (&operands.reads[numbers], &operands.reads[x]);
    ensure(numbers.rows == x.rows && numbers.columns.size == 1, || {
        format!("needs one statistic for each row of {x}, but reads {numbers}")
    })
}

pub(super) fn backward(
    operands: &mut InstrOperands,
    op: FusedOp,
) -> CheckResult<Vec<OperandWrite>> {
    if op == FusedOp::NormBackwardStatistic {
        operands.check_arity(3..=3, 1)?;
        operands.all_summed()?;
        let (_, y) = normed(operands, ForwardOpKind::Normed)?;
        let x = operands.reads[1];
        let value = operands.apply(ForwardOpKind::NormSum, vec![y])?[0];
        let sum = if x.columns.cut.is_some() { PendingSum::Owed } else { PendingSum::Done };
        let state = x.per_row(value, 1).owing(sum);
        return Ok(vec![OperandWrite { state, target: WriteTarget::Fresh }]);
    }
    let numbers = if op == FusedOp::NormBackwardApply { 2 } else { 1 };
    let onto_scale = 3 + numbers;
    operands.check_arity(onto_scale + 1..=onto_scale + 2, 2)?;
    for port in (0..onto_scale).chain(onto_scale + 1..operands.reads.len()) {
        operands.summed(port)?;
    }
    let kind = if op == FusedOp::NormOnlineBackward {
        ForwardOpKind::Scaled
    } else {
        ForwardOpKind::Normed
    };
    let (node, y) = normed(operands, kind)?;
    for port in 3..onto_scale {
        rows_fit(operands, port, 1)?;
    }
    let input = operands.value(1)?;
    let statistic = known_statistic(operands, input)?;
    statistics_fit(operands, op, statistic, y)?;
    let x = operands.reads[1];
    if op == FusedOp::NormBackward {
        ensure(x.columns.cut.is_none(), || {
            format!("needs whole rows, but reads a shard of their features ({x})")
        })?;
    }
    let dx = x.with(operands.check.values.contribution(node, 0));
    let dx = AbstractState { norm: None, ..dx };
    let owed = if x.rows.cut.is_some() { PendingSum::Owed } else { PendingSum::Done };
    let scale = AbstractState { dtype: DType::F32, ..operands.reads[2] };
    let scale = scale.with(operands.check.values.contribution(node, 1)).owing(owed);
    let onto = (operands.reads.len() > onto_scale + 1).then_some(onto_scale + 1);
    Ok(vec![operands.accumulated(onto, dx)?, operands.accumulated(Some(onto_scale), scale)?])
}

/// The norm whose output's gradient, input and scale are the first three operands.
fn normed(
    operands: &mut InstrOperands,
    kind: ForwardOpKind,
) -> CheckResult<(ForwardOpId, SymbolId)> {
    operands.same_layout(0, 1)?;
    scale_fits(operands, 2, 1)?;
    let (dy, x, scale) = (operands.reads[0].meaning, operands.value(1)?, operands.value(2)?);
    let node = operands.check.values.user(x, 0, dy, |found| found == kind)?;
    let values = &operands.check.values;
    ensure(values.inputs(node)[1] == scale, || {
        format!("uses {}, not the scale of its forward pass", values.name(scale))
    })?;
    Ok((node, values.outputs(node)[0]))
}

fn statistics_fit(
    operands: &InstrOperands,
    op: FusedOp,
    statistic: SymbolId,
    y: SymbolId,
) -> CheckResult {
    let values = &operands.check.values;
    let given = operands.reads[3].meaning;
    if op == FusedOp::NormOnlineBackward {
        return ensure(values.is_complete(given, statistic), || {
            format!(
                "needs the complete gradient of the statistic, but reads {}",
                values.describe(given)
            )
        });
    }
    ensure(given == AbstractValue::Value(statistic), || {
        format!("reads {}, not the statistic of its input", values.describe(given))
    })?;
    if op == FusedOp::NormBackwardApply {
        let sum = values.find(ForwardOpKind::NormSum, &[y]).map(|node| values.outputs(node)[0]);
        let given = operands.reads[4].meaning;
        return ensure(sum.map(AbstractValue::Value) == Some(given), || {
            format!("reads {}, not the row sums of its gradient", values.describe(given))
        });
    }
    Ok(())
}
