//! RMSNorm without its statistics, which training keeps for the backward pass.

use crate::kernels::{MatrixView, MatrixViewMut, Parallel, RmsNorm, rms_norm_forward};

/// RMSNorm of the rows of x, which are as long as the scale.
pub(super) fn norm(x: &[f32], scale: &[f32], epsilon: f64, parallel: Parallel) -> Vec<f32> {
    let width = scale.len();
    let rows = x.len() / width;
    let (mut y, mut squares) = (vec![0.0; x.len()], vec![0.0; rows]);
    let rms = RmsNorm { width, epsilon: epsilon as f32 };
    let output = MatrixViewMut::new(&mut y, rows, width);
    let input = MatrixView::new(x, rows, width);
    rms_norm_forward(input, scale, rms, output, &mut squares, parallel);
    y
}
