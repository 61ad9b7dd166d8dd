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

use super::device::{CpuDevice, Stop};
use crate::kernels::{MatrixView, MatrixViewMut, WriteMode};

/// A read operand as a matrix of its extent.
fn view(numbers: &[f32], extent: Extent) -> MatrixView<'_> {
    MatrixView::new(numbers, extent.rows as usize, extent.columns as usize)
}

/// A written one.
fn view_mut(numbers: &mut [f32], extent: Extent) -> MatrixViewMut<'_> {
    MatrixViewMut::new(numbers, extent.rows as usize, extent.columns as usize)
}

/// Whether a result is added to what is there.
fn write(add: bool) -> WriteMode {
    if add { WriteMode::Add } else { WriteMode::Replace }
}

/// Runs with at least so many numbers of the device's scratch memory.
fn with_scratch(
    device: &mut CpuDevice,
    needed: usize,
    work: impl FnOnce(&mut CpuDevice, &mut [f32]) -> Result<(), Stop>,
) -> Result<(), Stop> {
    let mut scratch = std::mem::take(device.scratch);
    if scratch.len() < needed {
        scratch.resize(needed, 0.0);
    }
    let done = work(device, &mut scratch);
    *device.scratch = scratch;
    done
}
