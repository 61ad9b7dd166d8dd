//! Sums and zeros: the fused ops `Add`, `AddInto` and `Fill`.

use super::matrix::MatrixViewMut;
use super::parallel::Parallel;
use super::simd::{Simd, SimdBody};

/// `Add`: `sum = x + y`, all of the same length.
pub fn add(x: &[f32], y: &[f32], sum: &mut [f32], parallel: Parallel) {
    assert!(x.len() == sum.len() && y.len() == sum.len());
    parallel.for_rows::<AddElements, _>(sum.len(), (x, y, sum));
}

struct AddElements;

impl SimdBody<(&[f32], &[f32], &mut [f32])> for AddElements {
    #[inline(always)]
    fn run<S: Simd>((x, y, sum): (&[f32], &[f32], &mut [f32])) {
        for ((sum, x), y) in sum.iter_mut().zip(x).zip(y) {
            *sum = x + y;
        }
    }
}

/// `AddInto`: `sum += x`, both of the same length.
pub(crate) fn add_into(x: &[f32], sum: &mut [f32], parallel: Parallel) {
    assert_eq!(x.len(), sum.len());
    parallel.for_rows::<AddIntoElements, _>(sum.len(), (x, sum));
}

struct AddIntoElements;

impl SimdBody<(&[f32], &mut [f32])> for AddIntoElements {
    #[inline(always)]
    fn run<S: Simd>((x, sum): (&[f32], &mut [f32])) {
        for (sum, x) in sum.iter_mut().zip(x) {
            *sum += x;
        }
    }
}

/// `target = x`, both of the same length.
pub(crate) fn copy(x: &[f32], target: &mut [f32], parallel: Parallel) {
    assert_eq!(x.len(), target.len());
    parallel.for_rows::<CopyElements, _>(target.len(), (x, target));
}

struct CopyElements;

impl SimdBody<(&[f32], &mut [f32])> for CopyElements {
    #[inline(always)]
    fn run<S: Simd>((x, target): (&[f32], &mut [f32])) {
        target.copy_from_slice(x);
    }
}

/// `Fill`: zeroes all elements.
pub(crate) fn fill_zero(target: &mut [f32], parallel: Parallel) {
    parallel.for_rows::<ZeroElements, _>(target.len(), target);
}

struct ZeroElements;

impl SimdBody<&mut [f32]> for ZeroElements {
    #[inline(always)]
    fn run<S: Simd>(target: &mut [f32]) {
        target.fill(0.0);
    }
}

/// Zeroes the elements of a view, on the calling thread.
pub(crate) fn fill_zero_view(target: &mut MatrixViewMut<'_>) {
    for row in 0..target.rows() {
        target.row_mut(row).fill(0.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::random;

    #[test]
    fn sums_are_exact_with_any_number_of_threads() {
        let (x, y) = (random(1, 40_001), random(2, 40_001));
        for threads in [1, 2, 3] {
            let parallel = Parallel::new(threads);
            let mut sum = vec![f32::NAN; x.len()];
            add(&x, &y, &mut sum, parallel);
            assert!(sum.iter().zip(&x).zip(&y).all(|((sum, x), y)| *sum == x + y));
            fill_zero(&mut sum, parallel);
            add_into(&x, &mut sum, parallel);
            assert_eq!(sum, x);
        }
    }

    #[test]
    fn zeroing_a_view_keeps_the_columns_beside_it() {
        let mut x = random(1, 12);
        fill_zero_view(&mut MatrixViewMut::new(&mut x, 3, 4).column_range(1, 2));
        assert_eq!(x[1..3], [0.0, 0.0]);
        assert!(x[3] != 0.0 && x[4] != 0.0 && x[5] == 0.0);
    }
}
