//! Numbers and their formats, and how near two results must be.

use narrows_plan::DType;

/// Numbers between −1 and 1 that depend on nothing but the seed.
pub fn random(seed: u64, count: u64) -> Vec<f32> {
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

/// The bits of the nearest bf16, ties to even.
pub fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

/// The number with these bits.
pub fn of_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The nearest numbers of a format.
pub fn rounded(dtype: DType, numbers: Vec<f32>) -> Vec<f32> {
    match dtype {
        DType::Bf16 => numbers.into_iter().map(|x| of_bf16(bf16_bits(x))).collect(),
        _ => numbers,
    }
}

/// The largest error, relative to the number, of rounding it to a format that f32 is rounded to.
fn unit(dtype: DType) -> f32 {
    if dtype == DType::Bf16 { 1.0 / 256.0 } else { 0.0 }
}

/// Asserts that every number is what rounding the wanted one to its format gives, but for
/// `tolerance` of the largest wanted number: what f32 sums in another order differ by.
#[track_caller]
pub fn assert_near(dtype: DType, got: &[f32], wanted: &[f32], tolerance: f32) {
    assert_eq!(got.len(), wanted.len());
    let largest = wanted.iter().fold(1e-2f32, |largest, x| largest.max(x.abs()));
    for (at, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        let allowed = unit(dtype) * wanted.abs() + tolerance * largest;
        let error = (got - wanted).abs();
        assert!(error <= allowed, "number {at}: {got}, wanted {wanted} (± {allowed:e})");
    }
}
