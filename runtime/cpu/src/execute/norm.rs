//! RMSNorm in its variants. ε and the whole width are the model's; a device may hold a shard.

use narrows_plan::program::FusedOp;

use super::super::device::{CpuDevice, ResolvedInstr, Stop};
use super::{view, view_mut, with_scratch, write};
use crate::kernels::{
    RmsNorm, RmsNormGradients, RmsNormSaved, rms_norm_apply, rms_norm_backward,
    rms_norm_backward_apply, rms_norm_backward_statistic, rms_norm_forward, rms_norm_online,
    rms_norm_online_backward, rms_norm_scale, rms_norm_statistic,
};

pub fn rms(device: &CpuDevice) -> RmsNorm {
    let constants = &device.constants;
    RmsNorm { width: constants.hidden as usize, epsilon: constants.norm_epsilon as f32 }
}

pub fn forward(device: &mut CpuDevice, ready: &ResolvedInstr, op: FusedOp) -> Result<(), Stop> {
    let (rms, parallel) = (rms(device), device.parallel);
    let (x_extent, y_extent) = (ready.instr.reads[0].extent, ready.instr.writes[0].extent);
    let mut operands = device.operands(ready)?;
    let x = view(operands.read(0), x_extent);
    let (scale, s) = (operands.read(1), operands.read(2));
    let made = operands.write(0);
    if op == FusedOp::NormStatistic {
        rms_norm_statistic(x, made, parallel);
        return Ok(());
    }
    let y = view_mut(made, y_extent);
    match op {
        FusedOp::NormForward => rms_norm_forward(x, scale, rms, y, operands.write(1), parallel),
        FusedOp::NormApply => rms_norm_apply(x, scale, s, rms, y, parallel),
        FusedOp::NormOnline => rms_norm_online(x, scale, y, operands.write(1), parallel),
        _ => rms_norm_scale(x, scale, y, parallel),
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
    with_scratch(
        device,
        parallel.reduction_scratch_elements(extents.1.columns as usize),
        |device, scratch| {
            let mut operands = device.operands(ready)?;
            let saved = RmsNormSaved {
                dy: view(operands.read(0), extents.0),
                x: view(operands.read(1), extents.1),
                scale: operands.read(2),
            };
            if op == FusedOp::NormBackwardStatistic {
                rms_norm_backward_statistic(saved, operands.write(0), parallel);
                return Ok(());
            }
            let (s, t) = (operands.read(3), operands.read(4));
            let made = RmsNormGradients {
                dx: view_mut(operands.write(0), extents.2),
                write: write(add),
                dscale: operands.write(1),
                scratch,
            };
            match op {
                FusedOp::NormBackward => rms_norm_backward(saved, s, rms, made, parallel),
                FusedOp::NormBackwardApply => {
                    rms_norm_backward_apply(saved, s, t, rms, made, parallel)
                }
                _ => rms_norm_online_backward(saved, s, made, parallel),
            }
            Ok(())
        },
    )
}
