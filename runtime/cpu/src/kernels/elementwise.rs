//! Sums and zeros: `Add`, `AddInto`, `Fill`.

use super::simd::{Simd, SimdBody};
use super::{MatrixViewMut, Parallel};

/// `sum = x + y`, all of one length.
pub fn add(x: &[f32], y: &[f32], sum: &mut [f32], parallel: Parallel) {
    assert!(x.len() == sum.len() && y.len() == sum.len());
    parallel.for_rows::<AddPart, _>(sum.len(), (x, y, sum));
}

struct AddPart;

impl SimdBody<(&[f32], &[f32], &mut [f32])> for AddPart {
    #[inline(always)]
    fn run<S: Simd>((x, y, sum): (&[f32], &[f32], &mut [f32])) {
        for ((sum, x), y) in sum.iter_mut().zip(x).zip(y) {
            *sum = x + y;
        }
    }
}

/// `sum += x`, of one length.
pub fn add_into(x: &[f32], sum: &mut [f32], parallel: Parallel) {
    assert_eq!(x.len(), sum.len());
    parallel.for_rows::<AddIntoPart, _>(sum.len(), (x, sum));
}

struct AddIntoPart;

impl SimdBody<(&[f32], &mut [f32])> for AddIntoPart {
    #[inline(always)]
    fn run<S: Simd>((x, sum): (&[f32], &mut [f32])) {
        for (sum, x) in sum.iter_mut().zip(x) {
            *sum += x;
        }
    }
}

/// Zeros.
pub fn fill_zero(target: &mut [f32], parallel: Parallel) {
    parallel.for_rows::<FillPart, _>(target.len(), target);
}

struct FillPart;

impl SimdBody<&mut [f32]> for FillPart {
    #[inline(always)]
    fn run<S: Simd>(target: &mut [f32]) {
        target.fill(0.0);
    }
}

/// Zeros in a range of columns.
pub fn fill_zero_view(mut target: MatrixViewMut<'_>) {
    for row in 0..target.rows() {
        target.row_mut(row).fill(0.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::random;

    #[test]
    fn sums_with_any_number_of_threads() {
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
        let mut x = x;
        fill_zero_view(MatrixViewMut::new(&mut x[..12], 3, 4).column_range(1, 2));
        assert_eq!(x[1..3], [0.0, 0.0]);
        assert!(x[3] != 0.0 && x[4] != 0.0 && x[5] == 0.0);
    }
}
