//! Transfer functions of φ on latents, with or without the pending division of an online norm. φ is not
//! linear, so the latent must be reduced; the division needs the statistic of the same norm.

use crate::model::Activation;
use crate::program::Extent;

use super::super::error::{CheckResult, ensure, fault};
use super::super::lattice::{
    AbstractState, AbstractValue, OperandWrite, ShardedExtent, SymbolId, WriteTarget,
};
use super::super::operands::InstrOperands;
use super::super::values::{ForwardOpId, ForwardOpKind};

pub(super) fn forward(
    operands: &mut InstrOperands,
    activation: Activation,
) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(1..=1, operands.instr.writes.len())?;
    operands.all_summed()?;
    operands.none_owes_norm()?;
    let input = operands.value(0)?;
    outputs(operands, ForwardOpKind::Latent { activation }, vec![input])
}

pub(super) fn recover(
    operands: &mut InstrOperands,
    activation: Activation,
) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(2..=2, operands.instr.writes.len())?;
    operands.all_summed()?;
    let (h, statistic) = (operands.reads[0], operands.value(1)?);
    match h.norm {
        Some(owed) if owed == statistic => {}
        Some(_) => {
            return fault(format!(
                "divides {} by {}, the statistic of another norm",
                operands.operand_name(0),
                operands.operand_name(1)
            ));
        }
        None => {
            return fault(format!(
                "divides {}, which has no pending division by a norm",
                operands.operand_name(0)
            ));
        }
    }
    statistic_fits(operands, 1, &h)?;
    let input = operands.value(0)?;
    outputs(operands, ForwardOpKind::Recover { activation }, vec![input, statistic])
}

/// Checks that an operand is one statistic per row of an unsharded latent.
fn statistic_fits(operands: &InstrOperands, port: usize, h: &AbstractState) -> CheckResult {
    let statistic = &operands.reads[port];
    ensure(
        statistic.rows == h.rows && statistic.columns.size == 1 && h.columns.cut.is_none(),
        || format!("cannot divide {h} by {statistic}"),
    )
}

/// The sections of the latent, side by side as in the input.
fn outputs(
    operands: &mut InstrOperands,
    kind: ForwardOpKind,
    inputs: Vec<SymbolId>,
) -> CheckResult<Vec<OperandWrite>> {
    let h = AbstractState { norm: None, ..operands.reads[0] };
    let devices = operands.devices();
    let widths: Vec<u64> = operands.instr.writes.iter().map(|w| w.extent.columns).collect();
    let total: u64 = widths.iter().sum();
    let Extent { columns, .. } = h.extent(devices);
    ensure(total == columns && !widths.is_empty(), || {
        format!("computes {total} features from {columns}")
    })?;
    let times = if h.columns.cut.is_some() { devices } else { 1 };
    let whole: Vec<u64> = widths.iter().map(|width| width * times).collect();
    operands.split_sections(0, &whole)?;
    let values = operands.apply(kind, inputs)?;
    let writes = values.into_iter().zip(widths).map(|(value, width)| {
        let columns = ShardedExtent { size: width * times, ..h.columns };
        let target = if total == width { WriteTarget::Either(0) } else { WriteTarget::Fresh };
        OperandWrite {
            state: AbstractState { columns, ..h.with(AbstractValue::Value(value)) },
            target,
        }
    });
    Ok(writes.collect())
}

pub(super) fn backward(
    operands: &mut InstrOperands,
    activation: Activation,
) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(1..=usize::MAX, 1)?;
    operands.all_summed()?;
    operands.none_owes_norm()?;
    let (node, sections) = latent(operands, ForwardOpKind::Latent { activation })?;
    // φ' is computed from the latent.
    let saved = usize::from(activation != Activation::Identity);
    operands.check_arity(sections + saved..=sections + saved, 1)?;
    if saved == 1 {
        is_input(operands, sections, node)?;
    }
    Ok(vec![gradient(operands, node, sections)])
}

pub(super) fn recover_backward(
    operands: &mut InstrOperands,
    activation: Activation,
) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(3..=usize::MAX, 2)?;
    operands.all_summed()?;
    let (node, sections) = latent(operands, ForwardOpKind::Recover { activation })?;
    // φ' is computed from the input; without φ the closed form reads all outputs instead.
    let reads_input = activation != Activation::Identity;
    let saved = if reads_input { 1 } else { sections };
    if reads_input {
        is_input(operands, sections, node)?;
    } else {
        are_outputs(operands, sections, node)?;
    }
    let at = sections + saved;
    operands.check_arity(at + 1..=at + 2, 2)?;
    let statistic = operands.check.values.inputs(node)[1];
    ensure(operands.reads[at].meaning == AbstractValue::Value(statistic), || {
        format!("reads {}, not the statistic of its forward pass", operands.operand_name(at))
    })?;
    let dh = gradient(operands, node, sections);
    statistic_fits(operands, at, &dh.state)?;
    let ds = operands.reads[at].with(operands.check.values.contribution(node, 1));
    let onto = (operands.reads.len() > at + 1).then_some(at + 1);
    Ok(vec![dh, operands.accumulated(onto, ds)?])
}

/// The operation whose outputs' gradients are the first operands, and how many there are.
fn latent(operands: &InstrOperands, wanted: ForwardOpKind) -> CheckResult<(ForwardOpId, usize)> {
    let values = &operands.check.values;
    let first = operands.reads[0].meaning;
    let Some(node) = values.op_of_gradient(first, |kind| kind == wanted) else {
        return fault(format!(
            "reads {}, which is not the gradient of such a latent",
            values.describe(first)
        ));
    };
    let outputs = values.outputs(node);
    for (port, output) in outputs.iter().enumerate() {
        let meaning = operands.reads.get(port).map(|state| state.meaning);
        ensure(meaning.is_some_and(|m| values.is_complete(m, *output)), || {
            format!("needs the complete gradient of {} at operand {port}", values.name(*output))
        })?;
        let (here, first) = (&operands.reads[port], &operands.reads[0]);
        let alike = here.rows == first.rows && here.columns.cut == first.columns.cut;
        ensure(alike, || format!("reads gradients in different layouts: {first} and {here}"))?;
    }
    Ok((node, outputs.len()))
}

fn is_input(operands: &InstrOperands, port: usize, node: ForwardOpId) -> CheckResult {
    let values = &operands.check.values;
    let Some(input) = operands.reads.get(port) else { return fault("has too few operands") };
    let dz = &operands.reads[0];
    let own = input.meaning == AbstractValue::Value(values.inputs(node)[0]);
    ensure(own && input.rows == dz.rows && input.columns.cut == dz.columns.cut, || {
        format!(
            "reads {} ({input}), not the latent of its forward pass",
            operands.operand_name(port)
        )
    })
}

fn are_outputs(operands: &InstrOperands, sections: usize, node: ForwardOpId) -> CheckResult {
    for (port, output) in operands.check.values.outputs(node).iter().enumerate() {
        let read = operands.reads.get(sections + port);
        let own = read.is_some_and(|state| {
            state.meaning == AbstractValue::Value(*output) && state.rows == operands.reads[0].rows
        });
        ensure(own, || {
            let name = operands.check.values.name(*output);
            format!("needs its forward result {name} at operand {}", sections + port)
        })?;
    }
    Ok(())
}

/// The gradient of the latent, as wide as its outputs together.
fn gradient(operands: &InstrOperands, node: ForwardOpId, sections: usize) -> OperandWrite {
    let size = operands.reads[..sections].iter().map(|state| state.columns.size).sum();
    let dz = operands.reads[0];
    let state = AbstractState { columns: ShardedExtent { size, ..dz.columns }, ..dz };
    let state = state.with(operands.check.values.contribution(node, 0));
    OperandWrite { state, target: WriteTarget::Fresh }
}
