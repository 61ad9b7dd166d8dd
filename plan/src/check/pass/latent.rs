//! Transfer functions of φ on latents, with or without the pending division of an online norm. φ is not
//! linear, so the latent must be reduced; the division needs the statistic of the same norm.

use crate::model::Activation;
use crate::program::Extent;

use super::super::error::{CheckResult, ensure, fault};
use super::super::lattice::{AbstractState, AbstractValue, ShardedExtent};
use super::super::site::{InstrOperands, OperandWrite, WriteTarget};
use super::super::values::{ForwardOpId, ForwardOpKind};

pub(super) fn forward(
    site: &mut InstrOperands,
    activation: Activation,
) -> CheckResult<Vec<OperandWrite>> {
    site.operands(1..=1, site.instr.writes.len())?;
    site.all_summed()?;
    site.none_owes_norm()?;
    let input = site.value(0)?;
    outputs(site, ForwardOpKind::Latent { activation }, vec![input])
}

pub(super) fn recover(
    site: &mut InstrOperands,
    activation: Activation,
) -> CheckResult<Vec<OperandWrite>> {
    site.operands(2..=2, site.instr.writes.len())?;
    site.all_summed()?;
    let (h, statistic) = (site.reads[0], site.value(1)?);
    match h.norm {
        Some(owed) if owed == statistic => {}
        Some(_) => {
            return fault(format!(
                "divides {} by {}, the statistic of another norm",
                site.operand_name(0),
                site.operand_name(1)
            ));
        }
        None => {
            return fault(format!(
                "divides {}, which has no pending division by a norm",
                site.operand_name(0)
            ));
        }
    }
    statistic_fits(site, 1, &h)?;
    let input = site.value(0)?;
    outputs(site, ForwardOpKind::Recover { activation }, vec![input, statistic])
}

/// Checks that an operand is one statistic per row of an unsharded latent.
fn statistic_fits(site: &InstrOperands, port: usize, h: &AbstractState) -> CheckResult {
    let statistic = &site.reads[port];
    ensure(
        statistic.rows == h.rows && statistic.columns.size == 1 && h.columns.cut.is_none(),
        || format!("cannot divide {h} by {statistic}"),
    )
}

/// The sections of the latent, side by side as in the input.
fn outputs(
    site: &mut InstrOperands,
    kind: ForwardOpKind,
    inputs: Vec<super::super::values::SymbolId>,
) -> CheckResult<Vec<OperandWrite>> {
    let h = AbstractState { norm: None, ..site.reads[0] };
    let devices = site.devices();
    let widths: Vec<u64> = site.instr.writes.iter().map(|w| w.extent.columns).collect();
    let total: u64 = widths.iter().sum();
    let Extent { columns, .. } = h.extent(devices);
    ensure(total == columns && !widths.is_empty(), || {
        format!("computes {total} features from {columns}")
    })?;
    let times = if h.columns.cut.is_some() { devices } else { 1 };
    let whole: Vec<u64> = widths.iter().map(|width| width * times).collect();
    site.split_sections(0, &whole)?;
    let values = site.apply(kind, inputs)?;
    let written = values.into_iter().zip(widths).map(|(value, width)| {
        let columns = ShardedExtent { size: width * times, ..h.columns };
        let place = if total == width { WriteTarget::Either(0) } else { WriteTarget::Fresh };
        OperandWrite {
            state: AbstractState { columns, ..h.with(AbstractValue::Value(value)) },
            place,
        }
    });
    Ok(written.collect())
}

pub(super) fn backward(
    site: &mut InstrOperands,
    activation: Activation,
) -> CheckResult<Vec<OperandWrite>> {
    site.operands(1..=usize::MAX, 1)?;
    site.all_summed()?;
    site.none_owes_norm()?;
    let (node, sections) = latent(site, ForwardOpKind::Latent { activation })?;
    // φ' is computed from the latent.
    let saved = usize::from(activation != Activation::Identity);
    site.operands(sections + saved..=sections + saved, 1)?;
    if saved == 1 {
        is_input(site, sections, node)?;
    }
    Ok(vec![gradient(site, node, sections)])
}

pub(super) fn recover_backward(
    site: &mut InstrOperands,
    activation: Activation,
) -> CheckResult<Vec<OperandWrite>> {
    site.operands(3..=usize::MAX, 2)?;
    site.all_summed()?;
    let (node, sections) = latent(site, ForwardOpKind::Recover { activation })?;
    // φ' is computed from the input; without φ the closed form reads all outputs instead.
    let reads_input = activation != Activation::Identity;
    let saved = if reads_input { 1 } else { sections };
    if reads_input {
        is_input(site, sections, node)?;
    } else {
        are_outputs(site, sections, node)?;
    }
    let at = sections + saved;
    site.operands(at + 1..=at + 2, 2)?;
    let statistic = site.check.values.inputs(node)[1];
    ensure(site.reads[at].meaning == AbstractValue::Value(statistic), || {
        format!("reads {}, not the statistic of its forward pass", site.operand_name(at))
    })?;
    let dh = gradient(site, node, sections);
    statistic_fits(site, at, &dh.state)?;
    let ds = site.reads[at].with(site.check.values.contribution(node, 1));
    let onto = (site.reads.len() > at + 1).then_some(at + 1);
    Ok(vec![dh, site.accumulated(onto, ds)?])
}

/// The operation whose outputs' gradients are the first operands, and how many there are.
fn latent(site: &InstrOperands, wanted: ForwardOpKind) -> CheckResult<(ForwardOpId, usize)> {
    let values = &site.check.values;
    let first = site.reads[0].meaning;
    let Some(node) = values.op_of_gradient(first, |kind| kind == wanted) else {
        return fault(format!(
            "reads {}, which is not the gradient of such a latent",
            values.describe(first)
        ));
    };
    let outputs = values.outputs(node);
    for (port, output) in outputs.iter().enumerate() {
        let meaning = site.reads.get(port).map(|state| state.meaning);
        ensure(meaning.is_some_and(|m| values.is_complete(m, *output)), || {
            format!("needs the complete gradient of {} at operand {port}", values.name(*output))
        })?;
        let (here, first) = (&site.reads[port], &site.reads[0]);
        let alike = here.rows == first.rows && here.columns.cut == first.columns.cut;
        ensure(alike, || format!("reads gradients in different layouts: {first} and {here}"))?;
    }
    Ok((node, outputs.len()))
}

fn is_input(site: &InstrOperands, port: usize, node: ForwardOpId) -> CheckResult {
    let values = &site.check.values;
    let Some(input) = site.reads.get(port) else { return fault("has too few operands") };
    let dz = &site.reads[0];
    let own = input.meaning == AbstractValue::Value(values.inputs(node)[0]);
    ensure(own && input.rows == dz.rows && input.columns.cut == dz.columns.cut, || {
        format!("reads {} ({input}), not the latent of its forward pass", site.operand_name(port))
    })
}

fn are_outputs(site: &InstrOperands, sections: usize, node: ForwardOpId) -> CheckResult {
    for (port, output) in site.check.values.outputs(node).iter().enumerate() {
        let read = site.reads.get(sections + port);
        let own = read.is_some_and(|state| {
            state.meaning == AbstractValue::Value(*output) && state.rows == site.reads[0].rows
        });
        ensure(own, || {
            let name = site.check.values.name(*output);
            format!("needs its forward result {name} at operand {}", sections + port)
        })?;
    }
    Ok(())
}

/// The gradient of the latent, as wide as its outputs together.
fn gradient(site: &InstrOperands, node: ForwardOpId, sections: usize) -> OperandWrite {
    let size = site.reads[..sections].iter().map(|state| state.columns.size).sum();
    let dz = site.reads[0];
    let state = AbstractState { columns: ShardedExtent { size, ..dz.columns }, ..dz };
    let state = state.with(site.check.values.contribution(node, 0));
    OperandWrite { state, place: WriteTarget::Fresh }
}
