//! The product of gate and up, which are two operands, or the two halves of one.

use narrows_plan::model::GatedProduct;

use super::norm::shape;
use super::operand::{Operand, small};
use super::shape::{Format, expect, expect_shape};
use super::{Argument, Family, Launch, Launches, Made, Site};

/// Two operands, or the halves of the first.
fn both(first: Operand, second: Option<Operand>, width: u64) -> Made<[Operand; 2]> {
    match second {
        Some(second) => Ok([first, second]),
        None if first.columns != 2 * width => {
            Err(format!("{} features are no two halves of {width}", first.columns))
        }
        None => Ok([first.column_range(0, width)?, first.column_range(width, width)?]),
    }
}

fn launch(
    site: &Site,
    of: &Operand,
    mut arguments: Vec<Argument>,
    apart: &[Operand],
    product: GatedProduct,
) -> Made<Launches> {
    let operands: Vec<&Operand> = apart.iter().collect();
    expect(of.dtype, &operands)?;
    expect_shape((of.rows, of.columns), &operands)?;
    for operand in apart {
        arguments.push(Argument::U32(small(operand.stride)?));
    }
    arguments.extend(shape(of)?);
    arguments.push(Argument::U32(u32::from(product == GatedProduct::SwiGlu)));
    let format = Format::of(of.dtype, &[&[*of], apart].concat())?;
    let launch = Launch::new(Family::Gated, format.name(site.op.describe().0), arguments);
    Ok(launch.over_rows(of.rows, of.columns, format)?.into())
}

pub(super) fn forward(site: &Site, product: GatedProduct) -> Made<Launches> {
    let y = site.write(0)?;
    let pair = both(site.read(0)?, site.read(1).ok(), y.columns)?;
    let arguments = vec![pair[0].read(), pair[1].read(), y.write()];
    launch(site, &y, arguments, &pair, product)
}

pub(super) fn backward(site: &Site, product: GatedProduct) -> Made<Launches> {
    let dy = site.read(0)?;
    let pair = both(site.read(1)?, site.read(2).ok(), dy.columns)?;
    let made = both(site.write(0)?, site.write(1).ok(), dy.columns)?;
    let arguments =
        vec![dy.read(), pair[0].read(), pair[1].read(), made[0].write(), made[1].write()];
    launch(site, &dy, arguments, &[pair, made].concat(), product)
}
