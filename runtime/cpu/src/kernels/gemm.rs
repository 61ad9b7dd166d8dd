//! The three products of a linear: Y = X·W, dX = dY·Wᵀ, dW += Xᵀ·dY.
//!
//! A batch is several linears of equal shape whose operands lie side by side in the columns: X is
//! `[tokens, d_in·batch]`, W is `[d_in, d_out·batch]`, Y is `[tokens, d_out·batch]`, and member j
//! is the j-th range of columns in each. Concatenated linears, which share X, are one product.
//!
//! A tied head's weight is stored `[vocabulary, hidden]`: pass `table.transposed()` as W, and for
//! its gradient call [`weight_gradient`] with X and dY exchanged.

use super::matrix::{StridedMatrix, matmul};
use super::parallel::{ColumnRows, ParallelRows, SharedOperand};
use super::{MatrixView, MatrixViewMut, Parallel, WriteMode};

/// Below this many multiplications a product is not divided.
const WORK_MIN: usize = 1 << 18;

/// `y (+)= x · w`: `[tokens, d_in·batch]` by `[d_in, d_out·batch]`.
pub fn gemm_forward<'a>(
    x: MatrixView<'_>,
    w: impl Into<StridedMatrix<'a>>,
    y: MatrixViewMut<'_>,
    batch: usize,
    write: WriteMode,
    parallel: Parallel,
) {
    let w = w.into();
    each(batch, x.columns(), w.columns(), y, |first, last, y| {
        divided(x.column_range(first.0, first.1).into(), columns(w, last), y, write, parallel);
    });
}

/// `dx (+)= dy · wᵀ`: `[tokens, d_out·batch]` by the transpose of `[d_in, d_out·batch]`.
pub fn gemm_input_gradient<'a>(
    dy: MatrixView<'_>,
    w: impl Into<StridedMatrix<'a>>,
    dx: MatrixViewMut<'_>,
    batch: usize,
    write: WriteMode,
    parallel: Parallel,
) {
    let w = w.into();
    each(batch, dy.columns(), dx.columns(), dx, |inner, _, dx| {
        let w = columns(w, inner).transposed();
        divided(dy.column_range(inner.0, inner.1).into(), w, dx, write, parallel);
    });
}

/// `dw (+)= xᵀ · dy`: the transpose of `[tokens, d_in·batch]` by `[tokens, d_out·batch]`.
pub fn gemm_weight_gradient(
    x: MatrixView<'_>,
    dy: MatrixView<'_>,
    dw: MatrixViewMut<'_>,
    batch: usize,
    write: WriteMode,
    parallel: Parallel,
) {
    each(batch, x.columns(), dw.columns(), dw, |rows, of, dw| {
        let x = x.column_range(rows.0, rows.1).transposed();
        divided(x, dy.column_range(of.0, of.1).into(), dw, write, parallel);
    });
}

fn columns(w: StridedMatrix<'_>, (first, count): (usize, usize)) -> StridedMatrix<'_> {
    w.column_range(first, count)
}

/// Calls `member` with the columns (first, count) of an operand of `left` columns and of one of
/// `right` columns, and the part of the result, for every member.
fn each(
    batch: usize,
    left: usize,
    right: usize,
    mut result: MatrixViewMut<'_>,
    member: impl Fn((usize, usize), (usize, usize), MatrixViewMut<'_>),
) {
    assert!(
        left.is_multiple_of(batch)
            && right.is_multiple_of(batch)
            && result.columns().is_multiple_of(batch)
    );
    let (left, right, width) = (left / batch, right / batch, result.columns() / batch);
    for at in 0..batch {
        let part = result.reborrow().column_range(at * width, width);
        member((at * left, left), (at * right, right), part);
    }
}

/// Below this many columns a thread the innermost loops of a product run short.
const COLUMNS_MIN: usize = 64;

/// A product, divided among threads along the columns of the result, or the rows where columns are
/// few: B is what gets packed, and threads that have rows pack all of it each.
fn divided(
    a: StridedMatrix<'_>,
    b: StridedMatrix<'_>,
    c: MatrixViewMut<'_>,
    write: WriteMode,
    parallel: Parallel,
) {
    let work = a.rows() * a.columns() * b.columns();
    if parallel.threads() == 1 || work < WORK_MIN {
        return matmul(a, b, c, 1.0, write);
    }
    if c.columns() < COLUMNS_MIN * parallel.threads() && c.rows() > c.columns() {
        parallel.for_expensive_rows(c.rows(), (a, SharedOperand(b), c, SharedOperand(write)), part);
    } else {
        let b = ColumnRows(b);
        parallel.for_expensive_rows(
            c.columns(),
            (SharedOperand(a), b, ColumnRows(c), SharedOperand(write)),
            column_part,
        );
    }
}

fn part(
    (a, SharedOperand(b), c, SharedOperand(write)): (
        StridedMatrix<'_>,
        SharedOperand<StridedMatrix<'_>>,
        MatrixViewMut<'_>,
        SharedOperand<WriteMode>,
    ),
) {
    matmul(a, b, c, 1.0, write);
}

type ColumnParts<'a> = (
    SharedOperand<StridedMatrix<'a>>,
    ColumnRows<StridedMatrix<'a>>,
    ColumnRows<MatrixViewMut<'a>>,
    SharedOperand<WriteMode>,
);

fn column_part(
    (SharedOperand(a), ColumnRows(b), ColumnRows(c), SharedOperand(write)): ColumnParts<'_>,
) {
    matmul(a, b, c, 1.0, write);
}

impl ParallelRows for StridedMatrix<'_> {
    fn elements(&self) -> usize {
        self.rows() * self.columns()
    }

    fn split(self, row: usize, _: usize) -> (Self, Self) {
        (self.row_range(0, row), self.row_range(row, self.rows() - row))
    }
}

impl ParallelRows for ColumnRows<StridedMatrix<'_>> {
    fn elements(&self) -> usize {
        self.0.elements()
    }

    fn split(self, row: usize, _: usize) -> (Self, Self) {
        let (left, right) = self.0.transposed().split(row, 1);
        (ColumnRows(left.transposed()), ColumnRows(right.transposed()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{assert_close, random};

    /// A[m,k]·B[k,n] by definition.
    fn naive(
        a: impl Fn(usize, usize) -> f32,
        b: impl Fn(usize, usize) -> f32,
        sizes: [usize; 3],
    ) -> Vec<f64> {
        let [m, n, k] = sizes;
        let at = |i: usize| (i / n, i % n);
        let entry = |(row, column): (usize, usize)| -> f64 {
            (0..k).map(|l| f64::from(a(row, l)) * f64::from(b(l, column))).sum()
        };
        (0..m * n).map(|i| entry(at(i))).collect()
    }

    const SIZES: [[usize; 3]; 3] = [[1, 1, 1], [37, 19, 23], [130, 70, 64]];

    #[test]
    fn three_products_of_one_linear() {
        for (threads, [rows, d_in, d_out]) in
            [1, 2, 3].into_iter().flat_map(|t| SIZES.map(|s| (t, s)))
        {
            let parallel = Parallel::new(threads);
            let (x, w) = (random(1, rows * d_in), random(2, d_in * d_out));
            let (y0, dy) = (random(3, rows * d_out), random(4, rows * d_out));
            let (x_view, dy_view) =
                (MatrixView::new(&x, rows, d_in), MatrixView::new(&dy, rows, d_out));
            let weight = MatrixView::new(&w, d_in, d_out);

            let mut y = y0.clone();
            let wanted =
                naive(|i, l| x[i * d_in + l], |l, j| w[l * d_out + j], [rows, d_out, d_in]);
            gemm_forward(
                x_view,
                weight,
                MatrixViewMut::new(&mut y, rows, d_out),
                1,
                WriteMode::Replace,
                parallel,
            );
            assert_close(&y, &wanted, 1e-5);
            gemm_forward(
                x_view,
                weight,
                MatrixViewMut::new(&mut y, rows, d_out),
                1,
                WriteMode::Add,
                parallel,
            );
            let twice: Vec<f64> = wanted.iter().map(|x| 2.0 * x).collect();
            assert_close(&y, &twice, 1e-5);

            let mut dx = vec![f32::NAN; rows * d_in];
            let wanted =
                naive(|i, l| dy[i * d_out + l], |l, j| w[j * d_out + l], [rows, d_in, d_out]);
            gemm_input_gradient(
                dy_view,
                weight,
                MatrixViewMut::new(&mut dx, rows, d_in),
                1,
                WriteMode::Replace,
                parallel,
            );
            assert_close(&dx, &wanted, 1e-5);

            let mut dw = vec![f32::NAN; d_in * d_out];
            let wanted =
                naive(|i, l| x[l * d_in + i], |l, j| dy[l * d_out + j], [d_in, d_out, rows]);
            gemm_weight_gradient(
                x_view,
                dy_view,
                MatrixViewMut::new(&mut dw, d_in, d_out),
                1,
                WriteMode::Replace,
                parallel,
            );
            assert_close(&dw, &wanted, 1e-5);
        }
    }

    /// A batch of three does what three products do on their own columns.
    #[test]
    fn batched() {
        let (rows, d_in, d_out, batch) = (33, 10, 14, 3);
        let (x, w) = (random(1, rows * d_in * batch), random(2, d_in * d_out * batch));
        let dy = random(3, rows * d_out * batch);
        let x = MatrixView::new(&x, rows, d_in * batch);
        let dy = MatrixView::new(&dy, rows, d_out * batch);
        let w = MatrixView::new(&w, d_in, d_out * batch);
        let made = |count: usize| vec![0.0; count];
        let (mut y, mut dx, mut dw) =
            (made(rows * d_out * batch), made(rows * d_in * batch), made(d_in * d_out * batch));
        let (mut y1, mut dx1, mut dw1) = (y.clone(), dx.clone(), dw.clone());
        let (serial, add) = (Parallel::SERIAL, WriteMode::Add);
        gemm_forward(x, w, MatrixViewMut::new(&mut y, rows, d_out * batch), batch, add, serial);
        gemm_input_gradient(
            dy,
            w,
            MatrixViewMut::new(&mut dx, rows, d_in * batch),
            batch,
            add,
            serial,
        );
        gemm_weight_gradient(
            x,
            dy,
            MatrixViewMut::new(&mut dw, d_in, d_out * batch),
            batch,
            add,
            serial,
        );
        for j in 0..batch {
            let (x, w) = (x.column_range(j * d_in, d_in), w.column_range(j * d_out, d_out));
            let dy = dy.column_range(j * d_out, d_out);
            let y = MatrixViewMut::new(&mut y1, rows, d_out * batch).column_range(j * d_out, d_out);
            gemm_forward(x, w, y, 1, add, serial);
            let dx = MatrixViewMut::new(&mut dx1, rows, d_in * batch).column_range(j * d_in, d_in);
            gemm_input_gradient(dy, w, dx, 1, add, serial);
            let dw =
                MatrixViewMut::new(&mut dw1, d_in, d_out * batch).column_range(j * d_out, d_out);
            gemm_weight_gradient(x, dy, dw, 1, add, serial);
        }
        assert_eq!((y, dx, dw), (y1, dx1, dw1));
    }

    /// A weight stored as its transpose gives the same products.
    #[test]
    fn tied() {
        let (rows, hidden, vocabulary) = (9, 16, 50);
        let (x, dy) = (random(1, rows * hidden), random(2, rows * vocabulary));
        let w = random(3, hidden * vocabulary);
        let stored: Vec<f32> =
            (0..w.len()).map(|i| w[i % hidden * vocabulary + i / hidden]).collect();
        let (x, dy) = (MatrixView::new(&x, rows, hidden), MatrixView::new(&dy, rows, vocabulary));
        let w = MatrixView::new(&w, hidden, vocabulary);
        let table = MatrixView::new(&stored, vocabulary, hidden);
        let parallel = Parallel::SERIAL;
        let run = |transposed: bool| {
            let mut y = vec![0.0; rows * vocabulary];
            let mut dx = vec![0.0; rows * hidden];
            let mut dw = vec![0.0; hidden * vocabulary];
            let w = if transposed { table.transposed() } else { w.into() };
            gemm_forward(
                x,
                w,
                MatrixViewMut::new(&mut y, rows, vocabulary),
                1,
                WriteMode::Replace,
                parallel,
            );
            gemm_input_gradient(
                dy,
                w,
                MatrixViewMut::new(&mut dx, rows, hidden),
                1,
                WriteMode::Replace,
                parallel,
            );
            if transposed {
                let dw = MatrixViewMut::new(&mut dw, vocabulary, hidden);
                gemm_weight_gradient(dy, x, dw, 1, WriteMode::Add, parallel);
            } else {
                let dw = MatrixViewMut::new(&mut dw, hidden, vocabulary);
                gemm_weight_gradient(x, dy, dw, 1, WriteMode::Add, parallel);
            }
            (y, dx, dw)
        };
        let (plain, tied) = (run(false), run(true));
        let widen = crate::kernels::testing::widen;
        assert_close(&tied.0, &widen(&plain.0), 1e-6);
        assert_close(&tied.1, &widen(&plain.1), 1e-6);
        let back: Vec<f32> = (0..w.columns() * hidden)
            .map(|i| tied.2[i % vocabulary * hidden + i / vocabulary])
            .collect();
        assert_close(&back, &widen(&plain.2), 1e-6);
    }
}
