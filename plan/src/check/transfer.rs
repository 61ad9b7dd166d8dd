//! Transfer functions of sends and receives between neighbouring stages.

use crate::mesh::Axis;
use crate::program::{P2pTransfer, Phase};

use super::error::{CheckResult, ensure, fault};
use super::lattice::{AbstractState, AbstractValue, OperandWrite, WriteTarget};
use super::operands::InstrOperands;
use super::values::ForwardOpKind;

fn neighbour(operands: &InstrOperands, p2p: &P2pTransfer, towards_loss: bool) -> CheckResult {
    let check = &operands.check;
    let other = if towards_loss { check.index.checked_add(1) } else { check.index.checked_sub(1) };
    let stages = check.context.mesh.pipeline as usize;
    ensure(other == Some(p2p.peer_stage as usize) && (p2p.peer_stage as usize) < stages, || {
        format!(
            "addresses stage {}, which is not the neighbour in this pass's direction",
            p2p.peer_stage
        )
    })?;
    ensure(p2p.group == check.context.mesh.group(Axis::Pipeline), || {
        "does not use the mesh's pipeline group".into()
    })
}

/// Checks that there is one operand per carried tensor.
fn check_counts(
    operands: &InstrOperands,
    p2p: &P2pTransfer,
    reads: usize,
    writes: usize,
) -> CheckResult {
    let count = p2p.carries.len();
    ensure(count > 0, || "carries no tensor".into())?;
    operands.check_arity(reads * count..=reads * count, writes * count)
}

pub(super) fn send(
    operands: &mut InstrOperands,
    p2p: &P2pTransfer,
) -> CheckResult<Vec<OperandWrite>> {
    let forward = operands.check.phase == Phase::Forward;
    check_counts(operands, p2p, 1, 0)?;
    neighbour(operands, p2p, forward)?;
    operands.none_owes_norm()?;
    for port in 0..operands.reads.len() {
        let state = operands.reads[port];
        ensure(state.packed.is_none(), || "sends a tensor that is packed for a collective".into())?;
        if forward {
            let value = operands.value(port)?;
            ensure(!operands.check.sent.contains(&value), || {
                format!("sends {} twice", operands.operand_name(port))
            })?;
            // A use of the value, whose gradient contribution the neighbour sends back.
            operands.check.values.apply(ForwardOpKind::Send, vec![value], &[])?;
            operands.check.sent.push(value);
            operands.check.outgoing.push_back(state);
        } else {
            send_gradient(operands, &state)?;
        }
    }
    Ok(vec![])
}

fn send_gradient(operands: &mut InstrOperands, state: &AbstractState) -> CheckResult {
    let check = &mut *operands.check;
    let at = check.received.iter().position(|v| check.values.is_complete(state.meaning, *v));
    match at {
        Some(at) => {
            // The neighbour identifies the tensor by its position among those it sent.
            let of = check.received[at];
            check.outgoing.push_back(state.with(AbstractValue::Gradient { of, uses: at as u64 }));
            Ok(())
        }
        None => fault(format!(
            "sends {}, not the complete gradient of a received tensor",
            check.values.describe(state.meaning)
        )),
    }
}

/// Results of a receive; `None` when nothing was sent, which the schedule check reports.
pub(super) fn receive(
    operands: &mut InstrOperands,
    p2p: &P2pTransfer,
) -> CheckResult<Option<Vec<OperandWrite>>> {
    check_counts(operands, p2p, 0, 1)?;
    let forward = operands.check.phase == Phase::Forward;
    neighbour(operands, p2p, !forward)?;
    let mut written = vec![];
    for access in &operands.instr.writes {
        let name = operands.check.stage.buffer(access.buffer).name.clone();
        let check = &mut *operands.check;
        let Some(state) = check.incoming.pop_front() else { return Ok(None) };
        let meaning = if forward {
            let value = check.values.add_input(&name);
            check.received.push(value);
            AbstractValue::Value(value)
        } else {
            let AbstractValue::Gradient { uses: at, .. } = state.meaning else { return Ok(None) };
            let Some(value) = check.sent.get(at as usize).copied() else { return Ok(None) };
            match check.values.find(ForwardOpKind::Send, &[value]) {
                Some(node) => check.values.contribution(node, 0),
                None => return fault("receives the gradient of a tensor that was not sent"),
            }
        };
        let state = AbstractState { norm: None, ..state.with(meaning) };
        written.push(OperandWrite { state, target: WriteTarget::Fresh });
    }
    Ok(Some(written))
}
