//! Transfer functions of sends and receives between neighbouring stages.

use crate::mesh::Axis;
use crate::program::{P2pTransfer, Phase};

use super::error::{CheckResult, ensure, fault};
use super::lattice::{AbstractState, AbstractValue, OperandWrite, WriteTarget};
use super::operands::InstrOperands;
use super::stage::SentTensor;
use super::values::ForwardOpKind;

fn check_neighbour(
    operands: &InstrOperands,
    transfer: &P2pTransfer,
    towards_loss: bool,
) -> CheckResult {
    let check = &operands.checker;
    let context = check.context;
    let own = context.virtual_stage(check.index, check.at.chunk);
    let other = if towards_loss { own.checked_add(1) } else { own.checked_sub(1) };
    let other = other.filter(|other| *other < context.virtual_stages());
    let neighbour = other.map(|other| context.stage_and_chunk(other).0);
    ensure(neighbour == Some(transfer.peer_stage as usize), || {
        format!(
            "addresses stage {}, which is not the neighbour in this pass's direction",
            transfer.peer_stage
        )
    })?;
    ensure(transfer.group == check.context.mesh.group(Axis::Pipeline), || {
        "does not use the mesh's pipeline group".into()
    })
}

/// Checks that there is one operand per transferred tensor.
fn check_counts(
    operands: &InstrOperands,
    transfer: &P2pTransfer,
    reads: usize,
    writes: usize,
) -> CheckResult {
    let count = transfer.tensors.len();
    ensure(count > 0, || "transfers no tensor".into())?;
    operands.check_arity(reads * count..=reads * count, writes * count)
}

pub(super) fn send(
    operands: &mut InstrOperands,
    transfer: &P2pTransfer,
) -> CheckResult<Vec<OperandWrite>> {
    let forward = operands.checker.at.phase == Phase::Forward;
    check_counts(operands, transfer, 1, 0)?;
    check_neighbour(operands, transfer, forward)?;
    operands.check_no_pending_norm()?;
    for port in 0..operands.reads.len() {
        let state = operands.reads[port];
        ensure(state.packed.is_none(), || "sends a tensor that is packed for a collective".into())?;
        if forward {
            let value = operands.value(port)?;
            ensure(!operands.checker.boundary().sent.contains(&value), || {
                format!("sends {} twice", operands.operand_name(port))
            })?;
            // The send is a use of the value: the neighbour sends its gradient contribution back.
            operands.checker.graph.apply(ForwardOpKind::Send, vec![value], &[])?;
            operands.checker.boundary().sent.push(value);
            let microbatch = operands.checker.graph.microbatch(value);
            operands.checker.outgoing.push_back(SentTensor { state, microbatch });
        } else {
            send_gradient(operands, &state)?;
        }
    }
    Ok(vec![])
}

fn send_gradient(operands: &mut InstrOperands, state: &AbstractState) -> CheckResult {
    let check = &mut *operands.checker;
    let received = &check.boundaries[check.at.chunk].received;
    let index = received.iter().position(|v| check.graph.is_complete(state.value, *v));
    match index {
        Some(index) => {
            // The neighbour identifies the tensor by its position among those it sent.
            let tensor = received[index];
            let value = AbstractValue::Gradient { of: tensor, uses: index as u64 };
            let state = state.with_value(value);
            check.outgoing.push_back(SentTensor { state, microbatch: None });
            Ok(())
        }
        None => fault(format!(
            "sends {}, not the complete gradient of a received tensor",
            check.graph.describe(state.value)
        )),
    }
}

/// Results of a receive; `None` for an unmatched receive, which `schedule` reports.
pub(super) fn receive(
    operands: &mut InstrOperands,
    transfer: &P2pTransfer,
) -> CheckResult<Option<Vec<OperandWrite>>> {
    check_counts(operands, transfer, 0, 1)?;
    let forward = operands.checker.at.phase == Phase::Forward;
    check_neighbour(operands, transfer, !forward)?;
    let mut writes = vec![];
    for access in &operands.instr.writes {
        let name = operands.checker.stage.buffer(access.buffer).name.clone();
        let check = &mut *operands.checker;
        let Some(SentTensor { state, microbatch }) = check.incoming.pop_front() else {
            return Ok(None);
        };
        let value = if forward {
            let value = check.graph.add_input(&name, microbatch);
            check.boundary().received.push(value);
            AbstractValue::Value(value)
        } else {
            let AbstractValue::Gradient { uses: at, .. } = state.value else { return Ok(None) };
            let Some(value) = check.boundary().sent.get(at as usize).copied() else {
                return Ok(None);
            };
            match check.graph.find(ForwardOpKind::Send, &[value]) {
                Some(node) => check.graph.contribution(node, 0),
                None => return fault("receives the gradient of a tensor that was not sent"),
            }
        };
        let state = AbstractState { pending_norm: None, ..state.with_value(value) };
        writes.push(OperandWrite { state, target: WriteTarget::Fresh });
    }
    Ok(Some(writes))
}
