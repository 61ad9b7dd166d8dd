//! The embedding and the loss.

use narrows_plan::program::FusedOp;

use super::super::device::{CpuDevice, ResolvedInstr, Stop};
use super::{view, view_mut};
use crate::kernels::{
    ReducedStatistics, embedding_gather, embedding_scatter_add, loss_gradient, loss_maximum,
    loss_sum,
};

/// The first token id of this device's part of a vocabulary.
fn first(device: &CpuDevice, held: u64) -> usize {
    if held < device.constants.vocab { (device.at.tensor * held) as usize } else { 0 }
}

pub fn gather(device: &mut CpuDevice, ready: &ResolvedInstr) -> Result<(), Stop> {
    let parallel = device.parallel;
    let (table, out) = (ready.instr.reads[1].extent, ready.instr.writes[0].extent);
    let first = first(device, table.rows);
    let mut operands = device.operands(ready)?;
    let tokens = bytemuck::cast_slice(operands.read(0));
    let out = view_mut(operands.write(0), out);
    embedding_gather(tokens, view(operands.read(1), table), first, out, parallel);
    Ok(())
}

pub fn scatter_add(device: &mut CpuDevice, ready: &ResolvedInstr) -> Result<(), Stop> {
    let parallel = device.parallel;
    let (dy, table) = (ready.instr.reads[2].extent, ready.instr.writes[0].extent);
    let first = first(device, table.rows);
    let mut operands = device.operands(ready)?;
    let tokens = bytemuck::cast_slice(operands.read(0));
    let table = view_mut(operands.write(0), table);
    embedding_scatter_add(tokens, view(operands.read(2), dy), first, table, parallel);
    Ok(())
}

pub fn loss(device: &mut CpuDevice, ready: &ResolvedInstr, op: FusedOp) -> Result<(), Stop> {
    let parallel = device.parallel;
    let extent = ready.instr.reads[0].extent;
    let first = first(device, extent.columns);
    let work = &device.context.workload;
    let factor = 1.0 / (work.global_batch * work.sequence_length) as f64;
    let mut operands = device.operands(ready)?;
    match op {
        FusedOp::LossMaximum => {
            loss_maximum(view(operands.read(0), extent), operands.write(0), parallel);
        }
        FusedOp::LossSum => {
            let targets = bytemuck::cast_slice(operands.read(2));
            let packed = operands.write(0);
            let logits = view(operands.read(0), extent);
            loss_sum(logits, operands.read(1), targets, first, packed, parallel);
        }
        _ => {
            let reduced = ReducedStatistics {
                maximum: operands.read(1),
                packed: operands.read(2),
                targets: bytemuck::cast_slice(operands.read(3)),
                first_id: first,
                factor: factor as f32,
            };
            let logits = view_mut(operands.write(0), extent);
            let here = loss_gradient(logits, reduced, parallel);
            operands.write(1)[0] = here as f32;
            device.loss += here;
        }
    }
    Ok(())
}
