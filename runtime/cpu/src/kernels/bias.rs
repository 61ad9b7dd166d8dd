//! Biases: the fused ops `Bias` and `BiasBackward`.

use super::matrix::{MatrixView, MatrixViewMut};
use super::parallel::{Parallel, SharedOperand, TaskPartialSums, reduce_partial_sums};
use super::simd::{Simd, SimdBody};

/// y = x + b in every row, for x and y `[tokens, d]` and b `[d]`.
pub fn bias_forward(x: MatrixView<'_>, bias: &[f32], y: MatrixViewMut<'_>, parallel: Parallel) {
    assert!(x.rows() == y.rows() && x.columns() == y.columns() && bias.len() == x.columns());
    parallel.for_rows::<BiasRows, _>(x.rows(), (x, SharedOperand(bias), y));
}

struct BiasRows;

impl SimdBody<(MatrixView<'_>, SharedOperand<&[f32]>, MatrixViewMut<'_>)> for BiasRows {
    #[inline(always)]
    fn run<S: Simd>(
        (x, SharedOperand(bias), mut y): (MatrixView<'_>, SharedOperand<&[f32]>, MatrixViewMut<'_>),
    ) {
        for row in 0..x.rows() {
            for ((y, x), bias) in y.row_mut(row).iter_mut().zip(x.row(row)).zip(bias) {
                *y = x + bias;
            }
        }
    }
}

/// Adds the sum of the rows of dy to db. `scratch` has [`Parallel::reduction_scratch_elements`] of d.
pub fn bias_backward(dy: MatrixView<'_>, db: &mut [f32], scratch: &mut [f32], parallel: Parallel) {
    assert_eq!(db.len(), dy.columns());
    let sums = TaskPartialSums::new(db, scratch, parallel);
    let tasks = parallel.for_rows::<RowSums, _>(dy.rows(), (dy, sums));
    reduce_partial_sums(db, scratch, tasks);
}

struct RowSums;

impl SimdBody<(MatrixView<'_>, TaskPartialSums<'_>)> for RowSums {
    #[inline(always)]
    fn run<S: Simd>((dy, TaskPartialSums { sums, .. }): (MatrixView<'_>, TaskPartialSums<'_>)) {
        for row in 0..dy.rows() {
            for (sum, dy) in sums.iter_mut().zip(dy.row(row)) {
                *sum += dy;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{assert_close, random};

    #[test]
    fn biases_are_added_to_rows_and_get_the_sums_of_columns() {
        let (rows, width) = (700, 37);
        let (x, bias) = (random(1, rows * width), random(2, width));
        for threads in [1, 3] {
            let parallel = Parallel::new(threads);
            let (mut y, mut db) = (vec![f32::NAN; x.len()], bias.clone());
            let output = MatrixViewMut::new(&mut y, rows, width);
            bias_forward(MatrixView::new(&x, rows, width), &bias, output, parallel);
            let mut scratch = vec![f32::NAN; parallel.reduction_scratch_elements(width)];
            bias_backward(MatrixView::new(&x, rows, width), &mut db, &mut scratch, parallel);
            let column = |column: usize| (0..rows).map(move |row| row * width + column);
            for (at, bias) in bias.iter().enumerate() {
                assert!(column(at).all(|element| y[element] == x[element] + bias));
            }
            let sums = (0..width).map(|at| {
                column(at).map(|element| f64::from(x[element])).sum::<f64>() + f64::from(bias[at])
            });
            assert_close(&db, &sums.collect::<Vec<_>>(), 1e-6);
        }
    }
}
