//! Operands as matrices, and scratch memory.

use narrows_plan::program::Extent;

use crate::abort::StopReason;
use crate::device::CpuDevice;
use crate::kernels::{MatrixView, MatrixViewMut, WriteMode};

/// A read operand as a matrix of its extent.
pub(crate) fn view(elements: &[f32], extent: Extent) -> MatrixView<'_> {
    MatrixView::new(elements, extent.rows as usize, extent.columns as usize)
}

/// A written operand as a matrix of its extent.
pub(crate) fn view_mut(elements: &mut [f32], extent: Extent) -> MatrixViewMut<'_> {
    MatrixViewMut::new(elements, extent.rows as usize, extent.columns as usize)
}

/// Mode in which a result is written that is added to its target if `accumulate`.
pub(crate) fn write_mode(accumulate: bool) -> WriteMode {
    if accumulate { WriteMode::Add } else { WriteMode::Replace }
}

/// Calls `run` with scratch memory of at least `elements` elements.
pub(crate) fn with_scratch(
    device: &mut CpuDevice,
    elements: usize,
    run: impl FnOnce(&mut CpuDevice, &mut [f32]) -> Result<(), StopReason>,
) -> Result<(), StopReason> {
    let mut scratch = std::mem::take(device.scratch);
    if scratch.len() < elements {
        scratch.resize(elements, 0.0);
    }
    let result = run(device, &mut scratch);
    *device.scratch = scratch;
    result
}
