//! RMSNorm in its variants. ε and the whole width are the model's; a device may hold a shard.

use narrows_plan::program::FusedOp;

use super::super::device::{CpuDevice, ResolvedInstr, Stop};
use super::super::kernels::norm::{self, NormGradients, NormSaved, Rms};
use super::{view, view_mut, with_scratch, write};

pub fn rms(device: &CpuDevice) -> Rms {
    let constants = &device.constants;
    Rms { width: constants.hidden as usize, epsilon: constants.norm_epsilon as f32 }
}

pub fn forward(device: &mut CpuDevice, ready: &ResolvedInstr, op: FusedOp) -> Result<(), Stop> {
    let (rms, parallel) = (rms(device), device.parallel);
    let (x_extent, y_extent) = (ready.instr.reads[0].extent, ready.instr.writes[0].extent);
    let mut operands = device.operands(ready)?;
    let x = view(operands.read(0), x_extent);
    let (scale, s) = (operands.read(1), operands.read(2));
    let made = operands.write(0);
    if op == FusedOp::NormStatistic {
        norm::statistic(x, made, parallel);
        return Ok(());
    }
    let y = view_mut(made, y_extent);
    match op {
        FusedOp::NormForward => norm::forward(x, scale, rms, y, operands.write(1), parallel),
        FusedOp::NormApply => norm::apply(x, scale, s, rms, y, parallel),
        FusedOp::NormOnline => norm::online(x, scale, y, operands.write(1), parallel),
        _ => norm::scale(x, scale, y, parallel),
    }
    Ok(())
}

pub fn backward(device: &mut CpuDevice, ready: &ResolvedInstr, op: FusedOp) -> Result<(), Stop> {
    let (rms, parallel) = (rms(device), device.parallel);
    let reads = &ready.instr.reads;
    let extents = (reads[0].extent, reads[1].extent, ready.instr.writes[0].extent);
    // dy, x, γ and one or two numbers a row, then the gradients that are added to.
    let statistics = if op == FusedOp::NormBackwardApply { 2 } else { 1 };
    let add = reads.len() > 3 + statistics + 1;
    with_scratch(device, parallel.sums_scratch(extents.1.columns as usize), |device, scratch| {
        let mut operands = device.operands(ready)?;
        let saved = NormSaved {
            dy: view(operands.read(0), extents.0),
            x: view(operands.read(1), extents.1),
            scale: operands.read(2),
        };
        if op == FusedOp::NormBackwardStatistic {
            norm::backward_statistic(saved, operands.write(0), parallel);
            return Ok(());
        }
        let (s, t) = (operands.read(3), operands.read(4));
        let made = NormGradients {
            dx: view_mut(operands.write(0), extents.2),
            write: write(add),
            dscale: operands.write(1),
            scratch,
        };
        match op {
            FusedOp::NormBackward => norm::backward(saved, s, rms, made, parallel),
            FusedOp::NormBackwardApply => norm::backward_apply(saved, s, t, rms, made, parallel),
            _ => norm::online_backward(saved, s, made, parallel),
        }
        Ok(())
    })
}
