//! RMSNorm of every head of queries and keys: the fused ops `QkNorm` and `QkNormBackward`.
//!
//! A row holds heads side by side: those of queries, those of keys, and others, which are copied. A head x of d features
//! becomes y = γ⊙ρ·x with ρ = (Σx²/d + ε)^-½, with one γ for all queries and one for all keys. Backward recomputes ρ:
//! with t = Σ dy⊙γ⊙x over the head, dx = ρ·γ⊙dy − (ρ³·t/d)·x and dγ += Σ ρ·dy⊙x over its tokens and heads.
//!
//! Shapes: x, y and their gradients `[tokens, heads · d]`, the scales `[d]` or `[2 · d]`.

use std::ops::Range;

use super::matrix::{MatrixView, MatrixViewMut, assert_equal_sizes};
use super::parallel::{Parallel, SharedOperand, TaskPartialSums, reduce_partial_sums};
use super::rms_norm::{RmsNorm, backward_row, scale_row};
use super::simd::{Simd, SimdBody, dot3, sum_squares};

/// Heads of a row, and their scales.
#[derive(Clone, Copy, Debug)]
pub struct QkNorm<'a> {
    /// Features of a head, and ε.
    pub head: RmsNorm,
    /// Number of heads of queries.
    pub queries: usize,
    /// Number of heads of keys.
    pub keys: usize,
    /// γ of queries, where there are any, and γ of keys, where there are any.
    pub scales: &'a [f32],
}

impl QkNorm<'_> {
    /// Number of scales.
    fn scale_count(self) -> usize {
        (usize::from(self.queries > 0) + usize::from(self.keys > 0)) * self.head.width
    }

    /// Range of the scales of a head; `None` for heads that are copied.
    #[inline(always)]
    fn scale_range(self, head: usize) -> Option<Range<usize>> {
        let width = self.head.width;
        let is_key = head >= self.queries;
        let first = if is_key && self.queries > 0 { width } else { 0 };
        (head < self.queries + self.keys).then_some(first..first + width)
    }
}

/// y with the heads of x normed.
pub fn qk_norm_forward(
    x: MatrixView<'_>,
    norm: QkNorm<'_>,
    y: MatrixViewMut<'_>,
    parallel: Parallel,
) {
    assert_equal_sizes(&[x.rows(), y.rows()], &[x.columns(), y.columns()]);
    assert_eq!(norm.scales.len(), norm.scale_count());
    parallel.for_rows::<QkNormRows, _>(x.rows(), (x, y, SharedOperand(norm)));
}

struct QkNormRows;

impl SimdBody<(MatrixView<'_>, MatrixViewMut<'_>, SharedOperand<QkNorm<'_>>)> for QkNormRows {
    #[inline(always)]
    fn run<S: Simd>(
        (x, mut y, SharedOperand(norm)): (
            MatrixView<'_>,
            MatrixViewMut<'_>,
            SharedOperand<QkNorm<'_>>,
        ),
    ) {
        let width = norm.head.width;
        for row in 0..x.rows() {
            let heads = x.row(row).chunks_exact(width).zip(y.row_mut(row).chunks_exact_mut(width));
            for (head, (x, y)) in heads.enumerate() {
                match norm.scale_range(head) {
                    Some(range) => {
                        let rho = norm.head.inverse_rms(sum_squares::<S>(x));
                        scale_row(x, &norm.scales[range], rho, y);
                    }
                    None => y.copy_from_slice(x),
                }
            }
        }
    }
}

/// Gradients of x, which are replaced, and of the scales, which are added to. `scratch` has
/// [`Parallel::reduction_scratch_elements`] of the scales.
pub fn qk_norm_backward(
    (dy, x): (MatrixView<'_>, MatrixView<'_>),
    norm: QkNorm<'_>,
    (dx, dscales): (MatrixViewMut<'_>, &mut [f32]),
    scratch: &mut [f32],
    parallel: Parallel,
) {
    let columns = [x.columns(), dy.columns(), dx.columns()];
    assert_equal_sizes(&[x.rows(), dy.rows(), dx.rows()], &columns);
    assert_equal_sizes(&[norm.scales.len(), norm.scale_count(), dscales.len()], &[]);
    let sums = TaskPartialSums::new(dscales, scratch, parallel);
    let operands = (dy, x, SharedOperand(norm), dx, sums);
    let tasks = parallel.for_rows::<QkNormBackwardRows, _>(x.rows(), operands);
    reduce_partial_sums(dscales, scratch, tasks);
}

type QkNormBackwardOperands<'a> = (
    MatrixView<'a>,
    MatrixView<'a>,
    SharedOperand<QkNorm<'a>>,
    MatrixViewMut<'a>,
    TaskPartialSums<'a>,
);

struct QkNormBackwardRows;

impl SimdBody<QkNormBackwardOperands<'_>> for QkNormBackwardRows {
    #[inline(always)]
    fn run<S: Simd>((dy, x, SharedOperand(norm), mut dx, dscales): QkNormBackwardOperands<'_>) {
        let width = norm.head.width;
        for row in 0..x.rows() {
            let saved = dy.row(row).chunks_exact(width).zip(x.row(row).chunks_exact(width));
            let heads = dx.row_mut(row).chunks_exact_mut(width).zip(saved);
            for (head, (dx, (dy, x))) in heads.enumerate() {
                let Some(range) = norm.scale_range(head) else {
                    dx.copy_from_slice(dy);
                    continue;
                };
                let scale = &norm.scales[range.clone()];
                let rho = norm.head.inverse_rms(sum_squares::<S>(x));
                let x_factor = -rho * rho * rho * dot3(dy, x, scale) / width as f32;
                let dscale = &mut dscales.sums[range];
                backward_row::<false>((dy, x, scale), (rho, x_factor), dx, dscale);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{assert_close, finite_difference, random, widen};

    const WIDTH: usize = 6;

    /// In f64, the sum of all elements of y times `weights`.
    fn weighted_sum(x: &[f64], scales: &[f64], heads: [usize; 3], weights: &[f64]) -> f64 {
        let [queries, keys, others] = heads;
        let count = queries + keys + others;
        let head = |(at, x): (usize, &[f64])| {
            let mean_square = x.iter().map(|x| x * x).sum::<f64>() / WIDTH as f64;
            let (at, row_start) = (at % count, at * WIDTH);
            let first = if at >= queries && queries > 0 { WIDTH } else { 0 };
            (0..WIDTH)
                .map(|i| {
                    let factor = match at < queries + keys {
                        true => scales[first + i] / (mean_square + 1e-3).sqrt(),
                        false => 1.0,
                    };
                    factor * x[i] * weights[row_start + i]
                })
                .sum::<f64>()
        };
        x.chunks_exact(WIDTH).enumerate().map(head).sum()
    }

    #[test]
    fn gradients_are_derivatives_of_the_normed_heads() {
        let tokens = 130;
        for heads in [[2, 1, 1], [3, 0, 0], [0, 2, 2]] {
            let columns = heads.iter().sum::<usize>() * WIDTH;
            let scale_count = heads[..2].iter().filter(|count| **count > 0).count() * WIDTH;
            let (x, dy) = (random(1, tokens * columns), random(2, tokens * columns));
            let (scales, before) = (random(3, scale_count), random(4, scale_count));
            let head = RmsNorm { width: WIDTH, epsilon: 1e-3 };
            let norm = QkNorm { head, queries: heads[0], keys: heads[1], scales: &scales };
            let view = |elements| MatrixView::new(elements, tokens, columns);
            let (wide_x, wide_dy, wide_scales) = (widen(&x), widen(&dy), widen(&scales));
            for parallel in [Parallel::SERIAL, Parallel::new(3)] {
                let mut y = vec![f32::NAN; x.len()];
                let output = MatrixViewMut::new(&mut y, tokens, columns);
                qk_norm_forward(view(&x), norm, output, parallel);
                let sum = widen(&y).iter().zip(&wide_dy).map(|(y, dy)| y * dy).sum::<f64>();
                let expected = weighted_sum(&wide_x, &wide_scales, heads, &wide_dy);
                assert!((sum - expected).abs() < 1e-4, "{sum} instead of {expected}");

                let (mut dx, mut dscales) = (vec![f32::NAN; x.len()], before.clone());
                let mut scratch = vec![f32::NAN; parallel.reduction_scratch_elements(scale_count)];
                let outputs = (MatrixViewMut::new(&mut dx, tokens, columns), &mut dscales[..]);
                qk_norm_backward((view(&dy), view(&x)), norm, outputs, &mut scratch, parallel);
                let of_scales = finite_difference(&wide_scales, |scales| {
                    weighted_sum(&wide_x, scales, heads, &wide_dy)
                });
                let of_scales = of_scales.iter().zip(&before).map(|(d, b)| d + f64::from(*b));
                assert_close(&dscales, &of_scales.collect::<Vec<_>>(), 1e-5);
                // Tokens do not depend on each other.
                let row = 77 * columns..78 * columns;
                let of_row = finite_difference(&wide_x[row.clone()], |x| {
                    weighted_sum(x, &wide_scales, heads, &wide_dy[row.clone()])
                });
                assert_close(&dx[row], &of_row, 1e-4);
            }
        }
    }
}
