//! Norms of the heads of queries and keys. The kernels treat every head of every token as a row.

use narrows_plan::program::QkHeads;

use super::grid::{PartialSumGrid, VectorFormat};
use super::operand::{
    Argument, LaunchResult, MatrixOperand, expect_dtype, expect_elements, expect_shape,
    row_and_column_counts, to_u32,
};
use super::site::{InstrSite, Launch, Launches};
use crate::kernel_source::KernelFamily;

/// Heads as rows.
fn rows_of(heads: QkHeads, tensor: MatrixOperand) -> LaunchResult<MatrixOperand> {
    let count = tensor.columns.checked_div(heads.head_dim).unwrap_or(0);
    let is_whole = count * heads.head_dim == tensor.columns && tensor.stride == tensor.columns;
    if !is_whole || heads.queries + heads.keys > count {
        return Err(format!("{} features are no whole heads", tensor.columns));
    }
    let (rows, columns) = (tensor.rows * count, heads.head_dim);
    Ok(MatrixOperand { rows, columns, stride: columns, ..tensor })
}

/// Sizes of the rows, heads of a token, and the first heads that are queries, and queries or keys.
fn sizes(heads: QkHeads, x: &MatrixOperand) -> LaunchResult<Vec<Argument>> {
    let mut arguments = row_and_column_counts(&rows_of(heads, *x)?)?.to_vec();
    for count in [x.columns / heads.head_dim, heads.queries, heads.queries + heads.keys] {
        arguments.push(Argument::U32(to_u32(count)?));
    }
    Ok(arguments)
}

fn vector_format(heads: QkHeads, operands: &[MatrixOperand]) -> LaunchResult<VectorFormat> {
    let mut format = VectorFormat::common(operands[0].dtype, operands)?;
    format.require(heads.head_dim.is_multiple_of(format.vector));
    Ok(format)
}

fn epsilon(site: &InstrSite) -> Argument {
    Argument::F32(site.device.constants.norm_epsilon as f32)
}

pub(super) fn forward(site: &InstrSite, heads: QkHeads) -> LaunchResult<Launches> {
    let (x, scales, y) = (site.input(0)?, site.input(1)?.flat(), site.output(0)?);
    expect_dtype(x.dtype, &[&scales, &y])?;
    expect_shape((x.rows, x.columns), &[&y])?;
    expect_elements(heads.scale_count(), &[&scales])?;
    let rows = rows_of(heads, x)?;
    let mut arguments = vec![x.read(), scales.read(), y.write()];
    arguments.extend(sizes(heads, &x)?);
    arguments.push(epsilon(site));
    let format = vector_format(heads, &[rows, scales, rows_of(heads, y)?])?;
    let launch = Launch::new(KernelFamily::Norm, format.kernel_name("qk_norm"), arguments);
    Ok(launch.over_rows(rows.rows, rows.columns, format)?.into())
}

pub(super) fn backward(site: &InstrSite, heads: QkHeads) -> LaunchResult<Launches> {
    if site.scheduled.instr.reads.len() > 4 {
        return Err("adds to a gradient that nothing else contributes to".to_string());
    }
    let (dy, x, scales) = (site.input(0)?, site.input(1)?, site.input(2)?.flat());
    let (dx, dscales) = (site.output(0)?, site.output(1)?);
    expect_dtype(x.dtype, &[&dy, &scales, &dx])?;
    expect_shape((x.rows, x.columns), &[&dy, &dx])?;
    expect_elements(heads.scale_count(), &[&scales])?;
    let rows = rows_of(heads, x)?;
    let parts = PartialSumGrid::over_rows(site.device, rows.rows, heads.scale_count());
    let mut arguments =
        vec![dy.read(), x.read(), scales.read(), dx.write(), parts.scratch().write()];
    arguments.extend(sizes(heads, &x)?);
    arguments.push(Argument::U32(to_u32(heads.scale_count())?));
    arguments.push(epsilon(site));
    let format = vector_format(heads, &[rows, rows_of(heads, dy)?, scales, rows_of(heads, dx)?])?;
    let launch = Launch::new(KernelFamily::Norm, format.kernel_name("qk_norm_backward"), arguments);
    parts.then_reduce(parts.several_rows_per_part(launch, rows.columns, format)?, dscales)
}
