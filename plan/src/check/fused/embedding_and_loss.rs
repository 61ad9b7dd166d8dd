//! Transfer functions of the embedding and the loss.

use crate::DType;
use crate::program::Access;

use super::super::error::{CheckResult, ensure, fault};
use super::super::lattice::{
    AbstractState, AbstractValue, OperandWrite, PendingSum, ShardedExtent, WriteTarget,
};
use super::super::operands::InstrOperands;
use super::super::values::ForwardOpKind;

fn fresh(state: AbstractState) -> OperandWrite {
    OperandWrite { state, target: WriteTarget::Fresh }
}

/// Checks that an operand has one token id per row.
fn token_ids(operands: &InstrOperands, port: usize) -> CheckResult {
    let state = &operands.reads[port];
    ensure(state.dtype == DType::U32 && state.columns.size == 1, || {
        format!("reads {} as token ids", operands.operand_name(port))
    })
}

/// The gather of the embedding. With a vocabulary-sharded table each device looks up its own rows, and
/// the result is a partial sum.
pub(super) fn gather(operands: &mut InstrOperands) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(2..=2, 1)?;
    operands.all_summed()?;
    token_ids(operands, 0)?;
    let (tokens, table) = (operands.reads[0], operands.reads[1]);
    let inputs = vec![operands.value(0)?, operands.value(1)?];
    let value = operands.apply(ForwardOpKind::Gather, inputs)?[0];
    let owed = if table.rows.cut.is_some() { PendingSum::Owed } else { PendingSum::Done };
    let state =
        AbstractState::new(AbstractValue::Value(value), tokens.rows, table.columns, table.dtype);
    Ok(vec![fresh(state.owing(owed))])
}

pub(super) fn scatter(operands: &mut InstrOperands) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(3..=3, 1)?;
    token_ids(operands, 0)?;
    let (tokens, onto, dy) = (operands.reads[0], operands.reads[1], operands.reads[2]);
    ensure(dy.tensor == PendingSum::Done && dy.rows == tokens.rows, || {
        format!("scatters {dy} by {tokens}: their rows do not match")
    })?;
    let ids = operands.value(0)?;
    let values = &operands.check.values;
    let node = match dy.meaning {
        AbstractValue::Gradient { of, .. } if values.is_complete(dy.meaning, of) => {
            values.producer(of)
        }
        _ => None,
    };
    let node =
        node.filter(|n| values.kind(*n) == ForwardOpKind::Gather && values.inputs(*n)[0] == ids);
    let Some(node) = node else {
        return fault(format!(
            "scatters {}, not the complete gradient of gathered rows",
            values.describe(dy.meaning)
        ));
    };
    let table = values.inputs(node)[1];
    let meaning = values.contribution(node, 1);
    // The table's sharding of the vocabulary decides which rows a device has.
    let Some(weight) = operands.check.weights.get(&table) else {
        return fault("scatters to a table that is not a weight");
    };
    let rows = match operands.check.weight_state(*weight) {
        Some(state) if operands.check.sees_table_transposed(operands.instr, 1) => state.columns,
        Some(state) => state.rows,
        None => return fault("scatters to a table that is not a weight"),
    };
    let owed = if tokens.rows.cut.is_some() { PendingSum::Owed } else { PendingSum::Done };
    let state = AbstractState::new(meaning, rows, dy.columns, onto.dtype).owing(owed);
    Ok(vec![operands.accumulated(Some(1), state)?])
}

/// Checks that the logits are reduced; tokens or the vocabulary may be sharded.
fn logits(operands: &InstrOperands) -> CheckResult<AbstractState> {
    operands.all_summed()?;
    operands.none_owes_norm()?;
    Ok(operands.reads[0])
}

fn over_vocabulary(logits: &AbstractState, sum: PendingSum) -> PendingSum {
    if logits.columns.cut.is_some() { sum } else { PendingSum::Done }
}

pub(super) fn loss_maximum(operands: &mut InstrOperands) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(1..=1, 1)?;
    let logits = logits(operands)?;
    let inputs = vec![operands.value(0)?];
    let value = operands.apply(ForwardOpKind::LossMaximum, inputs)?[0];
    let sum = over_vocabulary(&logits, PendingSum::MaximumOwed);
    Ok(vec![fresh(logits.per_row(value, 1).owing(sum))])
}

pub(super) fn loss_sum(operands: &mut InstrOperands) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(3..=3, 1)?;
    let logits = logits(operands)?;
    row_statistics(operands, 1, ForwardOpKind::LossMaximum, 1)?;
    targets(operands, 2)?;
    let inputs = (0..3).map(|port| operands.value(port)).collect::<CheckResult<_>>()?;
    let value = operands.apply(ForwardOpKind::LossSum, inputs)?[0];
    let sum = over_vocabulary(&logits, PendingSum::Owed);
    Ok(vec![fresh(logits.per_row(value, 2).owing(sum))])
}

pub(super) fn loss_gradient(operands: &mut InstrOperands) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(4..=4, 2)?;
    let logits = logits(operands)?;
    row_statistics(operands, 1, ForwardOpKind::LossMaximum, 1)?;
    row_statistics(operands, 2, ForwardOpKind::LossSum, 2)?;
    targets(operands, 3)?;
    let inputs = vec![operands.value(0)?, operands.value(3)?];
    let loss = operands.apply_to(ForwardOpKind::Loss, inputs.clone(), 1..2)?[0];
    let values = &operands.check.values;
    let Some(node) = values.producer(loss) else { return fault("writes no loss") };
    let gradient = logits.with(values.contribution(node, 0));
    let one = AbstractState::new(
        AbstractValue::Value(loss),
        ShardedExtent::whole(1),
        ShardedExtent::whole(1),
        DType::F32,
    );
    let Some(Access { extent, .. }) = operands.instr.writes.get(1) else {
        return fault("writes no loss");
    };
    ensure((extent.rows, extent.columns) == (1, 1), || format!("writes the loss as {extent}"))?;
    Ok(vec![OperandWrite { state: gradient, target: WriteTarget::Over(0) }, fresh(one)])
}

/// Checks that an operand has the statistics that an earlier loss pass computed from the same logits.
fn row_statistics(
    operands: &InstrOperands,
    port: usize,
    kind: ForwardOpKind,
    count: u64,
) -> CheckResult {
    let values = &operands.check.values;
    let (statistics, logits) = (&operands.reads[port], &operands.reads[0]);
    let own = match statistics.meaning {
        AbstractValue::Value(value) => values.producer(value).filter(|n| values.kind(*n) == kind),
        _ => None,
    };
    let own =
        own.is_some_and(|node| AbstractValue::Value(values.inputs(node)[0]) == logits.meaning);
    ensure(own && statistics.rows == logits.rows && statistics.columns.size == count, || {
        format!(
            "reads {} ({statistics}), which an earlier loss pass did not compute from {logits}",
            operands.operand_name(port)
        )
    })
}

fn targets(operands: &InstrOperands, port: usize) -> CheckResult {
    token_ids(operands, port)?;
    ensure(operands.reads[port].rows == operands.reads[0].rows, || {
        format!(
            "reads targets {} for logits {}: their rows do not match",
            operands.reads[port], operands.reads[0]
        )
    })
}
