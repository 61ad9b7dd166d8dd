//! Statistics of measured times.

/// The median of numbers in any order, of an even number of them the upper one; `None` for an empty list.
pub fn upper_median(mut numbers: Vec<f64>) -> Option<f64> {
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied()
}
