//! Transfers to and from neighbouring pipeline stages.

use narrows_plan::program::P2pTransfer;
use narrows_runtime::{PipelineDirection, ScheduledInstruction, TimeCategory};

use crate::abort::StopReason;
use crate::arena::OPERANDS_MAX;
use crate::device::CpuDevice;

pub(crate) fn send(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
    transfer: &P2pTransfer,
) -> Result<(), StopReason> {
    let direction = PipelineDirection::of_phase(scheduled.pass.phase);
    let Some(link) = device.links.outgoing(u64::from(transfer.peer_stage), direction) else {
        return Err(device.unsupported(scheduled, "it sends to a stage that is not connected"));
    };
    let reads = &scheduled.instr.reads;
    if reads.len() > OPERANDS_MAX {
        return Err(device.unsupported(scheduled, "it sends too many operands"));
    }
    let mut operands: [&[f32]; OPERANDS_MAX] = [&[]; OPERANDS_MAX];
    for (operand, access) in operands.iter_mut().zip(reads) {
        *operand = device.arena.slice(device.operand_range(scheduled, access));
    }
    let operands = &operands[..reads.len()];
    link.send(operands)?;
    device.report.sent.0 += operands.iter().map(|operand| 4 * operand.len() as u64).sum::<u64>();
    Ok(())
}

pub(crate) fn receive(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
    transfer: &P2pTransfer,
) -> Result<(), StopReason> {
    let links = device.links;
    let direction = PipelineDirection::of_phase(scheduled.pass.phase);
    let Some(link) = links.incoming(u64::from(transfer.peer_stage), direction) else {
        return Err(device.unsupported(scheduled, "it receives from a stage that is not connected"));
    };
    let mut fits = true;
    link.receive(&mut |elements| {
        device.clock.read(TimeCategory::Bubble);
        let mut rest = elements;
        for access in &scheduled.instr.writes {
            let range = device.operand_range(scheduled, access);
            let Some((operand, others)) = rest.split_at_checked(range.len()) else {
                fits = false;
                return;
            };
            device.report.received.0 += 4 * range.len() as u64;
            device.arena.slice_mut(range).copy_from_slice(operand);
            rest = others;
        }
        fits &= rest.is_empty();
    })?;
    if fits {
        Ok(())
    } else {
        Err(device.unsupported(scheduled, "the transfer that it receives has another size"))
    }
}
