//! Shared by the tests of the kernels: seeded random elements, comparison, finite differences.

pub use narrows_test_support::uniform_f32 as random;

/// Asserts that all elements are within `tolerance` relative to the largest expected magnitude, or
/// to 0.01 where all are smaller.
#[track_caller]
pub fn assert_close(actual: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(actual.len(), expected.len());
    let scale = expected.iter().fold(1e-2, |largest: f64, x| largest.max(x.abs()));
    for (index, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        let error = (f64::from(*actual) - expected).abs() / scale;
        assert!(error <= tolerance, "element {index}: {actual}, not {expected} (error {error:e})");
    }
}

/// [`assert_close`] for an expected result in f32.
#[track_caller]
pub fn assert_close_f32(actual: &[f32], expected: &[f32], tolerance: f64) {
    assert_close(actual, &widen(expected), tolerance);
}

/// Converts elements to f64.
pub fn widen(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}

/// The gradient ∂f/∂xᵢ of a function in f64, by central differences.
pub fn finite_difference(x: &[f64], f: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let step = 1e-5;
    let mut x = x.to_vec();
    (0..x.len())
        .map(|index| {
            let center = x[index];
            x[index] = center + step;
            let above = f(&x);
            x[index] = center - step;
            let below = f(&x);
            x[index] = center;
            (above - below) / (2.0 * step)
        })
        .collect()
}

/// Σ xᵢ·wᵢ: a scalar loss whose gradient with respect to x is `weights`.
pub fn weighted_sum(x: &[f64], weights: &[f32]) -> f64 {
    assert_eq!(x.len(), weights.len());
    x.iter().zip(weights).map(|(x, w)| x * f64::from(*w)).sum()
}
