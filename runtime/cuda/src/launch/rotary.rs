//! Rotary position embedding.

use narrows_plan::DType;

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
    let tokens = site.token_rows(x.rows);
    let token_sizes = [tokens.first_position, tokens.positions].map(|size| size as u64);
    let positions = site.device.context.workload.sequence_length;
    let table =
        MatrixOperand::contiguous(MemorySpace::Rotary, 0, (positions, head_dim), DType::F32);
    let mut format = VectorFormat::common(x.dtype, &[x])?;
    format.require((head_dim / 2).is_multiple_of(format.vector));
    let mut arguments = vec![x.update(), table.read()];
    for size in [x.rows, x.columns, x.stride, head_dim].into_iter().chain(token_sizes) {
        arguments.push(Argument::U32(to_u32(size)?));
    }
    arguments.push(Argument::F32(sign));
    let launch = Launch::new(KernelFamily::Rotary, format.kernel_name("rope"), arguments);
    Ok(launch.over_rows(x.rows, x.columns / 2, format)?.into())
}

/// Table of the rotary kernels, `[positions, head_dim]`: for each position the cosines of the pairs of a head,
/// followed by their sines. Computed in f64 and rounded once.
pub fn rotary_table(positions: u64, head_dim: u64, theta: f64) -> Vec<f32> {
    let pairs = head_dim / 2;
    let angle = |position: u64, pair: u64| {
        position as f64 * theta.powf(-2.0 * pair as f64 / head_dim as f64)
    };
    let row = |position: u64| {
        let cosines = (0..pairs).map(move |pair| angle(position, pair).cos() as f32);
        cosines.chain((0..pairs).map(move |pair| angle(position, pair).sin() as f32))
    };
    (0..positions).flat_map(row).collect()
}
