//! Row-major matrices, and the three GEMMs of a linear.

use std::ops::{Index, IndexMut, Range};

use super::Float;

/// A row-major matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix<T> {
    rows: usize,
    columns: usize,
    elements: Vec<T>,
}

impl<T: Float> Matrix<T> {
    /// A matrix of zeros.
    pub fn zeros(rows: usize, columns: usize) -> Self {
        Matrix { rows, columns, elements: vec![T::zero(); rows * columns] }
    }

    /// The matrix whose element at (row, column) is `element(row, column)`.
    pub fn from_fn(
        rows: usize,
        columns: usize,
        mut element: impl FnMut(usize, usize) -> T,
    ) -> Self {
        let elements = (0..rows * columns).map(|i| element(i / columns, i % columns)).collect();
        Matrix { rows, columns, elements }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// All elements, row after row.
    pub fn elements(&self) -> &[T] {
        &self.elements
    }

    /// All elements, row after row, mutable.
    pub fn elements_mut(&mut self) -> &mut [T] {
        &mut self.elements
    }

    /// One row.
    ///
    /// # Panics
    /// When the row is out of range.
    pub fn row(&self, row: usize) -> &[T] {
        &self.elements[row * self.columns..][..self.columns]
    }

    /// One row, mutable.
    ///
    /// # Panics
    /// When the row is out of range.
    pub fn row_mut(&mut self, row: usize) -> &mut [T] {
        &mut self.elements[row * self.columns..][..self.columns]
    }

    /// Applies a function to every element.
    pub(super) fn map(&self, f: impl Fn(T) -> T) -> Self {
        let elements = self.elements.iter().map(|x| f(*x)).collect();
        Matrix { elements, ..*self }
    }

    /// Applies a function to every pair of elements; the shapes are equal.
    pub(super) fn zip(&self, other: &Self, f: impl Fn(T, T) -> T) -> Self {
        assert_eq!((self.rows, self.columns), (other.rows, other.columns));
        let pairs = self.elements.iter().zip(&other.elements);
        Matrix { elements: pairs.map(|(x, y)| f(*x, *y)).collect(), ..*self }
    }

    /// The element-wise sum.
    pub(super) fn plus(&self, other: &Self) -> Self {
        self.zip(other, |x, y| x + y)
    }

    /// Adds the only row of `row` to every row.
    pub(super) fn add_to_rows(&mut self, row: &Self) {
        for at in 0..self.rows() {
            for (sum, element) in self.row_mut(at).iter_mut().zip(row.elements()) {
                *sum += *element;
            }
        }
    }

    /// The sum of all rows, as one row.
    pub(super) fn row_sum(&self) -> Self {
        let mut sum = Self::zeros(1, self.columns());
        for at in 0..self.rows() {
            for (sum, element) in sum.elements_mut().iter_mut().zip(self.row(at)) {
                *sum += *element;
            }
        }
        sum
    }

    /// Adds another matrix element-wise.
    pub(super) fn add(&mut self, other: &Self) {
        assert_eq!((self.rows, self.columns), (other.rows, other.columns));
        for (x, y) in self.elements.iter_mut().zip(&other.elements) {
            *x += *y;
        }
    }

    /// Copies a range of rows and columns.
    pub(super) fn part(&self, rows: Range<usize>, columns: Range<usize>) -> Self {
        let (first_row, first) = (rows.start, columns.start);
        Matrix::from_fn(rows.len(), columns.len(), |i, j| self[(first_row + i, first + j)])
    }

    /// Adds `part` to the submatrix whose first element is at (row, column).
    pub(super) fn add_part(&mut self, (row, column): (usize, usize), part: &Self) {
        for i in 0..part.rows {
            let sums = &mut self.row_mut(row + i)[column..][..part.columns];
            for (sum, x) in sums.iter_mut().zip(part.row(i)) {
                *sum += *x;
            }
        }
    }

    /// `self · other`.
    pub(super) fn times(&self, other: &Self) -> Self {
        gemm(self.view(), other.view())
    }

    /// `selfᵀ · other`.
    pub(super) fn transposed_times(&self, other: &Self) -> Self {
        gemm(self.view().transposed(), other.view())
    }

    /// `self · otherᵀ`.
    pub(super) fn times_transposed(&self, other: &Self) -> Self {
        gemm(self.view(), other.view().transposed())
    }

    fn view(&self) -> TransposableView<'_, T> {
        let Matrix { rows, columns, ref elements } = *self;
        TransposableView { rows, columns, row_stride: columns, column_stride: 1, elements }
    }
}

impl<T> Index<(usize, usize)> for Matrix<T> {
    type Output = T;

    fn index(&self, (row, column): (usize, usize)) -> &T {
        &self.elements[row * self.columns + column]
    }
}

impl<T> IndexMut<(usize, usize)> for Matrix<T> {
    fn index_mut(&mut self, (row, column): (usize, usize)) -> &mut T {
        &mut self.elements[row * self.columns + column]
    }
}

/// A matrix, or one seen transposed: element (i, j) is at index `i·row_stride + j·column_stride`.
struct TransposableView<'a, T> {
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
    elements: &'a [T],
}

impl<T> TransposableView<'_, T> {
    fn transposed(self) -> Self {
        TransposableView {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }
}

#[allow(unsafe_code)]
fn gemm<T: Float>(left: TransposableView<'_, T>, right: TransposableView<'_, T>) -> Matrix<T> {
    assert_eq!(left.columns, right.rows, "inner dimensions differ");
    let mut result = Matrix::zeros(left.rows, right.columns);
    // SAFETY: a `Matrix` has rows·columns elements, and a `TransposableView` has the strides of a matrix
    // or of its transpose (only `view` and `transposed` construct one), so every (row, column) of the
    // operands is inside their slices. `result` is new, so it overlaps neither operand. `T` is f32 or
    // f64 (`Float` is sealed), which `gemm` supports.
    unsafe {
        gemm::gemm(
            left.rows,
            right.columns,
            left.columns,
            result.elements.as_mut_ptr(),
            1,
            result.columns as isize,
            false,
            left.elements.as_ptr(),
            left.column_stride as isize,
            left.row_stride as isize,
            right.elements.as_ptr(),
            right.column_stride as isize,
            right.row_stride as isize,
            T::zero(),
            T::one(),
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Equal exactly, because all elements are small integers.
    #[test]
    fn gemms_equal_their_defining_sums() {
        for (m, k, n) in [(1, 1, 1), (3, 5, 2), (17, 33, 9), (4, 1, 7), (2, 0, 3)] {
            let left = Matrix::from_fn(m, k, |i, j| ((7 * i + 3 * j) % 11) as f64 - 5.0);
            let right = Matrix::from_fn(k, n, |i, j| ((5 * i + 2 * j) % 13) as f64 - 6.0);
            let sums = Matrix::from_fn(m, n, |i, j| {
                (0..k).map(|l| left[(i, l)] * right[(l, j)]).sum::<f64>()
            });
            let transpose = |a: &Matrix<f64>| Matrix::from_fn(a.columns, a.rows, |i, j| a[(j, i)]);
            assert_eq!(left.times(&right), sums);
            assert_eq!(transpose(&left).transposed_times(&right), sums);
            assert_eq!(left.times_transposed(&transpose(&right)), sums);
        }
    }

    #[test]
    fn submatrices_are_copied_and_added() {
        let whole = Matrix::from_fn(4, 6, |i, j| (10 * i + j) as f32);
        let part = whole.part(1..3, 2..5);
        assert_eq!(part.row(1), [22.0, 23.0, 24.0]);
        let mut sum = Matrix::zeros(4, 6);
        sum.add_part((1, 2), &part);
        sum.add_part((1, 2), &part);
        assert_eq!((sum[(2, 4)], sum[(2, 5)]), (48.0, 0.0));
    }
}
