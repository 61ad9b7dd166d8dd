//! Rotary position embedding.

use narrows_plan::DType;
use narrows_plan::model::Rope;
use narrows_runtime::session::PositionRuns;

use super::grid::VectorFormat;
use super::operand::{Argument, LaunchResult, MatrixOperand, MemorySpace, to_u32};
use super::site::{InstrSite, Launch, Launches};
use crate::kernel_source::KernelFamily;

/// Rotates, in place, the features that are the first columns of each row of a buffer. `sign` is −1 in the
/// backward pass.
pub(super) fn rope(site: &InstrSite, head_dim: u64, sign: f32) -> LaunchResult<Launches> {
    let access = site.scheduled.instr.writes.first().ok_or("it writes nothing")?;
    let buffer = site.device.stage.buffer(access.buffer).extent;
    let x = MatrixOperand { stride: buffer.columns, ..site.output(0)? };
    let heads = head_dim > 0 && head_dim.is_multiple_of(2) && x.columns.is_multiple_of(head_dim);
    if !heads || x.columns > x.stride {
        return Err(format!(
            "{} of {} features are not whole heads of {head_dim}",
            x.columns, x.stride
        ));
    }
    let rotated = site.device.constants.rope.dim;
    if rotated > head_dim {
        return Err(format!("heads of {head_dim} have no {rotated} features to rotate"));
    }
    let tokens = site.token_rows(x.rows);
    let PositionRuns { first, count, second_row, gap } = tokens.positions;
    let token_sizes = [first, count, second_row, gap].map(|size| size as u64);
    let positions = site.device.context.workload.sequence_length;
    let table = MatrixOperand::contiguous(MemorySpace::Rotary, 0, (positions, rotated), DType::F32);
    let mut format = VectorFormat::common(x.dtype, &[x])?;
    format.require((rotated / 2).is_multiple_of(format.vector));
    format.require(head_dim.is_multiple_of(format.vector));
    let mut arguments = vec![x.update(), table.read()];
    for size in
        [x.rows, x.columns / head_dim, x.stride, head_dim, rotated].into_iter().chain(token_sizes)
    {
        arguments.push(Argument::U32(to_u32(size)?));
    }
    arguments.push(Argument::F32(sign));
    let launch = Launch::new(KernelFamily::Rotary, format.kernel_name("rope"), arguments);
    Ok(launch.over_rows(x.rows, x.columns / head_dim * rotated / 2, format)?.into())
}

/// Table of the rotary kernels, `[positions, rotated features of a head]`: for each position the cosines of the pairs of
/// a head, followed by their sines. Computed in f64 and rounded once.
pub fn rotary_table(positions: u64, rope: &Rope) -> Vec<f32> {
    let frequencies = rope.frequencies(positions);
    (0..positions).flat_map(|at| frequencies.row(at)).map(|value| value as f32).collect()
}
