//! Views of row-major matrices, and the GEMM of two of them.
//!
//! A view has rows, columns and a stride, so it can be a range of columns of a wider matrix. Mutable
//! views of different columns of one matrix interleave in memory while different threads write to
//! them, which slices cannot express. A mutable view therefore holds a pointer, made from one
//! exclusive slice and only ever split into views without a common element.
//!
//! Unsafe code of the kernels is here and in `bf16_matrix`: those views, the call of [`gemm`](mod@gemm), which takes
//! pointers, and instructions that only some processors have.

#![allow(unsafe_code)]

use std::marker::PhantomData;

/// Mode in which a kernel writes its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteMode {
    /// Overwrites the target, whose elements may be anything.
    Replace,
    /// Adds to the elements of the target.
    Add,
}

/// A read-only row-major `[rows, columns]` matrix of f32; rows begin `stride` elements apart.
#[derive(Clone, Copy, Debug)]
pub struct MatrixView<'a> {
    data: &'a [f32],
    rows: usize,
    columns: usize,
    stride: usize,
}

/// Number of elements from the first to the last of a view, gaps between rows included.
fn covered_elements(rows: usize, columns: usize, stride: usize) -> usize {
    assert!(rows <= 1 || columns <= stride, "rows of {columns} overlap at a stride of {stride}");
    if rows == 0 { 0 } else { (rows - 1).checked_mul(stride).expect("fits in memory") + columns }
}

impl<'a> MatrixView<'a> {
    /// A contiguous `[rows, columns]` matrix at the beginning of `data`.
    pub fn new(data: &'a [f32], rows: usize, columns: usize) -> Self {
        MatrixView::strided(data, rows, columns, columns)
    }

    /// A `[rows, columns]` matrix whose rows begin `stride` elements apart in `data`.
    pub fn strided(data: &'a [f32], rows: usize, columns: usize, stride: usize) -> Self {
        MatrixView { data: &data[..covered_elements(rows, columns, stride)], rows, columns, stride }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// A row as a slice.
    #[inline(always)]
    pub fn row(&self, row: usize) -> &'a [f32] {
        &self.data[row * self.stride..][..self.columns]
    }

    /// The `count` rows from row `first`.
    pub fn row_range(self, first: usize, count: usize) -> Self {
        assert!(first + count <= self.rows, "{first} + {count} of {} rows", self.rows);
        let data = if count == 0 { &[] } else { &self.data[first * self.stride..] };
        MatrixView::strided(data, count, self.columns, self.stride)
    }

    /// The `count` columns from column `first`.
    pub fn column_range(self, first: usize, count: usize) -> Self {
        assert!(first + count <= self.columns, "{first} + {count} of {} columns", self.columns);
        let data = if self.rows == 0 { &[] } else { &self.data[first..] };
        let data = &data[..covered_elements(self.rows, count, self.stride)];
        MatrixView { data, columns: count, ..self }
    }

    /// The transpose, as an operand of a GEMM.
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
// SAFETY: a shared reference to a view only permits reads.
unsafe impl Sync for MatrixViewMut<'_> {}

impl<'a> MatrixViewMut<'a> {
    /// A contiguous `[rows, columns]` matrix at the beginning of `data`.
    pub fn new(data: &'a mut [f32], rows: usize, columns: usize) -> Self {
        MatrixViewMut::strided(data, rows, columns, columns)
    }

    /// A `[rows, columns]` matrix whose rows begin `stride` elements apart in `data`.
    pub fn strided(data: &'a mut [f32], rows: usize, columns: usize, stride: usize) -> Self {
        let data = data[..covered_elements(rows, columns, stride)].as_mut_ptr();
        MatrixViewMut { data, rows, columns, stride, exclusive: PhantomData }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    fn row_start(&self, row: usize) -> *mut f32 {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: the row is in the view, so its first element is among the covered elements.
        unsafe { self.data.add(row * self.stride) }
    }

    /// A row as a slice.
    #[inline(always)]
    pub fn row(&self, row: usize) -> &[f32] {
        // SAFETY: the `columns` elements of a row belong to the view; `&self` excludes writers.
        unsafe { std::slice::from_raw_parts(self.row_start(row), self.columns) }
    }

    /// A row as a mutable slice.
    #[inline(always)]
    pub fn row_mut(&mut self, row: usize) -> &mut [f32] {
        // SAFETY: the `columns` elements of a row belong to the view; `&mut self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.row_start(row), self.columns) }
    }

    /// The same view with a shorter lifetime.
    pub fn reborrow(&mut self) -> MatrixViewMut<'_> {
        MatrixViewMut { exclusive: PhantomData, ..*self }
    }

    /// The first `row` rows, and the remaining ones.
    pub fn split_rows(self, row: usize) -> (Self, Self) {
        assert!(row <= self.rows, "row {row} of {}", self.rows);
        let rest = if row == self.rows { self.data } else { self.row_start(row) };
        let below = MatrixViewMut { data: rest, rows: self.rows - row, ..self };
        (MatrixViewMut { rows: row, ..self }, below)
    }

    /// The first `column` columns, and the remaining ones.
    pub fn split_columns(self, column: usize) -> (Self, Self) {
        assert!(column <= self.columns, "column {column} of {}", self.columns);
        let skip = if self.rows == 0 { 0 } else { column };
        // SAFETY: at most one past the end of the first row, so inside the slice or at its end.
        let data = unsafe { self.data.add(skip) };
        let right = MatrixViewMut { data, columns: self.columns - column, ..self };
        (MatrixViewMut { columns: column, ..self }, right)
    }

    /// The `count` rows from row `first`.
    pub fn row_range(self, first: usize, count: usize) -> Self {
        self.split_rows(first).1.split_rows(count).0
    }

    /// The `count` columns from column `first`.
    pub fn column_range(self, first: usize, count: usize) -> Self {
        self.split_columns(first).1.split_columns(count).0
    }
}

/// A [`MatrixView`] or its transpose: the left or right operand of a GEMM.
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
    /// Number of rows, after the transposition if there is one.
    pub fn rows(&self) -> usize {
        if self.transposed { self.view.columns } else { self.view.rows }
    }

    /// Number of columns, after the transposition if there is one.
    pub fn columns(&self) -> usize {
        if self.transposed { self.view.rows } else { self.view.columns }
    }

    /// The transpose.
    pub fn transposed(self) -> Self {
        StridedMatrix { transposed: !self.transposed, ..self }
    }

    /// The `count` rows from row `first`.
    pub fn row_range(self, first: usize, count: usize) -> Self {
        let view = match self.transposed {
            true => self.view.column_range(first, count),
            false => self.view.row_range(first, count),
        };
        StridedMatrix { view, ..self }
    }

    /// The `count` columns from column `first`.
    pub fn column_range(self, first: usize, count: usize) -> Self {
        self.transposed().row_range(first, count).transposed()
    }

    /// The matrix as it is stored, and whether this one is its transpose.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn stored(&self) -> (MatrixView<'a>, bool) {
        (self.view, self.transposed)
    }

    /// Distances in elements between neighbouring rows and between neighbouring columns.
    fn strides(&self) -> (isize, isize) {
        let stride = isize::try_from(self.view.stride).expect("fits in memory");
        if self.transposed { (1, stride) } else { (stride, 1) }
    }
}

/// GEMM on the calling thread: `C[m,n] (+)= alpha · A[m,k] · B[k,n]`.
pub(crate) fn matmul(
    a: StridedMatrix<'_>,
    b: StridedMatrix<'_>,
    c: MatrixViewMut<'_>,
    alpha: f32,
    write: WriteMode,
) {
    let (m, k, n) = (a.rows(), a.columns(), b.columns());
    assert_eq!(k, b.rows(), "[{m}, {k}] times [{}, {n}]", b.rows());
    assert_eq!((m, n), (c.rows, c.columns), "[{m}, {k}] times [{k}, {n}]");
    let (a_row_stride, a_column_stride) = a.strides();
    let (b_row_stride, b_column_stride) = b.strides();
    let c_row_stride = isize::try_from(c.stride).expect("fits in memory");
    // SAFETY: a view of r rows and c columns covers exactly the addresses i·stride + j with i < r
    // and j < c, all inside the slice it was made from. The sizes passed are those of the views, and
    // C is exclusive, so it overlaps neither A nor B.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            c.data,
            1,
            c_row_stride,
            write == WriteMode::Add,
            a.view.data.as_ptr(),
            a_column_stride,
            a_row_stride,
            b.view.data.as_ptr(),
            b_column_stride,
            b_row_stride,
            1.0,
            alpha,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

/// Asserts that all operands have the same number of rows, and all the same number of columns.
#[track_caller]
pub(crate) fn assert_equal_sizes(rows: &[usize], columns: &[usize]) {
    let equal = |sizes: &[usize]| sizes.windows(2).all(|pair| pair[0] == pair[1]);
    assert!(equal(rows) && equal(columns), "rows {rows:?}, columns {columns:?}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_of_a_view_selects_the_same_elements_of_the_matrix() {
        let data: Vec<f32> = (0..20).map(|i| i as f32).collect();
        let whole = MatrixView::new(&data, 4, 5);
        let part = whole.row_range(1, 2).column_range(3, 2);
        assert_eq!((part.row(0), part.row(1)), (&[8.0, 9.0][..], &[13.0, 14.0][..]));
        let last = whole.column_range(5, 0).row_range(4, 0);
        assert_eq!((last.rows(), last.columns()), (0, 0));
    }

    #[test]
    fn split_mutable_views_are_disjoint() {
        let mut data = vec![0.0; 20];
        let (left, right) = MatrixViewMut::new(&mut data, 4, 5).split_columns(2);
        let (mut top, mut bottom) = right.split_rows(3);
        let mut left = left.row_range(1, 1);
        left.row_mut(0).fill(1.0);
        top.row_mut(2).fill(2.0);
        bottom.row_mut(0).fill(3.0);
        let expected = [
            [0.0; 5],
            [1.0, 1.0, 0.0, 0.0, 0.0],
            [0.0, 0.0, 2.0, 2.0, 2.0],
            [0.0, 0.0, 3.0, 3.0, 3.0],
        ];
        assert_eq!(data, expected.concat());
    }

    #[test]
    #[should_panic(expected = "row 2 of 2")]
    fn a_row_past_the_end_panics() {
        let mut data = vec![0.0; 10];
        MatrixViewMut::new(&mut data, 4, 2).row_range(0, 2).row_mut(2).fill(1.0);
    }

    #[test]
    #[should_panic(expected = "overlap")]
    fn overlapping_rows_panic() {
        MatrixViewMut::strided(&mut [0.0; 10], 2, 3, 2);
    }

    #[test]
    fn empty_slices_have_empty_views() {
        let (a, b) = MatrixViewMut::new(&mut [], 0, 7).split_columns(3);
        assert_eq!((a.split_rows(0).1.rows(), b.columns()), (0, 4));
        assert_eq!(MatrixView::new(&[], 0, 7).column_range(7, 0).columns(), 0);
    }
}
