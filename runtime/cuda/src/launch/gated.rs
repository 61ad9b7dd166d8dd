//! Gated product of gate and up, which are two operands or the halves of one.

use narrows_plan::model::GatedProduct;

use super::grid::VectorFormat;
use super::operand::{
    Argument, LaunchResult, MatrixOperand, expect_dtype, expect_shape, row_and_column_counts,
    to_u32,
};
use super::site::{InstrSite, Launch, Launches};
use crate::kernel_source::KernelFamily;

/// Gate and up, each `width` columns wide: two operands, or the halves of the first.
fn gate_and_up(
    first: MatrixOperand,
    second: Option<MatrixOperand>,
    width: u64,
) -> LaunchResult<[MatrixOperand; 2]> {
    match second {
        Some(second) => Ok([first, second]),
        None if first.columns != 2 * width => {
            Err(format!("{} features are not two halves of {width}", first.columns))
        }
        None => Ok([first.column_range(0, width)?, first.column_range(width, width)?]),
    }
}

/// A launch over the rows of `output` (y or dy); `strided` are the operands whose rows have strides.
fn launch(
    kernel: &str,
    output: &MatrixOperand,
    mut arguments: Vec<Argument>,
    strided: &[MatrixOperand],
    product: GatedProduct,
) -> LaunchResult<Launches> {
    let operands: Vec<&MatrixOperand> = strided.iter().collect();
    expect_dtype(output.dtype, &operands)?;
    expect_shape((output.rows, output.columns), &operands)?;
    for operand in strided {
        arguments.push(Argument::U32(to_u32(operand.stride)?));
    }
    arguments.extend(row_and_column_counts(output)?);
    // The number by which the kernels know φ.
    arguments.push(Argument::U32(match product {
        GatedProduct::Plain => 0,
        GatedProduct::SwiGlu => 1,
    }));
    let format = VectorFormat::common(output.dtype, &[&[*output], strided].concat())?;
    let launch = Launch::new(KernelFamily::Gated, format.kernel_name(kernel), arguments);
    Ok(launch.over_rows(output.rows, output.columns, format)?.into())
}

pub(super) fn forward(site: &InstrSite, product: GatedProduct) -> LaunchResult<Launches> {
    let y = site.output(0)?;
    let inputs = gate_and_up(site.input(0)?, site.input(1).ok(), y.columns)?;
    let arguments = vec![inputs[0].read(), inputs[1].read(), y.write()];
    launch("gated_product", &y, arguments, &inputs, product)
}

pub(super) fn backward(site: &InstrSite, product: GatedProduct) -> LaunchResult<Launches> {
    let dy = site.input(0)?;
    let inputs = gate_and_up(site.input(1)?, site.input(2).ok(), dy.columns)?;
    let gradients = gate_and_up(site.output(0)?, site.output(1).ok(), dy.columns)?;
    let arguments = vec![
        dy.read(),
        inputs[0].read(),
        inputs[1].read(),
        gradients[0].write(),
        gradients[1].write(),
    ];
    let strided = [inputs, gradients].concat();
    launch("gated_product_backward", &dy, arguments, &strided, product)
}
