//! The three GEMMs of a linear: Y = X·W, dX = dY·Wᵀ, dW += Xᵀ·dY.
//!
//! A batch is several linears of equal shape whose operands are side by side in the columns: X is
//! `[tokens, d_in·batch]`, W is `[d_in, d_out·batch]`, Y is `[tokens, d_out·batch]`, and member j is
//! the j-th range of columns in each. Concatenated linears, which share X, are one GEMM.
//!
//! The weight of a tied head is stored `[vocabulary, hidden]`: pass `table.transposed()` as W, and
//! for its gradient call [`gemm_weight_gradient`] with X and dY exchanged.

use std::ops::Range;

use narrows_runtime::GemmDtype;

use super::gemm_mode::GemmMode;
use super::matrix::{MatrixView, MatrixViewMut, StridedMatrix, WriteMode, matmul};
use super::parallel::{ColumnRows, ParallelRows, SharedOperand};

/// Grain size: a GEMM with fewer multiplications runs on one thread.
const PARALLEL_MULTIPLICATIONS_MIN: usize = 1 << 18;

/// With fewer columns per thread the innermost loops of a GEMM are too short to be efficient.
const COLUMNS_PER_THREAD_MIN: usize = 64;

/// `y (+)= x · w`: `[tokens, d_in·batch]` by `[d_in, d_out·batch]`.
pub fn gemm_forward<'a>(
    x: MatrixView<'_>,
    w: impl Into<StridedMatrix<'a>>,
    y: MatrixViewMut<'_>,
    batch: usize,
    write: WriteMode,
    mode: impl Into<GemmMode>,
) {
    let mode = mode.into();
    let w = w.into();
    for_each_member(batch, x.columns(), w.columns(), y, |d_in, d_out, y| {
        let x = x.column_range(d_in.start, d_in.len());
        parallel_matmul(x.into(), columns(w, d_out), y, write, mode);
    });
}

/// `dx (+)= dy · wᵀ`: `[tokens, d_out·batch]` by the transpose of `[d_in, d_out·batch]`.
pub fn gemm_input_gradient<'a>(
    dy: MatrixView<'_>,
    w: impl Into<StridedMatrix<'a>>,
    dx: MatrixViewMut<'_>,
    batch: usize,
    write: WriteMode,
    mode: impl Into<GemmMode>,
) {
    let mode = mode.into();
    let w = w.into();
    for_each_member(batch, dy.columns(), dx.columns(), dx, |d_out, _, dx| {
        let dy = dy.column_range(d_out.start, d_out.len());
        parallel_matmul(dy.into(), columns(w, d_out).transposed(), dx, write, mode);
    });
}

/// `dw (+)= xᵀ · dy`: the transpose of `[tokens, d_in·batch]` by `[tokens, d_out·batch]`.
pub fn gemm_weight_gradient(
    x: MatrixView<'_>,
    dy: MatrixView<'_>,
    dw: MatrixViewMut<'_>,
    batch: usize,
    write: WriteMode,
    mode: impl Into<GemmMode>,
) {
    let mode = mode.into();
    for_each_member(batch, x.columns(), dw.columns(), dw, |d_in, d_out, dw| {
        let x = x.column_range(d_in.start, d_in.len()).transposed();
        let dy = dy.column_range(d_out.start, d_out.len());
        parallel_matmul(x, dy.into(), dw, write, mode);
    });
}

fn columns(w: StridedMatrix<'_>, columns: Range<usize>) -> StridedMatrix<'_> {
    w.column_range(columns.start, columns.len())
}

/// Calls `run` for every member of a batch with its columns of an operand of `left_columns` columns
/// and of one of `right_columns`, and with its part of the result.
fn for_each_member(
    batch: usize,
    left_columns: usize,
    right_columns: usize,
    mut result: MatrixViewMut<'_>,
    run: impl Fn(Range<usize>, Range<usize>, MatrixViewMut<'_>),
) {
    assert!(
        left_columns.is_multiple_of(batch)
            && right_columns.is_multiple_of(batch)
            && result.columns().is_multiple_of(batch)
    );
    let result_width = result.columns() / batch;
    let member_columns = |member: usize, width: usize| member * width..(member + 1) * width;
    for member in 0..batch {
        let left = member_columns(member, left_columns / batch);
        let right = member_columns(member, right_columns / batch);
        run(left, right, result.reborrow().column_range(member * result_width, result_width));
    }
}

/// GEMM whose threads divide the columns of the result; or its rows where it has few columns,
/// because threads that divide rows each pack all of B.
fn parallel_matmul(
    a: StridedMatrix<'_>,
    b: StridedMatrix<'_>,
    c: MatrixViewMut<'_>,
    write: WriteMode,
    GemmMode { parallel, dtype }: GemmMode,
) {
    let multiplications = a.rows() * a.columns() * b.columns();
    if parallel.threads() == 1 || multiplications < PARALLEL_MULTIPLICATIONS_MIN {
        return multiply(a, b, c, write, dtype);
    }
    let (rows, columns) = (c.rows(), c.columns());
    if columns < COLUMNS_PER_THREAD_MIN * parallel.threads() && rows > columns {
        let operands = (a, SharedOperand(b), c, SharedOperand((write, dtype)));
        parallel.for_expensive_rows(rows, operands, matmul_rows);
    } else {
        let operands =
            (SharedOperand(a), ColumnRows(b), ColumnRows(c), SharedOperand((write, dtype)));
        parallel.for_expensive_rows(columns, operands, matmul_columns);
    }
}

/// GEMM on the calling thread.
fn multiply(
    a: StridedMatrix<'_>,
    b: StridedMatrix<'_>,
    c: MatrixViewMut<'_>,
    write: WriteMode,
    dtype: GemmDtype,
) {
    match dtype {
        GemmDtype::F32 => matmul(a, b, c, 1.0, write),
        #[cfg(target_arch = "x86_64")]
        GemmDtype::Bf16 => super::bf16_matrix::matmul(a, b, c, write),
        #[cfg(not(target_arch = "x86_64"))]
        GemmDtype::Bf16 => unreachable!("no session has GEMMs in bf16 on this processor"),
    }
}

type RowOperands<'a> = (
    StridedMatrix<'a>,
    SharedOperand<StridedMatrix<'a>>,
    MatrixViewMut<'a>,
    SharedOperand<(WriteMode, GemmDtype)>,
);

fn matmul_rows((a, SharedOperand(b), c, SharedOperand((write, dtype))): RowOperands<'_>) {
    multiply(a, b, c, write, dtype);
}

type ColumnOperands<'a> = (
    SharedOperand<StridedMatrix<'a>>,
    ColumnRows<StridedMatrix<'a>>,
    ColumnRows<MatrixViewMut<'a>>,
    SharedOperand<(WriteMode, GemmDtype)>,
);

fn matmul_columns(
    (SharedOperand(a), ColumnRows(b), ColumnRows(c), SharedOperand((write, dtype))): ColumnOperands<
        '_,
    >,
) {
    multiply(a, b, c, write, dtype);
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
    use crate::kernels::Parallel;
    use crate::kernels::testing::{assert_close, assert_close_f32, random};

    /// A[m,k]·B[k,n] by definition in f64; `sizes` are m, n and k.
    fn reference(
        a: impl Fn(usize, usize) -> f32,
        b: impl Fn(usize, usize) -> f32,
        sizes: [usize; 3],
    ) -> Vec<f64> {
        let [m, n, k] = sizes;
        let element = |row: usize, column: usize| -> f64 {
            (0..k).map(|l| f64::from(a(row, l)) * f64::from(b(l, column))).sum()
        };
        (0..m * n).map(|i| element(i / n, i % n)).collect()
    }

    const SIZES: [[usize; 3]; 3] = [[1, 1, 1], [37, 19, 23], [130, 70, 64]];

    #[test]
    fn the_gemms_of_a_linear_are_the_definition() {
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
            let expected =
                reference(|i, l| x[i * d_in + l], |l, j| w[l * d_out + j], [rows, d_out, d_in]);
            gemm_forward(
                x_view,
                weight,
                MatrixViewMut::new(&mut y, rows, d_out),
                1,
                WriteMode::Replace,
                parallel,
            );
            assert_close(&y, &expected, 1e-5);
            gemm_forward(
                x_view,
                weight,
                MatrixViewMut::new(&mut y, rows, d_out),
                1,
                WriteMode::Add,
                parallel,
            );
            let twice: Vec<f64> = expected.iter().map(|x| 2.0 * x).collect();
            assert_close(&y, &twice, 1e-5);

            let mut dx = vec![f32::NAN; rows * d_in];
            let expected =
                reference(|i, l| dy[i * d_out + l], |l, j| w[j * d_out + l], [rows, d_in, d_out]);
            gemm_input_gradient(
                dy_view,
                weight,
                MatrixViewMut::new(&mut dx, rows, d_in),
                1,
                WriteMode::Replace,
                parallel,
            );
            assert_close(&dx, &expected, 1e-5);

            let mut dw = vec![f32::NAN; d_in * d_out];
            let expected =
                reference(|i, l| x[l * d_in + i], |l, j| dy[l * d_out + j], [d_in, d_out, rows]);
            gemm_weight_gradient(
                x_view,
                dy_view,
                MatrixViewMut::new(&mut dw, d_in, d_out),
                1,
                WriteMode::Replace,
                parallel,
            );
            assert_close(&dw, &expected, 1e-5);
        }
    }

    #[test]
    fn a_batched_gemm_equals_gemms_on_the_columns_of_its_members() {
        let (rows, d_in, d_out, batch) = (33, 10, 14, 3);
        let (x, w) = (random(1, rows * d_in * batch), random(2, d_in * d_out * batch));
        let dy = random(3, rows * d_out * batch);
        let x = MatrixView::new(&x, rows, d_in * batch);
        let dy = MatrixView::new(&dy, rows, d_out * batch);
        let w = MatrixView::new(&w, d_in, d_out * batch);
        let zeros = |count: usize| vec![0.0; count];
        let (mut y, mut dx, mut dw) =
            (zeros(rows * d_out * batch), zeros(rows * d_in * batch), zeros(d_in * d_out * batch));
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
        for member in 0..batch {
            let (x, w) =
                (x.column_range(member * d_in, d_in), w.column_range(member * d_out, d_out));
            let dy = dy.column_range(member * d_out, d_out);
            let y = MatrixViewMut::new(&mut y1, rows, d_out * batch)
                .column_range(member * d_out, d_out);
            gemm_forward(x, w, y, 1, add, serial);
            let dx =
                MatrixViewMut::new(&mut dx1, rows, d_in * batch).column_range(member * d_in, d_in);
            gemm_input_gradient(dy, w, dx, 1, add, serial);
            let dw = MatrixViewMut::new(&mut dw1, d_in, d_out * batch)
                .column_range(member * d_out, d_out);
            gemm_weight_gradient(x, dy, dw, 1, add, serial);
        }
        assert_eq!((y, dx, dw), (y1, dx1, dw1));
    }

    #[test]
    fn a_weight_stored_as_its_transpose_gives_the_same_gemms() {
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
        assert_close_f32(&tied.0, &plain.0, 1e-6);
        assert_close_f32(&tied.1, &plain.1, 1e-6);
        let transposed_back: Vec<f32> = (0..w.columns() * hidden)
            .map(|i| tied.2[i % vocabulary * hidden + i / vocabulary])
            .collect();
        assert_close_f32(&transposed_back, &plain.2, 1e-6);
    }
}
