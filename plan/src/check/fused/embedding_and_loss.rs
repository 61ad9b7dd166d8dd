//! Transfer functions of the embedding and the loss.

use crate::DType;
use crate::program::Access;

use super::super::error::{CheckResult, ensure, fault};
use super::super::lattice::{
    AbstractState, AbstractValue, OperandWrite, PendingReduction, ShardedExtent, WriteTarget,
};
use super::super::operands::InstrOperands;
use super::super::values::ForwardOpKind;

fn fresh(state: AbstractState) -> OperandWrite {
    OperandWrite { state, target: WriteTarget::Fresh }
}

/// Checks that an operand has one token id per row.
fn check_token_ids(operands: &InstrOperands, port: usize) -> CheckResult {
    let state = &operands.reads[port];
    ensure(state.dtype == DType::U32 && state.columns.size == 1, || {
        format!("reads {} as token ids", operands.operand_name(port))
    })
}

/// The gather of the embedding. With a vocabulary-sharded table, each device gathers its own rows and the
/// result is partial.
pub(super) fn gather(operands: &mut InstrOperands) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(2..=2, 1)?;
    operands.check_all_reduced()?;
    check_token_ids(operands, 0)?;
    let (tokens, table) = (operands.reads[0], operands.reads[1]);
    let inputs = vec![operands.value(0)?, operands.value(1)?];
    let value = operands.apply(ForwardOpKind::Gather, inputs)?[0];
    let pending =
        if table.rows.sharded.is_some() { PendingReduction::Sum } else { PendingReduction::None };
    let state =
        AbstractState::new(AbstractValue::Value(value), tokens.rows, table.columns, table.dtype);
    Ok(vec![fresh(state.with_pending(pending))])
}

pub(super) fn scatter(operands: &mut InstrOperands) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(3..=3, 1)?;
    check_token_ids(operands, 0)?;
    let (tokens, onto, dy) = (operands.reads[0], operands.reads[1], operands.reads[2]);
    ensure(dy.pending == PendingReduction::None && dy.rows == tokens.rows, || {
        format!("scatters {dy} by {tokens}: their rows do not match")
    })?;
    let ids = operands.value(0)?;
    let graph = &operands.checker.graph;
    let node = match dy.value {
        AbstractValue::Gradient { of, .. } if graph.is_complete(dy.value, of) => graph.producer(of),
        _ => None,
    };
    let node =
        node.filter(|n| graph.kind(*n) == ForwardOpKind::Gather && graph.inputs(*n)[0] == ids);
    let Some(node) = node else {
        return fault(format!(
            "scatters {}, not the complete gradient of gathered rows",
            graph.describe(dy.value)
        ));
    };
    let table = graph.inputs(node)[1];
    let gradient = graph.contribution(node, 1);
    // The gradient has the sharded rows of the table.
    let Some(weight) = operands.checker.weights.get(&table) else {
        return fault("scatters to a table that is not a weight");
    };
    let rows = match operands.checker.weight_state(*weight) {
        Some(state) if operands.checker.reads_transposed_table(operands.instr, 1) => state.columns,
        Some(state) => state.rows,
        None => return fault("scatters to a table that is not a weight"),
    };
    let pending =
        if tokens.rows.sharded.is_some() { PendingReduction::Sum } else { PendingReduction::None };
    let state = AbstractState::new(gradient, rows, dy.columns, onto.dtype).with_pending(pending);
    Ok(vec![operands.accumulate(Some(1), state)?])
}

/// The logits, which must be reduced; tokens or vocabulary may be sharded.
fn reduced_logits(operands: &InstrOperands) -> CheckResult<AbstractState> {
    operands.check_all_reduced()?;
    operands.check_no_pending_norm()?;
    Ok(operands.reads[0])
}

fn pending_over_vocabulary(logits: &AbstractState, sum: PendingReduction) -> PendingReduction {
    if logits.columns.sharded.is_some() { sum } else { PendingReduction::None }
}

pub(super) fn loss_maximum(operands: &mut InstrOperands) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(1..=1, 1)?;
    let logits = reduced_logits(operands)?;
    let inputs = vec![operands.value(0)?];
    let value = operands.apply(ForwardOpKind::LossMaximum, inputs)?[0];
    let sum = pending_over_vocabulary(&logits, PendingReduction::Maximum);
    Ok(vec![fresh(logits.per_row(value, 1).with_pending(sum))])
}

pub(super) fn loss_sum(operands: &mut InstrOperands) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(3..=3, 1)?;
    let logits = reduced_logits(operands)?;
    check_row_statistics(operands, 1, ForwardOpKind::LossMaximum, 1)?;
    check_targets(operands, 2)?;
    let inputs = (0..3).map(|port| operands.value(port)).collect::<CheckResult<_>>()?;
    let value = operands.apply(ForwardOpKind::LossSum, inputs)?[0];
    let sum = pending_over_vocabulary(&logits, PendingReduction::Sum);
    Ok(vec![fresh(logits.per_row(value, 2).with_pending(sum))])
}

pub(super) fn loss_gradient(operands: &mut InstrOperands) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(4..=4, 2)?;
    let logits = reduced_logits(operands)?;
    check_row_statistics(operands, 1, ForwardOpKind::LossMaximum, 1)?;
    check_row_statistics(operands, 2, ForwardOpKind::LossSum, 2)?;
    check_targets(operands, 3)?;
    let inputs = vec![operands.value(0)?, operands.value(3)?];
    let loss = operands.apply_to(ForwardOpKind::Loss, inputs.clone(), 1..2)?[0];
    let graph = &operands.checker.graph;
    let Some(node) = graph.producer(loss) else { return fault("writes no loss") };
    let gradient = logits.with_value(graph.contribution(node, 0));
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
    Ok(vec![OperandWrite { state: gradient, target: WriteTarget::InPlace(0) }, fresh(one)])
}

/// Checks that an operand has the statistics that an earlier loss pass computed from the same logits.
fn check_row_statistics(
    operands: &InstrOperands,
    port: usize,
    kind: ForwardOpKind,
    count: u64,
) -> CheckResult {
    let graph = &operands.checker.graph;
    let (statistics, logits) = (&operands.reads[port], &operands.reads[0]);
    let own = match statistics.value {
        AbstractValue::Value(value) => graph.producer(value).filter(|n| graph.kind(*n) == kind),
        _ => None,
    };
    let own = own.is_some_and(|node| AbstractValue::Value(graph.inputs(node)[0]) == logits.value);
    ensure(own && statistics.rows == logits.rows && statistics.columns.size == count, || {
        format!(
            "reads {} ({statistics}), which an earlier loss pass did not compute from {logits}",
            operands.operand_name(port)
        )
    })
}

fn check_targets(operands: &InstrOperands, port: usize) -> CheckResult {
    check_token_ids(operands, port)?;
    ensure(operands.reads[port].rows == operands.reads[0].rows, || {
        format!(
            "reads targets {} for logits {}: their rows do not match",
            operands.reads[port], operands.reads[0]
        )
    })
}
