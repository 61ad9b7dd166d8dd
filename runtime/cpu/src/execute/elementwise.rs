//! Element-wise fused ops: rotary embedding, gated product, additions, zeros.

use std::ops::Range;

use narrows_plan::model::GatedProduct;
use narrows_runtime::ScheduledInstruction;
use narrows_runtime::session::PositionRuns;

use super::operands::{view, view_mut, with_scratch};
use crate::abort::StopReason;
use crate::device::CpuDevice;
use crate::kernels::{self, MatrixViewMut, Parallel, RopeTable};

pub(crate) fn rope(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
) -> Result<(), StopReason> {
    run_rope(device, scheduled, kernels::rope_forward)
}

pub(crate) fn rope_backward(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
) -> Result<(), StopReason> {
    run_rope(device, scheduled, kernels::rope_backward)
}

/// The operand is the rotated features, which come first in each row of its buffer.
fn run_rope(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
    kernel: fn(MatrixViewMut<'_>, &RopeTable, PositionRuns, Parallel),
) -> Result<(), StopReason> {
    let parallel = device.parallel;
    let rotated = scheduled.instr.writes[0];
    let buffer = device.stage.buffer(rotated.buffer).extent;
    let tokens = device.token_rows(rotated.extent.rows);
    let Some(table) = device.rope_table else {
        return Err(device.unsupported(scheduled, "it rotates heads, but the model has none"));
    };
    let range =
        |device: &CpuDevice, access: &_| -> Range<usize> { device.buffer_range(scheduled, access) };
    let mut operands = device.operands_at(scheduled, range)?;
    let columns = rotated.extent.columns as usize;
    kernel(
        view_mut(operands.write(0), buffer).column_range(0, columns),
        table,
        tokens.positions,
        parallel,
    );
    Ok(())
}

pub(crate) fn bias(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
) -> Result<(), StopReason> {
    let parallel = device.parallel;
    let (input, output) = (scheduled.instr.reads[0].extent, scheduled.instr.writes[0].extent);
    let mut operands = device.operands(scheduled)?;
    let y = view_mut(operands.write(0), output);
    kernels::bias_forward(view(operands.read(0), input), operands.read(1), y, parallel);
    Ok(())
}

pub(crate) fn bias_backward(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
) -> Result<(), StopReason> {
    let (parallel, extent) = (device.parallel, scheduled.instr.reads[0].extent);
    let elements = parallel.reduction_scratch_elements(extent.columns as usize);
    with_scratch(device, elements, |device, scratch| {
        let mut operands = device.operands(scheduled)?;
        let dy = view(operands.read(0), extent);
        kernels::bias_backward(dy, operands.write(0), scratch, parallel);
        Ok(())
    })
}

/// Gate and up are two operands, or side by side in one.
pub(crate) fn gated_product(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
    product: GatedProduct,
) -> Result<(), StopReason> {
    let parallel = device.parallel;
    let (reads, output) = (&scheduled.instr.reads, scheduled.instr.writes[0].extent);
    let width = output.columns as usize;
    let mut operands = device.operands(scheduled)?;
    let y = view_mut(operands.write(0), output);
    let first = view(operands.read(0), reads[0].extent);
    let (gate, up) = match reads.get(1) {
        Some(up) => (first, view(operands.read(1), up.extent)),
        None => (first.column_range(0, width), first.column_range(width, width)),
    };
    kernels::gated_product_forward(gate, up, product, y, parallel);
    Ok(())
}

/// Gate and up are two operands, or side by side in one, which their gradients replace or not.
pub(crate) fn gated_product_backward(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
    product: GatedProduct,
) -> Result<(), StopReason> {
    let parallel = device.parallel;
    let (reads, writes) = (&scheduled.instr.reads, &scheduled.instr.writes);
    let width = reads[0].extent.columns as usize;
    let mut operands = device.operands(scheduled)?;
    let mut gradient = |index: usize| {
        let (saved, gradient) = (operands.read(1 + index), operands.write(index));
        // An operand in place is a written operand only, which holds what was saved.
        if !saved.is_empty() {
            gradient.copy_from_slice(saved);
        }
        view_mut(gradient, writes[index].extent)
    };
    let (gate, up) = match writes.len() {
        1 => gradient(0).split_columns(width),
        _ => (gradient(0), gradient(1)),
    };
    let dy = view(operands.read(0), reads[0].extent);
    kernels::gated_product_backward(dy, product, gate, up, parallel);
    Ok(())
}

pub(crate) fn add(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
) -> Result<(), StopReason> {
    let parallel = device.parallel;
    let mut operands = device.operands(scheduled)?;
    let sum = operands.write(0);
    kernels::add(operands.read(0), operands.read(1), sum, parallel);
    Ok(())
}

pub(crate) fn add_into(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
) -> Result<(), StopReason> {
    let parallel = device.parallel;
    let mut operands = device.operands(scheduled)?;
    let sum = operands.write(0);
    kernels::add_into(operands.read(0), sum, parallel);
    Ok(())
}

pub(crate) fn fill(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
) -> Result<(), StopReason> {
    let parallel = device.parallel;
    let mut operands = device.operands(scheduled)?;
    kernels::fill_zero(operands.write(0), parallel);
    Ok(())
}
