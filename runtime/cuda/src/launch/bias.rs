//! Biases, added to every row, and their gradients.

use narrows_plan::DType;

use super::grid::{PartialSumGrid, VectorFormat};
use super::operand::{
    LaunchResult, expect_dtype, expect_elements, expect_shape, row_and_column_counts,
};
use super::site::{InstrSite, Launch, Launches};
use crate::kernel_source::KernelFamily;

pub(super) fn forward(site: &InstrSite) -> LaunchResult<Launches> {
    let (x, bias, y) = (site.input(0)?, site.input(1)?.flat(), site.output(0)?);
    expect_dtype(x.dtype, &[&bias, &y])?;
    expect_shape((x.rows, x.columns), &[&y])?;
    expect_elements(x.columns, &[&bias])?;
    let mut arguments = vec![x.read(), bias.read(), y.write()];
    arguments.extend(row_and_column_counts(&x)?);
    let format = VectorFormat::common(x.dtype, &[x, bias, y])?;
    let launch = Launch::new(KernelFamily::Elementwise, format.kernel_name("bias"), arguments);
    Ok(launch.over_rows(x.rows, x.columns, format)?.into())
}

pub(super) fn backward(site: &InstrSite) -> LaunchResult<Launches> {
    let (dy, db) = (site.input(0)?, site.output(0)?);
    expect_dtype(DType::F32, &[&db])?;
    expect_elements(dy.columns, &[&db.flat()])?;
    let parts = PartialSumGrid::over_rows(site.device, dy.rows, dy.columns);
    let mut arguments = vec![dy.read(), parts.scratch().write()];
    arguments.extend(row_and_column_counts(&dy)?);
    let format = VectorFormat::common(dy.dtype, &[dy])?;
    let launch =
        Launch::new(KernelFamily::Elementwise, format.kernel_name("bias_backward"), arguments);
    parts.then_reduce(parts.one_block_per_part(launch, dy.columns, format)?, db)
}
