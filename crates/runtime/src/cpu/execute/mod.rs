//! What each instruction computes: operands found in the arena, and a call of a kernel.

pub mod attention;
pub mod collective;
mod crossing;
mod ends;
mod latent;
mod norm;
pub mod pass;
pub mod product;
pub mod step;

use narrows_plan::program::Extent;

use super::kernels::{View, ViewMut, Write};

/// A read operand as a matrix of its extent.
fn view(numbers: &[f32], extent: Extent) -> View<'_> {
    View::new(numbers, extent.rows as usize, extent.columns as usize)
}

/// A written one.
fn view_mut(numbers: &mut [f32], extent: Extent) -> ViewMut<'_> {
    ViewMut::new(numbers, extent.rows as usize, extent.columns as usize)
}

/// Whether a result is added to what is there.
fn write(add: bool) -> Write {
    if add { Write::Add } else { Write::Replace }
}
