//! Norms of the heads of queries and keys.

use narrows_plan::program::QkHeads;
use narrows_runtime::ScheduledInstruction;

use super::operands::{view, view_mut, with_scratch};
use crate::abort::StopReason;
use crate::device::CpuDevice;
use crate::kernels::{QkNorm, RmsNorm, qk_norm_backward, qk_norm_forward};

fn norm(device: &CpuDevice, heads: QkHeads) -> QkNorm<'static> {
    let epsilon = device.program.constants.norm_epsilon as f32;
    let head = RmsNorm { width: heads.head_dim as usize, epsilon };
    QkNorm { head, queries: heads.queries as usize, keys: heads.keys as usize, scales: &[] }
}

pub(crate) fn forward(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
    heads: QkHeads,
) -> Result<(), StopReason> {
    let (norm, parallel) = (norm(device, heads), device.parallel);
    let extent = scheduled.instr.reads[0].extent;
    let mut operands = device.operands(scheduled)?;
    let norm = QkNorm { scales: operands.read(1), ..norm };
    let y = view_mut(operands.write(0), extent);
    qk_norm_forward(view(operands.read(0), extent), norm, y, parallel);
    Ok(())
}

pub(crate) fn backward(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
    heads: QkHeads,
) -> Result<(), StopReason> {
    let (norm, parallel) = (norm(device, heads), device.parallel);
    let reads = &scheduled.instr.reads;
    if reads.len() > 4 {
        return Err(device.unsupported(scheduled, "it accumulates the gradient of normed heads"));
    }
    let extent = reads[1].extent;
    let elements = parallel.reduction_scratch_elements(heads.scale_count() as usize);
    with_scratch(device, elements, |device, scratch| {
        let mut operands = device.operands(scheduled)?;
        let saved = (view(operands.read(0), extent), view(operands.read(1), extent));
        let norm = QkNorm { scales: operands.read(2), ..norm };
        let outputs = (view_mut(operands.write(0), extent), operands.write(1));
        qk_norm_backward(saved, norm, outputs, scratch, parallel);
        Ok(())
    })
}
