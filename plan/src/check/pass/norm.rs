//! Transfer functions of norms: whole rows in one pass; a statistic that is partial where features are
//! sharded, and an application that needs it reduced; or the scaled input with the division pending.

use crate::DType;
use crate::program::FusedOp;

use super::super::error::{CheckResult, ensure};
use super::super::lattice::{AbstractState, AbstractValue, PendingSum};
use super::super::site::{InstrOperands, OperandWrite, WriteTarget};
use super::super::values::{ForwardOpId, ForwardOpKind, SymbolId};

pub(super) fn forward(site: &mut InstrOperands, op: FusedOp) -> CheckResult<Vec<OperandWrite>> {
    let (reads, writes) = match op {
        FusedOp::NormStatistic => (1, 1),
        FusedOp::NormApply => (3, 1),
        FusedOp::NormScale => (2, 1),
        _ => (2, 2),
    };
    site.operands(reads..=reads, writes)?;
    site.all_summed()?;
    site.none_owes_norm()?;
    let x = site.reads[0];
    let input = site.value(0)?;
    if op == FusedOp::NormForward {
        ensure(x.columns.cut.is_none(), || {
            format!("needs whole rows, but reads a shard of their features ({x})")
        })?;
    }
    let statistic = match op {
        FusedOp::NormStatistic => site.apply(ForwardOpKind::Statistic, vec![input])?[0],
        FusedOp::NormForward | FusedOp::NormOnline => {
            site.apply_to(ForwardOpKind::Statistic, vec![input], 1..2)?[0]
        }
        _ => known_statistic(site, input)?,
    };
    let sum = if x.columns.cut.is_some() { PendingSum::Owed } else { PendingSum::Done };
    let fresh = |state| OperandWrite { state, place: WriteTarget::Fresh };
    let statistics = fresh(x.per_row(statistic, 1).owing(sum));
    if op == FusedOp::NormStatistic {
        return Ok(vec![statistics]);
    }
    scale_fits(site, 1, 0)?;
    if op == FusedOp::NormApply {
        rows_fit(site, 2, 0)?;
        let given = site.value(2)?;
        ensure(given == statistic, || {
            format!("divides by {}, not by the input's own statistic", site.operand_name(2))
        })?;
    }
    let inputs = vec![input, site.value(1)?];
    let owed = matches!(op, FusedOp::NormOnline | FusedOp::NormScale);
    let kind = if owed { ForwardOpKind::Scaled } else { ForwardOpKind::Normed };
    let value = site.apply_to(kind, inputs, 0..1)?[0];
    let state =
        AbstractState { norm: owed.then_some(statistic), ..x.with(AbstractValue::Value(value)) };
    let mut written = vec![fresh(state)];
    if writes == 2 {
        written.push(statistics);
    }
    Ok(written)
}

/// The statistic of a value, which an earlier pass must have computed.
fn known_statistic(site: &mut InstrOperands, input: SymbolId) -> CheckResult<SymbolId> {
    let known = site.check.values.find(ForwardOpKind::Statistic, &[input]);
    match known {
        Some(node) => Ok(site.check.values.outputs(node)[0]),
        None => super::super::error::fault(format!(
            "needs the statistic of {}, which nothing computed",
            site.operand_name(0)
        )),
    }
}

/// Checks that γ is one row, sharded as the features of x.
fn scale_fits(site: &InstrOperands, scale: usize, x: usize) -> CheckResult {
    let (scale, x) = (&site.reads[scale], &site.reads[x]);
    ensure(scale.rows.size == 1 && scale.columns == x.columns, || {
        format!("cannot scale {x} by {scale}")
    })
}

/// Checks that an operand is one statistic per row of x.
fn rows_fit(site: &InstrOperands, numbers: usize, x: usize) -> CheckResult {
    let (numbers, x) = (&site.reads[numbers], &site.reads[x]);
    ensure(numbers.rows == x.rows && numbers.columns.size == 1, || {
        format!("needs one statistic for each row of {x}, but reads {numbers}")
    })
}

pub(super) fn backward(site: &mut InstrOperands, op: FusedOp) -> CheckResult<Vec<OperandWrite>> {
    if op == FusedOp::NormBackwardStatistic {
        site.operands(3..=3, 1)?;
        site.all_summed()?;
        let (_, y) = normed(site, ForwardOpKind::Normed)?;
        let x = site.reads[1];
        let value = site.apply(ForwardOpKind::NormSum, vec![y])?[0];
        let sum = if x.columns.cut.is_some() { PendingSum::Owed } else { PendingSum::Done };
        let state = x.per_row(value, 1).owing(sum);
        return Ok(vec![OperandWrite { state, place: WriteTarget::Fresh }]);
    }
    let numbers = if op == FusedOp::NormBackwardApply { 2 } else { 1 };
    let onto_scale = 3 + numbers;
    site.operands(onto_scale + 1..=onto_scale + 2, 2)?;
    for port in (0..onto_scale).chain(onto_scale + 1..site.reads.len()) {
        site.summed(port)?;
    }
    let kind = if op == FusedOp::NormOnlineBackward {
        ForwardOpKind::Scaled
    } else {
        ForwardOpKind::Normed
    };
    let (node, y) = normed(site, kind)?;
    for port in 3..onto_scale {
        rows_fit(site, port, 1)?;
    }
    let input = site.value(1)?;
    let statistic = known_statistic(site, input)?;
    statistics_fit(site, op, statistic, y)?;
    let x = site.reads[1];
    if op == FusedOp::NormBackward {
        ensure(x.columns.cut.is_none(), || {
            format!("needs whole rows, but reads a shard of their features ({x})")
        })?;
    }
    let dx = x.with(site.check.values.contribution(node, 0));
    let dx = AbstractState { norm: None, ..dx };
    let owed = if x.rows.cut.is_some() { PendingSum::Owed } else { PendingSum::Done };
    let scale = AbstractState { dtype: DType::F32, ..site.reads[2] };
    let scale = scale.with(site.check.values.contribution(node, 1)).owing(owed);
    let onto = (site.reads.len() > onto_scale + 1).then_some(onto_scale + 1);
    Ok(vec![site.accumulated(onto, dx)?, site.accumulated(Some(onto_scale), scale)?])
}

/// The norm whose output's gradient, input and scale are the first three operands.
fn normed(site: &mut InstrOperands, kind: ForwardOpKind) -> CheckResult<(ForwardOpId, SymbolId)> {
    site.same_layout(0, 1)?;
    scale_fits(site, 2, 1)?;
    let (dy, x, scale) = (site.reads[0].meaning, site.value(1)?, site.value(2)?);
    let node = site.check.values.user(x, 0, dy, |found| found == kind)?;
    let values = &site.check.values;
    ensure(values.inputs(node)[1] == scale, || {
        format!("uses {}, not the scale of its forward pass", values.name(scale))
    })?;
    Ok((node, values.outputs(node)[0]))
}

fn statistics_fit(
    site: &InstrOperands,
    op: FusedOp,
    statistic: SymbolId,
    y: SymbolId,
) -> CheckResult {
    let values = &site.check.values;
    let given = site.reads[3].meaning;
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
        let given = site.reads[4].meaning;
        return ensure(sum.map(AbstractValue::Value) == Some(given), || {
            format!("reads {}, not the row sums of its gradient", values.describe(given))
        });
    }
    Ok(())
}
