//! What the kernels' tests share: seeded numbers, comparison, derivatives by differences.

/// Numbers between −1 and 1 that depend on nothing but the seed.
pub(super) fn random(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03;
    (0..count)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

/// Asserts that all numbers are within `tolerance`, relative to the largest that is wanted (or to
/// 0.01, where all are smaller).
#[track_caller]
pub(super) fn assert_close(got: &[f32], wanted: &[f64], tolerance: f64) {
    assert_eq!(got.len(), wanted.len());
    let scale = wanted.iter().fold(1e-2, |largest: f64, x| largest.max(x.abs()));
    for (at, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        let error = (f64::from(*got) - wanted).abs() / scale;
        assert!(error <= tolerance, "number {at}: {got}, wanted {wanted} (error {error:e})");
    }
}

/// [`assert_close`] of two results in f32.
#[track_caller]
pub(super) fn assert_same(got: &[f32], wanted: &[f32], tolerance: f64) {
    assert_close(got, &widen(wanted), tolerance);
}

/// The same numbers in f64.
pub(super) fn widen(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}

/// d f / d xᵢ of a function in f64, by central differences.
pub(super) fn gradient(x: &[f64], f: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let step = 1e-5;
    let mut x = x.to_vec();
    (0..x.len())
        .map(|at| {
            let here = x[at];
            x[at] = here + step;
            let above = f(&x);
            x[at] = here - step;
            let below = f(&x);
            x[at] = here;
            (above - below) / (2.0 * step)
        })
        .collect()
}

/// Σ xᵢyᵢ with f32 weights: what a gradient of y is the derivative of.
pub(super) fn weigh(x: &[f64], weights: &[f32]) -> f64 {
    assert_eq!(x.len(), weights.len());
    x.iter().zip(weights).map(|(x, w)| x * f64::from(*w)).sum()
}
