//! Views of row-major matrices, and the one product of two of them.
//!
//! A view has rows, columns and a stride: it may be a range of columns of a wider matrix. Mutable
//! views of different columns of one matrix lie interleaved in memory, and different threads write
//! to them; no two slices can say that. So a mutable view holds a pointer, made from one exclusive
//! slice and only ever split into views without a common element. This file and nothing else of the
//! kernels is unsafe: those views, and the call of [`gemm`](mod@gemm), which takes pointers.

#![allow(unsafe_code)]

use std::marker::PhantomData;

/// How a kernel writes its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteMode {
    /// Overwrites the target, whose elements may be anything.
    Replace,
    /// Adds to the elements of the target.
    Add,
}

/// `[rows, columns]` of f32, rows `stride` numbers apart.
#[derive(Clone, Copy, Debug)]
pub struct MatrixView<'a> {
    data: &'a [f32],
    rows: usize,
    columns: usize,
    stride: usize,
}

/// The numbers that a view covers, from its first to its last.
fn extent(rows: usize, columns: usize, stride: usize) -> usize {
    assert!(rows <= 1 || columns <= stride, "rows of {columns} overlap at a stride of {stride}");
    if rows == 0 { 0 } else { (rows - 1).checked_mul(stride).expect("fits memory") + columns }
}

impl<'a> MatrixView<'a> {
    /// All of `data` that `[rows, columns]` takes, row after row.
    pub fn new(data: &'a [f32], rows: usize, columns: usize) -> Self {
        MatrixView::strided(data, rows, columns, columns)
    }

    /// Rows that begin `stride` apart.
    pub fn strided(data: &'a [f32], rows: usize, columns: usize, stride: usize) -> Self {
        MatrixView { data: &data[..extent(rows, columns, stride)], rows, columns, stride }
    }

    /// How many rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// How many columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// One row.
    #[inline(always)]
    pub fn row(&self, row: usize) -> &'a [f32] {
        &self.data[row * self.stride..][..self.columns]
    }

    /// The rows from `first`, `count` of them.
    pub fn row_range(self, first: usize, count: usize) -> Self {
        assert!(first + count <= self.rows, "{first} + {count} of {} rows", self.rows);
        let data = if count == 0 { &[] } else { &self.data[first * self.stride..] };
        MatrixView::strided(data, count, self.columns, self.stride)
    }

    /// The columns from `first`, `count` of them.
    pub fn column_range(self, first: usize, count: usize) -> Self {
        assert!(first + count <= self.columns, "{first} + {count} of {} columns", self.columns);
        let data = if self.rows == 0 { &[] } else { &self.data[first..] };
        MatrixView { data: &data[..extent(self.rows, count, self.stride)], columns: count, ..self }
    }

    /// Seen as its transpose by [`multiply`].
    pub fn transposed(self) -> StridedMatrix<'a> {
        StridedMatrix { view: self, transposed: true }
    }
}

/// A mutable [`MatrixView`].
#[derive(Debug)]
pub struct MatrixViewMut<'a> {
    data: *mut f32,
    rows: usize,
    columns: usize,
    stride: usize,
    exclusive: PhantomData<&'a mut [f32]>,
}

// SAFETY: a view is the only access to its elements, like a mutable slice.
unsafe impl Send for MatrixViewMut<'_> {}
// SAFETY: through a shared reference it can only be read.
unsafe impl Sync for MatrixViewMut<'_> {}

impl<'a> MatrixViewMut<'a> {
    /// All of `data` that `[rows, columns]` takes, row after row.
    pub fn new(data: &'a mut [f32], rows: usize, columns: usize) -> Self {
        MatrixViewMut::strided(data, rows, columns, columns)
    }

    /// Rows that begin `stride` apart.
    pub fn strided(data: &'a mut [f32], rows: usize, columns: usize, stride: usize) -> Self {
        let data = data[..extent(rows, columns, stride)].as_mut_ptr();
        MatrixViewMut { data, rows, columns, stride, exclusive: PhantomData }
    }

    /// How many rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// How many columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    fn start(&self, row: usize) -> *mut f32 {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: the row is one of the view's, so its first element is inside the extent.
        unsafe { self.data.add(row * self.stride) }
    }

    /// One row.
    #[inline(always)]
    pub fn row(&self, row: usize) -> &[f32] {
        // SAFETY: `columns` elements of a row are the view's own; `&self` keeps writers away.
        unsafe { std::slice::from_raw_parts(self.start(row), self.columns) }
    }

    /// One row, to write.
    #[inline(always)]
    pub fn row_mut(&mut self, row: usize) -> &mut [f32] {
        // SAFETY: `columns` elements of a row are the view's own; `&mut self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start(row), self.columns) }
    }

    /// The same view for a shorter time.
    pub fn reborrow(&mut self) -> MatrixViewMut<'_> {
        MatrixViewMut { exclusive: PhantomData, ..*self }
    }

    /// The first `row` rows, and the others.
    pub fn split_rows(self, row: usize) -> (Self, Self) {
        assert!(row <= self.rows, "row {row} of {}", self.rows);
        let rest = if row == self.rows { self.data } else { self.start(row) };
        let below = MatrixViewMut { data: rest, rows: self.rows - row, ..self };
        (MatrixViewMut { rows: row, ..self }, below)
    }

    /// The first `column` columns, and the others.
    pub fn split_columns(self, column: usize) -> (Self, Self) {
        assert!(column <= self.columns, "column {column} of {}", self.columns);
        let skip = if self.rows == 0 { 0 } else { column };
        // SAFETY: at most one past the first row's end, so inside the slice or at its end.
        let data = unsafe { self.data.add(skip) };
        let right = MatrixViewMut { data, columns: self.columns - column, ..self };
        (MatrixViewMut { columns: column, ..self }, right)
    }

    /// The rows from `first`, `count` of them.
    pub fn row_range(self, first: usize, count: usize) -> Self {
        self.split_rows(first).1.split_rows(count).0
    }

    /// The columns from `first`, `count` of them.
    pub fn column_range(self, first: usize, count: usize) -> Self {
        self.split_columns(first).1.split_columns(count).0
    }
}

/// A view as it is, or seen as its transpose.
#[derive(Clone, Copy, Debug)]
pub struct StridedMatrix<'a> {
    view: MatrixView<'a>,
    transposed: bool,
}

impl<'a> From<MatrixView<'a>> for StridedMatrix<'a> {
    fn from(view: MatrixView<'a>) -> Self {
        StridedMatrix { view, transposed: false }
    }
}

impl<'a> StridedMatrix<'a> {
    /// The rows of the matrix that is meant.
    pub fn rows(&self) -> usize {
        if self.transposed { self.view.columns } else { self.view.rows }
    }

    /// The columns of the matrix that is meant.
    pub fn columns(&self) -> usize {
        if self.transposed { self.view.rows } else { self.view.columns }
    }

    /// Its transpose.
    pub fn transposed(self) -> Self {
        StridedMatrix { transposed: !self.transposed, ..self }
    }

    /// The rows from `first`, `count` of them.
    pub fn row_range(self, first: usize, count: usize) -> Self {
        let view = match self.transposed {
            true => self.view.column_range(first, count),
            false => self.view.row_range(first, count),
        };
        StridedMatrix { view, ..self }
    }

    /// The columns from `first`, `count` of them.
    pub fn column_range(self, first: usize, count: usize) -> Self {
        self.transposed().row_range(first, count).transposed()
    }

    fn strides(&self) -> (isize, isize) {
        let stride = isize::try_from(self.view.stride).expect("fits memory");
        if self.transposed { (1, stride) } else { (stride, 1) }
    }
}

/// `C[m,n] (+)= factor · A[m,k] · B[k,n]`, on the calling thread.
pub fn matmul(
    a: StridedMatrix<'_>,
    b: StridedMatrix<'_>,
    c: MatrixViewMut<'_>,
    factor: f32,
    write: WriteMode,
) {
    let (m, k, n) = (a.rows(), a.columns(), b.columns());
    assert_eq!(k, b.rows(), "[{m}, {k}] times [{}, {n}]", b.rows());
    assert_eq!((m, n), (c.rows, c.columns), "[{m}, {k}] times [{k}, {n}]");
    let (a_rows, a_columns) = a.strides();
    let (b_rows, b_columns) = b.strides();
    let c_rows = isize::try_from(c.stride).expect("fits memory");
    // SAFETY: a view of r rows and c columns covers exactly the addresses i·stride + j with i < r
    // and j < c, all inside the slice it was made from. The sizes are those of the views, and C is
    // exclusive, so it overlaps neither A nor B.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            c.data,
            1,
            c_rows,
            write == WriteMode::Add,
            a.view.data.as_ptr(),
            a_columns,
            a_rows,
            b.view.data.as_ptr(),
            b_columns,
            b_rows,
            1.0,
            factor,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_view_are_those_of_the_matrix() {
        let data: Vec<f32> = (0..20).map(|i| i as f32).collect();
        let whole = MatrixView::new(&data, 4, 5);
        let part = whole.row_range(1, 2).column_range(3, 2);
        assert_eq!((part.row(0), part.row(1)), (&[8.0, 9.0][..], &[13.0, 14.0][..]));
        let last = whole.column_range(5, 0).row_range(4, 0);
        assert_eq!((last.rows(), last.columns()), (0, 0));
    }

    #[test]
    fn mutable_parts_do_not_touch_each_other() {
        let mut data = vec![0.0; 20];
        let (left, right) = MatrixViewMut::new(&mut data, 4, 5).split_columns(2);
        let (mut top, mut bottom) = right.split_rows(3);
        let mut left = left.row_range(1, 1);
        left.row_mut(0).fill(1.0);
        top.row_mut(2).fill(2.0);
        bottom.row_mut(0).fill(3.0);
        let wanted = [
            [0.0; 5],
            [1.0, 1.0, 0.0, 0.0, 0.0],
            [0.0, 0.0, 2.0, 2.0, 2.0],
            [0.0, 0.0, 3.0, 3.0, 3.0],
        ];
        assert_eq!(data, wanted.concat());
    }

    #[test]
    #[should_panic(expected = "row 2 of 2")]
    fn a_row_past_the_end_is_refused() {
        let mut data = vec![0.0; 10];
        MatrixViewMut::new(&mut data, 4, 2).row_range(0, 2).row_mut(2).fill(1.0);
    }

    #[test]
    #[should_panic(expected = "overlap")]
    fn overlapping_rows_are_refused() {
        MatrixViewMut::strided(&mut [0.0; 10], 2, 3, 2);
    }

    #[test]
    fn empty_views_of_empty_slices() {
        let (a, b) = MatrixViewMut::new(&mut [], 0, 7).split_columns(3);
        assert_eq!((a.split_rows(0).1.rows(), b.columns()), (0, 4));
        assert_eq!(MatrixView::new(&[], 0, 7).column_range(7, 0).columns(), 0);
    }
}
