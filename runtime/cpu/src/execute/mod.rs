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

use super::device::{Device, Stop};
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

/// Runs with at least so many numbers of the device's scratch memory.
fn with_scratch(
    device: &mut Device,
    needed: usize,
    work: impl FnOnce(&mut Device, &mut [f32]) -> Result<(), Stop>,
) -> Result<(), Stop> {
    let mut scratch = std::mem::take(device.scratch);
    if scratch.len() < needed {
        scratch.resize(needed, 0.0);
    }
    let done = work(device, &mut scratch);
    *device.scratch = scratch;
    done
}
