//! The product of gate and up, which are two operands, or the two halves of one.

use narrows_plan::model::GatedProduct;

use super::norm::shape;
use super::operand::{MatrixOperand, small};
use super::shape::{AccessFormat, expect, expect_shape};
use super::{Argument, InstrSite, KernelFamily, Launch, LaunchResult, Launches};

/// Two operands, or the halves of the first.
fn both(
    first: MatrixOperand,
    second: Option<MatrixOperand>,
    width: u64,
) -> LaunchResult<[MatrixOperand; 2]> {
    match second {
        Some(second) => Ok([first, second]),
        None if first.columns != 2 * width => {
            Err(format!("{} features are no two halves of {width}", first.columns))
        }
        None => Ok([first.column_range(0, width)?, first.column_range(width, width)?]),
    }
}

fn launch(
    site: &InstrSite,
    of: &MatrixOperand,
    mut arguments: Vec<Argument>,
    apart: &[MatrixOperand],
    product: GatedProduct,
) -> LaunchResult<Launches> {
    let operands: Vec<&MatrixOperand> = apart.iter().collect();
    expect(of.dtype, &operands)?;
    expect_shape((of.rows, of.columns), &operands)?;
    for operand in apart {
        arguments.push(Argument::U32(small(operand.stride)?));
    }
    arguments.extend(shape(of)?);
    arguments.push(Argument::U32(u32::from(product == GatedProduct::SwiGlu)));
    let format = AccessFormat::of(of.dtype, &[&[*of], apart].concat())?;
    let launch = Launch::new(KernelFamily::Gated, format.name(site.op.describe().0), arguments);
    Ok(launch.over_rows(of.rows, of.columns, format)?.into())
}

pub(super) fn forward(site: &InstrSite, product: GatedProduct) -> LaunchResult<Launches> {
    let y = site.write(0)?;
    let pair = both(site.read(0)?, site.read(1).ok(), y.columns)?;
    let arguments = vec![pair[0].read(), pair[1].read(), y.write()];
    launch(site, &y, arguments, &pair, product)
}

pub(super) fn backward(site: &InstrSite, product: GatedProduct) -> LaunchResult<Launches> {
    let dy = site.read(0)?;
    let pair = both(site.read(1)?, site.read(2).ok(), dy.columns)?;
    let made = both(site.write(0)?, site.write(1).ok(), dy.columns)?;
    let arguments =
        vec![dy.read(), pair[0].read(), pair[1].read(), made[0].write(), made[1].write()];
    launch(site, &dy, arguments, &[pair, made].concat(), product)
}
