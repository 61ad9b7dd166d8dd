//! Ops on a shard of the vocabulary: embedding and loss.

use narrows_plan::program::FusedOp;
use narrows_runtime::ScheduledInstruction;

use super::operands::{view, view_mut};
use crate::abort::StopReason;
use crate::device::CpuDevice;
use crate::kernels::{
    LookupTokens, ReducedStatistics, embedding_gather, embedding_scatter_add, loss_gradient,
    loss_maximum, loss_sum,
};

/// First token id of this device's shard of a vocabulary, of which it holds `ids` ids.
fn first_id(device: &CpuDevice, ids: u64) -> usize {
    let sharded = ids < device.program.constants.vocab;
    if sharded { (device.coordinates.tensor * ids) as usize } else { 0 }
}

pub(crate) fn gather(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
) -> Result<(), StopReason> {
    let parallel = device.parallel;
    let table = scheduled.instr.reads[1].extent;
    let output = scheduled.instr.writes[0].extent;
    let first_id = first_id(device, table.rows);
    let mut operands = device.operands(scheduled)?;
    let tokens = bytemuck::cast_slice(operands.read(0));
    let output = view_mut(operands.write(0), output);
    embedding_gather(tokens, view(operands.read(1), table), first_id, output, parallel);
    Ok(())
}

pub(crate) fn scatter_add(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
) -> Result<(), StopReason> {
    let parallel = device.parallel;
    let padding = device.program.constants.padding_token.map(|token| token as u32);
    let (dy, table) = (scheduled.instr.reads[2].extent, scheduled.instr.writes[0].extent);
    let first_id = first_id(device, table.rows);
    let mut operands = device.operands(scheduled)?;
    let tokens = LookupTokens { ids: bytemuck::cast_slice(operands.read(0)), padding };
    let dtable = view_mut(operands.write(0), table);
    embedding_scatter_add(tokens, view(operands.read(2), dy), first_id, dtable, parallel);
    Ok(())
}

pub(crate) fn loss(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
    op: FusedOp,
) -> Result<(), StopReason> {
    let parallel = device.parallel;
    let extent = scheduled.instr.reads[0].extent;
    let first_id = first_id(device, extent.columns);
    let workload = &device.program.context.workload;
    let factor = 1.0 / (workload.global_batch * workload.sequence_length) as f64;
    let mut operands = device.operands(scheduled)?;
    match op {
        FusedOp::LossMaximum => {
            loss_maximum(view(operands.read(0), extent), operands.write(0), parallel);
        }
        FusedOp::LossSum => {
            let targets = bytemuck::cast_slice(operands.read(2));
            let packed = operands.write(0);
            let logits = view(operands.read(0), extent);
            loss_sum(logits, operands.read(1), targets, first_id, packed, parallel);
        }
        _ => {
            let reduced = ReducedStatistics {
                maximum: operands.read(1),
                packed: operands.read(2),
                targets: bytemuck::cast_slice(operands.read(3)),
                first_id,
                factor: factor as f32,
            };
            let logits = view_mut(operands.write(0), extent);
            let loss = loss_gradient(logits, reduced, parallel);
            operands.write(1)[0] = loss as f32;
            device.loss += loss;
        }
    }
    Ok(())
}
