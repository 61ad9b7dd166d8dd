//! Products. A tied head is stored as its transpose, the embedding.

use narrows_plan::program::{Access, GemmOp, GemmRole, Region};

use super::super::device::{CpuDevice, ResolvedInstr, Stop};
use super::{view, view_mut, write};
use crate::kernels::{
    MatrixView, StridedMatrix, gemm_forward, gemm_input_gradient, gemm_weight_gradient,
};

pub fn run(device: &mut CpuDevice, ready: &ResolvedInstr, shape: &GemmOp) -> Result<(), Stop> {
    let (parallel, batch) = (device.parallel, shape.batch as usize);
    let (reads, writes) = (&ready.instr.reads, &ready.instr.writes);
    let output = writes[0].extent;
    let weight = match shape.role {
        GemmRole::WeightGradient => &writes[0],
        _ => &reads[1],
    };
    let transposed = stored_transposed(device, weight);
    let mut operands = device.operands(ready)?;
    let (left, right) = (operands.read(0), operands.read(1));
    let made = operands.write(0);
    let write = write(shape.accumulate);
    match shape.role {
        GemmRole::Forward => {
            let w = matrix(right, &reads[1], transposed);
            let (x, y) = (view(left, reads[0].extent), view_mut(made, output));
            gemm_forward(x, w, y, batch, write, parallel);
        }
        GemmRole::InputGradient => {
            let w = matrix(right, &reads[1], transposed);
            let (dy, dx) = (view(left, reads[0].extent), view_mut(made, output));
            gemm_input_gradient(dy, w, dx, batch, write, parallel);
        }
        GemmRole::WeightGradient => {
            let (x, dy) = (view(left, reads[0].extent), view(right, reads[1].extent));
            if transposed {
                let (rows, columns) = (output.columns as usize, output.rows as usize);
                let dw = super::MatrixViewMut::new(made, rows, columns);
                gemm_weight_gradient(dy, x, dw, batch, write, parallel);
            } else {
                gemm_weight_gradient(x, dy, view_mut(made, output), batch, write, parallel);
            }
        }
    }
    Ok(())
}

fn matrix<'a>(numbers: &'a [f32], access: &Access, transposed: bool) -> StridedMatrix<'a> {
    let (rows, columns) = (access.extent.rows as usize, access.extent.columns as usize);
    if transposed {
        MatrixView::new(numbers, columns, rows).transposed()
    } else {
        MatrixView::new(numbers, rows, columns).into()
    }
}

fn stored_transposed(device: &CpuDevice, weight: &Access) -> bool {
    let buffer = device.stage.buffer(weight.buffer);
    let parameter = matches!(buffer.region, Region::Weight | Region::Gradient);
    let head = |shard: &narrows_plan::program::Shard| {
        shard.members.iter().any(|(name, _, _)| name == "head")
    };
    device.tied && parameter && buffer.shard.as_ref().is_some_and(head)
}
