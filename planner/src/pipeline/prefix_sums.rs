//! Sums over runs of consecutive values.

use std::ops::Range;

/// The sums of the first 0, 1, 2 … values.
pub(super) fn prefix_sums<T: Copy + Default>(
    values: impl Iterator<Item = T>,
    plus: impl Fn(T, T) -> T,
) -> Vec<T> {
    let mut sum = T::default();
    let next = values.map(|value| {
        sum = plus(sum, value);
        sum
    });
    std::iter::once(T::default()).chain(next).collect()
}

/// The sum over a run of values, from the sums of the first ones.
pub(super) fn sum_of_run(prefix_sums: &[f64], run: &Range<usize>) -> f64 {
    prefix_sums[run.end] - prefix_sums[run.start]
}
