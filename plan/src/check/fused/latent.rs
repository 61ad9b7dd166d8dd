//! Transfer functions of φ on latents, with or without the pending division of an online norm. φ is not
//! linear and needs a reduced latent; the division needs the statistic of the same norm.

use crate::model::Activation;
use crate::program::Extent;

use super::super::error::{CheckResult, ensure, fault};
use super::super::lattice::{
    AbstractState, AbstractValue, ForwardValueId, OperandWrite, ShardedExtent, WriteTarget,
};
use super::super::operands::InstrOperands;
use super::super::values::{ForwardOpId, ForwardOpKind};

pub(super) fn forward(
    operands: &mut InstrOperands,
    activation: Activation,
) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(1..=1, operands.instr.writes.len())?;
    operands.check_all_reduced()?;
    operands.check_no_pending_norm()?;
    let input = operands.value(0)?;
    latent_outputs(operands, ForwardOpKind::Latent { activation }, vec![input])
}

pub(super) fn recover(
    operands: &mut InstrOperands,
    activation: Activation,
) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(2..=2, operands.instr.writes.len())?;
    operands.check_all_reduced()?;
    let (h, statistic) = (operands.reads[0], operands.value(1)?);
    match h.pending_norm {
        Some(pending) if pending == statistic => {}
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
    check_statistic(operands, 1, &h)?;
    let input = operands.value(0)?;
    latent_outputs(operands, ForwardOpKind::Recover { activation }, vec![input, statistic])
}

/// Checks that an operand is one statistic per row of an unsharded latent.
fn check_statistic(operands: &InstrOperands, port: usize, h: &AbstractState) -> CheckResult {
    let statistic = &operands.reads[port];
    ensure(
        statistic.rows == h.rows && statistic.columns.size == 1 && h.columns.sharded.is_none(),
        || format!("cannot divide {h} by {statistic}"),
    )
}

/// The outputs, one per section of the latent.
fn latent_outputs(
    operands: &mut InstrOperands,
    kind: ForwardOpKind,
    inputs: Vec<ForwardValueId>,
) -> CheckResult<Vec<OperandWrite>> {
    let h = AbstractState { pending_norm: None, ..operands.reads[0] };
    let devices = operands.devices();
    let widths: Vec<u64> = operands.instr.writes.iter().map(|w| w.extent.columns).collect();
    let total: u64 = widths.iter().sum();
    let Extent { columns, .. } = h.extent(operands.checker.context);
    ensure(total == columns && !widths.is_empty(), || {
        format!("computes {total} features from {columns}")
    })?;
    let shards = if h.columns.sharded.is_some() { devices } else { 1 };
    let whole_widths: Vec<u64> = widths.iter().map(|width| width * shards).collect();
    operands.check_split_sections(0, &whole_widths)?;
    let values = operands.apply(kind, inputs)?;
    let writes = values.into_iter().zip(widths).map(|(value, width)| {
        let columns = ShardedExtent { size: width * shards, ..h.columns };
        let target =
            if total == width { WriteTarget::FreshOrInPlace(0) } else { WriteTarget::Fresh };
        OperandWrite {
            state: AbstractState { columns, ..h.with_value(AbstractValue::Value(value)) },
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
    operands.check_all_reduced()?;
    operands.check_no_pending_norm()?;
    let (node, sections) = differentiated_latent(operands, ForwardOpKind::Latent { activation })?;
    // φ' is evaluated on the latent.
    let saved = usize::from(activation != Activation::Identity);
    operands.check_arity(sections + saved..=sections + saved, 1)?;
    if saved == 1 {
        check_input(operands, sections, node)?;
    }
    Ok(vec![input_gradient(operands, node, sections)])
}

pub(super) fn recover_backward(
    operands: &mut InstrOperands,
    activation: Activation,
) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(3..=usize::MAX, 2)?;
    operands.check_all_reduced()?;
    let (node, sections) = differentiated_latent(operands, ForwardOpKind::Recover { activation })?;
    // φ' is evaluated on the input; without φ, the gradient of the statistic needs all outputs instead.
    let reads_input = activation != Activation::Identity;
    let saved = if reads_input { 1 } else { sections };
    if reads_input {
        check_input(operands, sections, node)?;
    } else {
        check_outputs(operands, sections, node)?;
    }
    let at = sections + saved;
    operands.check_arity(at + 1..=at + 2, 2)?;
    let statistic = operands.checker.graph.inputs(node)[1];
    ensure(operands.reads[at].value == AbstractValue::Value(statistic), || {
        format!("reads {}, not the statistic of its forward pass", operands.operand_name(at))
    })?;
    let dh = input_gradient(operands, node, sections);
    check_statistic(operands, at, &dh.state)?;
    let ds = operands.reads[at].with_value(operands.checker.graph.contribution(node, 1));
    let onto = (operands.reads.len() > at + 1).then_some(at + 1);
    Ok(vec![dh, operands.accumulate(onto, ds)?])
}

/// The operation whose output gradients are the first operands, and the number of its outputs.
fn differentiated_latent(
    operands: &InstrOperands,
    expected: ForwardOpKind,
) -> CheckResult<(ForwardOpId, usize)> {
    let graph = &operands.checker.graph;
    let first = operands.reads[0].value;
    let Some(node) = graph.op_of_output_gradient(first, |kind| kind == expected) else {
        return fault(format!(
            "reads {}, which is not the complete gradient of an output of this op",
            graph.describe(first)
        ));
    };
    let outputs = graph.outputs(node);
    for (port, output) in outputs.iter().enumerate() {
        let gradient = operands.reads.get(port).map(|state| state.value);
        ensure(gradient.is_some_and(|m| graph.is_complete(m, *output)), || {
            format!("needs the complete gradient of {} at operand {port}", graph.name(*output))
        })?;
        let (state, first) = (&operands.reads[port], &operands.reads[0]);
        let same_layout =
            state.rows == first.rows && state.columns.sharded == first.columns.sharded;
        ensure(same_layout, || {
            format!("reads gradients in different layouts: {first} and {state}")
        })?;
    }
    Ok((node, outputs.len()))
}

fn check_input(operands: &InstrOperands, port: usize, node: ForwardOpId) -> CheckResult {
    let graph = &operands.checker.graph;
    let Some(input) = operands.reads.get(port) else { return fault("has too few operands") };
    let dz = &operands.reads[0];
    let is_input = input.value == AbstractValue::Value(graph.inputs(node)[0]);
    ensure(is_input && input.rows == dz.rows && input.columns.sharded == dz.columns.sharded, || {
        format!(
            "reads {} ({input}), not the latent of its forward pass",
            operands.operand_name(port)
        )
    })
}

fn check_outputs(operands: &InstrOperands, sections: usize, node: ForwardOpId) -> CheckResult {
    for (port, output) in operands.checker.graph.outputs(node).iter().enumerate() {
        let read = operands.reads.get(sections + port);
        let is_output = read.is_some_and(|state| {
            state.value == AbstractValue::Value(*output) && state.rows == operands.reads[0].rows
        });
        ensure(is_output, || {
            let name = operands.checker.graph.name(*output);
            format!("needs the forward result {name} at operand {}", sections + port)
        })?;
    }
    Ok(())
}

/// The gradient of the latent, whose width is the sum of the outputs'.
fn input_gradient(operands: &InstrOperands, node: ForwardOpId, sections: usize) -> OperandWrite {
    let size = operands.reads[..sections].iter().map(|state| state.columns.size).sum();
    let dz = operands.reads[0];
    let state = AbstractState { columns: ShardedExtent { size, ..dz.columns }, ..dz };
    let state = state.with_value(operands.checker.graph.contribution(node, 0));
    OperandWrite { state, target: WriteTarget::Fresh }
}
