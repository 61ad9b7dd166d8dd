//! Random values, rounding to formats, and comparison with a tolerance.

use narrows_plan::DType;
use narrows_test_support::uniform_f32;

/// Uniform values in [−1, 1) from a seed.
pub fn random_values(seed: u64, count: u64) -> Vec<f32> {
    uniform_f32(seed, count as usize)
}

/// Bits of the nearest bf16, ties to even.
pub fn bf16_bits(x: f32) -> u16 {
    half::bf16::from_f32(x).to_bits()
}

/// Value of a bf16.
pub fn bf16_value(bits: u16) -> f32 {
    half::bf16::from_bits(bits).to_f32()
}

/// Rounds values to a format.
pub fn rounded(dtype: DType, values: Vec<f32>) -> Vec<f32> {
    match dtype {
        DType::Bf16 => values.into_iter().map(|x| bf16_value(bf16_bits(x))).collect(),
        _ => values,
    }
}

/// Elements of a buffer as f32.
pub fn decode(bytes: &[u8], dtype: DType) -> Vec<f32> {
    match dtype {
        DType::Bf16 => {
            let halves = bytes.as_chunks().0.iter();
            halves.map(|half| bf16_value(u16::from_le_bytes(*half))).collect()
        }
        _ => bytes.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)).collect(),
    }
}

/// Bytes of a buffer with these elements.
pub fn encode(elements: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::Bf16 => elements.iter().flat_map(|x| bf16_bits(*x).to_le_bytes()).collect(),
        _ => bytemuck::cast_slice(elements).to_vec(),
    }
}

/// Maximum relative error of rounding f32 to a format.
fn rounding_error(dtype: DType) -> f32 {
    if dtype == DType::Bf16 { 1.0 / 256.0 } else { 0.0 }
}

/// Asserts that every value is the expected one rounded to its format, up to an error of `tolerance` times the largest
/// expected value, for f32 sums in another order.
#[track_caller]
pub fn assert_near(dtype: DType, actual: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(actual.len(), expected.len());
    let largest = expected.iter().fold(1e-2f32, |largest, x| largest.max(x.abs()));
    for (index, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        let allowed = rounding_error(dtype) * expected.abs() + tolerance * largest;
        let error = (actual - expected).abs();
        assert!(error <= allowed, "element {index}: {actual}, expected {expected} (± {allowed:e})");
    }
}
