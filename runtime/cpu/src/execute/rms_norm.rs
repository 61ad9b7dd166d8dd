//! RMSNorm in its variants. Rows may be shards: the width that the sum of squares is divided by is that
//! of the model.

use narrows_plan::program::FusedOp;
use narrows_runtime::ScheduledInstruction;

use super::operands::{view, view_mut, with_scratch, write_mode};
use crate::abort::StopReason;
use crate::device::CpuDevice;
use crate::kernels::{
    RmsNorm, RmsNormGradients, RmsNormSaved, rms_norm_apply, rms_norm_backward,
    rms_norm_backward_apply, rms_norm_backward_statistic, rms_norm_forward, rms_norm_online,
    rms_norm_online_backward, rms_norm_scale, rms_norm_statistic,
};

/// Width and ε of the norms of the model.
pub(crate) fn norm_shape(device: &CpuDevice) -> RmsNorm {
    let constants = &device.program.constants;
    RmsNorm { width: constants.hidden as usize, epsilon: constants.norm_epsilon as f32 }
}

pub(crate) fn forward(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
    op: FusedOp,
) -> Result<(), StopReason> {
    let (norm, parallel) = (norm_shape(device), device.parallel);
    let (x_extent, y_extent) = (scheduled.instr.reads[0].extent, scheduled.instr.writes[0].extent);
    let mut operands = device.operands(scheduled)?;
    let x = view(operands.read(0), x_extent);
    let (scale, s) = (operands.read(1), operands.read(2));
    let output = operands.write(0);
    if op == FusedOp::NormStatistic {
        rms_norm_statistic(x, output, parallel);
        return Ok(());
    }
    let y = view_mut(output, y_extent);
    match op {
        FusedOp::NormForward => rms_norm_forward(x, scale, norm, y, operands.write(1), parallel),
        FusedOp::NormApply => rms_norm_apply(x, scale, s, norm, y, parallel),
        FusedOp::NormOnline => rms_norm_online(x, scale, y, operands.write(1), parallel),
        _ => rms_norm_scale(x, scale, y, parallel),
    }
    Ok(())
}

pub(crate) fn backward(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
    op: FusedOp,
) -> Result<(), StopReason> {
    let (norm, parallel) = (norm_shape(device), device.parallel);
    let reads = &scheduled.instr.reads;
    let (dy_extent, x_extent) = (reads[0].extent, reads[1].extent);
    let output_extent = scheduled.instr.writes[0].extent;
    // Operands: dy, x, γ, one or two statistics of each row, then the gradients that are accumulated.
    let statistics = if op == FusedOp::NormBackwardApply { 2 } else { 1 };
    let accumulate = reads.len() > 3 + statistics + 1;
    with_scratch(
        device,
        parallel.reduction_scratch_elements(x_extent.columns as usize),
        |device, scratch| {
            let mut operands = device.operands(scheduled)?;
            let saved = RmsNormSaved {
                dy: view(operands.read(0), dy_extent),
                x: view(operands.read(1), x_extent),
                scale: operands.read(2),
            };
            if op == FusedOp::NormBackwardStatistic {
                rms_norm_backward_statistic(saved, operands.write(0), parallel);
                return Ok(());
            }
            let (s, t) = (operands.read(3), operands.read(4));
            let gradients = RmsNormGradients {
                dx: view_mut(operands.write(0), output_extent),
                write: write_mode(accumulate),
                dscale: operands.write(1),
                scratch,
            };
            match op {
                FusedOp::NormBackward => rms_norm_backward(saved, s, norm, gradients, parallel),
                FusedOp::NormBackwardApply => {
                    rms_norm_backward_apply(saved, s, t, norm, gradients, parallel)
                }
                _ => rms_norm_online_backward(saved, s, gradients, parallel),
            }
            Ok(())
        },
    )
}
