//! Relative errors of numbers and tensors.

use narrows_plan::model::ParameterId;
use narrows_runtime::session::ModelTensors;

/// |actual − expected|/|expected|; infinite for NaN.
pub fn relative_error(actual: f64, expected: f64) -> f64 {
    let error = (actual - expected).abs() / expected.abs();
    // A comparison with NaN must fail.
    if error.is_nan() { f64::INFINITY } else { error }
}

/// ‖actual − expected‖/‖expected‖.
pub(crate) fn relative_distance(actual: impl Iterator<Item = f64>, expected: &[f64]) -> f64 {
    relative_distance_beyond(0.0, actual, expected)
}

/// The largest relative error ‖actual − expected‖/‖expected‖ of any tensor, and the tensor's parameter as text.
///
/// # Panics
/// When a tensor is missing or has another number of elements.
pub fn max_relative_error(
    actual: &ModelTensors,
    expected: impl IntoIterator<Item = (ParameterId, Vec<f64>)>,
) -> (f64, String) {
    let mut worst = (0.0, String::new());
    for (id, expected) in expected {
        let actual = actual.get(&id).unwrap_or_else(|| panic!("no {id}"));
        assert_eq!(actual.len(), expected.len(), "{id}");
        let deviation =
            squared_norm(&mut actual.iter().zip(&expected).map(|(a, b)| f64::from(*a) - b));
        let norm = squared_norm(&mut expected.iter().copied());
        let error = (deviation / norm.max(1e-30)).sqrt();
        keep_larger(&mut worst, (error, id.to_string()));
    }
    worst
}

/// Keeps the larger error; NaN is larger than any number.
pub(crate) fn keep_larger(worst: &mut (f64, String), other: (f64, String)) {
    if other.0 > worst.0 || other.0.is_nan() {
        *worst = other;
    }
}

/// √(max(‖actual − expected‖² − allowance, 0))/‖expected‖.
pub(crate) fn relative_distance_beyond(
    allowance: f64,
    actual: impl Iterator<Item = f64>,
    expected: &[f64],
) -> f64 {
    let deviation =
        squared_norm(&mut actual.zip(expected).map(|(actual, expected)| actual - expected));
    // Not `max`, which would hide NaN.
    let deviation = if deviation < allowance { 0.0 } else { deviation - allowance };
    (deviation / squared_norm(&mut expected.iter().copied()).max(1e-24)).sqrt()
}

fn squared_norm(elements: &mut dyn Iterator<Item = f64>) -> f64 {
    elements.map(|x| x * x).sum()
}
