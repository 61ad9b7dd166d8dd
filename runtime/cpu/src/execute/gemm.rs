//! GEMMs. The weight of a tied head is stored as its transpose, the embedding.

use narrows_plan::program::{Access, GemmOp, GemmRole, ParameterShard};
use narrows_runtime::ScheduledInstruction;

use super::operands::{view, view_mut, write_mode};
use crate::abort::StopReason;
use crate::device::CpuDevice;
use crate::kernels::{
    MatrixView, MatrixViewMut, StridedMatrix, copy, gemm_forward, gemm_input_gradient,
    gemm_weight_gradient,
};

pub(crate) fn run(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
    gemm: &GemmOp,
) -> Result<(), StopReason> {
    let (mode, batch) = (device.gemm_mode(), gemm.batch as usize);
    let (reads, writes) = (&scheduled.instr.reads, &scheduled.instr.writes);
    let output = writes[0].extent;
    let weight = match gemm.role {
        GemmRole::WeightGradient => &writes[0],
        GemmRole::Forward | GemmRole::InputGradient => &reads[1],
    };
    let transposed = is_stored_transposed(device, weight);
    let mut operands = device.operands(scheduled)?;
    let (left, right) = (operands.read(0), operands.read(1));
    let result = operands.write(0);
    let write = write_mode(gemm.accumulate);
    match gemm.role {
        GemmRole::Forward => {
            let w = weight_matrix(right, &reads[1], transposed);
            if gemm.accumulate {
                copy(operands.read(2), result, mode.parallel);
            }
            let (x, y) = (view(left, reads[0].extent), view_mut(result, output));
            gemm_forward(x, w, y, batch, write, mode);
        }
        GemmRole::InputGradient => {
            let w = weight_matrix(right, &reads[1], transposed);
            let (dy, dx) = (view(left, reads[0].extent), view_mut(result, output));
            gemm_input_gradient(dy, w, dx, batch, write, mode);
        }
        GemmRole::WeightGradient => {
            let (x, dy) = (view(left, reads[0].extent), view(right, reads[1].extent));
            if transposed {
                let (rows, columns) = (output.columns as usize, output.rows as usize);
                let dw = MatrixViewMut::new(result, rows, columns);
                gemm_weight_gradient(dy, x, dw, batch, write, mode);
            } else {
                gemm_weight_gradient(x, dy, view_mut(result, output), batch, write, mode);
            }
        }
    }
    Ok(())
}

fn weight_matrix<'a>(elements: &'a [f32], access: &Access, transposed: bool) -> StridedMatrix<'a> {
    let (rows, columns) = (access.extent.rows as usize, access.extent.columns as usize);
    if transposed {
        MatrixView::new(elements, columns, rows).transposed()
    } else {
        MatrixView::new(elements, rows, columns).into()
    }
}

fn is_stored_transposed(device: &CpuDevice, weight: &Access) -> bool {
    let buffer = device.stage.buffer(weight.buffer);
    let is_parameter = buffer.role.is_weight() || buffer.role.is_gradient();
    let is_head = buffer.shard.as_ref().is_some_and(ParameterShard::holds_head);
    device.program.tied && is_parameter && is_head
}
