//! Run-time SIMD dispatch, and vectorisable math functions and reductions.
//!
//! [`dispatch_simd`] runs a [`SimdBody`] through `pulp`, which compiles it for AVX-512, AVX2 and the
//! baseline instruction set and selects one at run time. Only inlined code is compiled for the
//! selected instruction set. A body is therefore a type, not a function or a closure, which `pulp`
//! would call through a shim that the compiler need not inline; and every function that a body
//! calls in its loops must be `#[inline(always)]`.

use std::marker::PhantomData;

pub(crate) use pulp::Simd;

/// Number of independent accumulators of a reduction: enough to hide the latency of an addition.
const LANES: usize = 32;

/// A loop over operands `W`, compiled for each instruction set.
pub(crate) trait SimdBody<W> {
    /// Runs the loop with instruction set `S`. Implementations are `#[inline(always)]`.
    fn run<S: Simd>(operands: W);
}

struct SimdCall<B, W>(PhantomData<B>, W);

impl<W, B: SimdBody<W>> pulp::WithSimd for SimdCall<B, W> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        B::run::<S>(self.1);
    }
}

/// Runs `B` on `operands` with the widest vectors of this machine.
pub(crate) fn dispatch_simd<B: SimdBody<W>, W>(operands: W) {
    pulp::Arch::new().dispatch(SimdCall::<B, W>(PhantomData, operands));
}

/// x·y + z, rounded once where the instruction set has a fused multiply-add.
#[inline(always)]
pub(crate) fn mul_add<S: Simd>(x: f32, y: f32, z: f32) -> f32 {
    // Without the instruction, `f32::mul_add` is a library call.
    if S::IS_SCALAR { x * y + z } else { x.mul_add(y, z) }
}

/// eˣ with a relative error below 2·10⁻⁷. x is clamped to [−87.3, 88.3], so the smallest result is
/// about 10⁻³⁸; NaN stays NaN.
///
/// Range reduction x = n·ln 2 + r with |r| ≤ ln 2 / 2; the polynomial for eʳ is that of `expf` in
/// Cephes.
#[inline(always)]
pub(crate) fn exp<S: Simd>(x: f32) -> f32 {
    const MIN: f32 = -87.3;
    const MAX: f32 = 88.3;
    /// 1.5·2²³: adding it rounds to an integer, which is then in the lowest mantissa bits.
    const ROUNDING_SHIFT: f32 = 12_582_912.0;
    // Comparisons, which keep a NaN.
    let x = if x < MIN { MIN } else { x };
    let x = if x > MAX { MAX } else { x };
    let shifted = mul_add::<S>(x, std::f32::consts::LOG2_E, ROUNDING_SHIFT);
    let n = shifted - ROUNDING_SHIFT;
    let r = mul_add::<S>(n, 2.121_944_4e-4, mul_add::<S>(n, -0.693_359_4, x));
    let p = mul_add::<S>(1.987_569_1e-4, r, 1.398_2e-3);
    let p = mul_add::<S>(p, r, 8.333_452e-3);
    let p = mul_add::<S>(p, r, 4.166_579_6e-2);
    let p = mul_add::<S>(p, r, 1.666_666_5e-1);
    let p = mul_add::<S>(p, r, 0.5);
    let e = mul_add::<S>(p * r, r, r) + 1.0;
    // The bits of `shifted` are 0x4B40_0000 + n; moving n to the exponent shifts the bits of
    // ROUNDING_SHIFT out at the top.
    e * f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3F80_0000))
}

/// Logistic function 1 / (1 + e⁻ˣ).
#[inline(always)]
pub(crate) fn sigmoid<S: Simd>(x: f32) -> f32 {
    1.0 / (1.0 + exp::<S>(-x))
}

/// Reduces all lanes to one value, as a binary tree over halves.
#[inline(always)]
fn reduce_lanes<F: LaneReduce>(lanes: [f32; LANES]) -> f32 {
    let halves = reduce_halves::<F, LANES, 16>(lanes);
    let quarters = reduce_halves::<F, 16, 8>(halves);
    let [a, b, c, d] = reduce_halves::<F, 8, 4>(quarters);
    F::combine(F::combine(a, c), F::combine(b, d))
}

#[inline(always)]
fn reduce_halves<F: LaneReduce, const N: usize, const HALF: usize>(lanes: [f32; N]) -> [f32; HALF] {
    let mut reduced = [0.0; HALF];
    for lane in 0..HALF {
        reduced[lane] = F::combine(lanes[lane], lanes[lane + HALF]);
    }
    reduced
}

/// The binary operation of a lane reduction.
trait LaneReduce {
    fn combine(x: f32, y: f32) -> f32;
}

struct LaneSum;

impl LaneReduce for LaneSum {
    #[inline(always)]
    fn combine(x: f32, y: f32) -> f32 {
        x + y
    }
}

struct LaneMaximum;

impl LaneReduce for LaneMaximum {
    #[inline(always)]
    fn combine(x: f32, y: f32) -> f32 {
        if y > x { y } else { x }
    }
}

/// Σx².
#[inline(always)]
pub(crate) fn sum_squares<S: Simd>(x: &[f32]) -> f32 {
    dot::<S>(x, x)
}

/// Σ xᵢyᵢ.
#[inline(always)]
pub(crate) fn dot<S: Simd>(x: &[f32], y: &[f32]) -> f32 {
    let (x_chunks, y_chunks) = (x.chunks_exact(LANES), y.chunks_exact(LANES));
    let rest = x_chunks.remainder().iter().zip(y_chunks.remainder());
    let mut sum: f32 = rest.map(|(x, y)| x * y).sum();
    let mut lanes = [0.0; LANES];
    for (x, y) in x_chunks.zip(y_chunks) {
        for lane in 0..LANES {
            lanes[lane] = mul_add::<S>(x[lane], y[lane], lanes[lane]);
        }
    }
    sum += reduce_lanes::<LaneSum>(lanes);
    sum
}

/// Σ xᵢyᵢzᵢ.
#[inline(always)]
pub(crate) fn dot3(x: &[f32], y: &[f32], z: &[f32]) -> f32 {
    let chunks = (x.chunks_exact(LANES), y.chunks_exact(LANES), z.chunks_exact(LANES));
    let rest = chunks.0.remainder().iter().zip(chunks.1.remainder()).zip(chunks.2.remainder());
    let mut sum: f32 = rest.map(|((x, y), z)| x * y * z).sum();
    let mut lanes = [0.0; LANES];
    for ((x, y), z) in chunks.0.zip(chunks.1).zip(chunks.2) {
        for lane in 0..LANES {
            // With `mul_add` the compiler shuffles lanes, and the backward pass of RMSNorm takes
            // 1.5× as long.
            lanes[lane] += x[lane] * y[lane] * z[lane];
        }
    }
    sum += reduce_lanes::<LaneSum>(lanes);
    sum
}

/// Σx.
#[inline(always)]
pub(crate) fn sum(x: &[f32]) -> f32 {
    let chunks = x.chunks_exact(LANES);
    let rest: f32 = chunks.remainder().iter().sum();
    let mut lanes = [0.0; LANES];
    for x in chunks {
        for lane in 0..LANES {
            lanes[lane] += x[lane];
        }
    }
    rest + reduce_lanes::<LaneSum>(lanes)
}

/// Σ e^(xᵢ − shift).
#[inline(always)]
pub(crate) fn sum_exp<S: Simd>(x: &[f32], shift: f32) -> f32 {
    let chunks = x.chunks_exact(LANES);
    let mut rest = 0.0;
    for x in chunks.remainder() {
        rest += exp::<S>(x - shift);
    }
    let mut lanes = [0.0; LANES];
    for x in chunks {
        for lane in 0..LANES {
            lanes[lane] += exp::<S>(x[lane] - shift);
        }
    }
    rest + reduce_lanes::<LaneSum>(lanes)
}

/// The largest element, −∞ for an empty slice. NaNs are ignored: they show in the sums computed from
/// the same elements afterwards.
#[inline(always)]
pub(crate) fn maximum(x: &[f32]) -> f32 {
    let chunks = x.chunks_exact(LANES);
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for (lane, x) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane = *x;
    }
    for x in chunks {
        for lane in 0..LANES {
            lanes[lane] = LaneMaximum::combine(lanes[lane], x[lane]);
        }
    }
    reduce_lanes::<LaneMaximum>(lanes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// [`exp`] without vector instructions.
    fn scalar_exp(x: f32) -> f32 {
        exp::<pulp::Scalar>(x)
    }

    struct ExpInPlace;

    impl SimdBody<&mut [f32]> for ExpInPlace {
        #[inline(always)]
        fn run<S: Simd>(values: &mut [f32]) {
            for value in values {
                *value = exp::<S>(*value);
            }
        }
    }

    #[test]
    fn exp_is_accurate_to_a_few_ulps() {
        let inputs: Vec<f32> = (-872_000..883_000).map(|i| i as f32 * 1e-4).collect();
        let mut outputs = inputs.clone();
        dispatch_simd::<ExpInPlace, _>(&mut outputs[..]);
        let worst = inputs
            .iter()
            .zip(&outputs)
            .map(|(x, e)| (f64::from(*e) / f64::from(*x).exp() - 1.0).abs())
            .fold(0.0, f64::max);
        assert!(worst < 2e-7, "relative error {worst:e}");
    }

    #[test]
    fn exp_saturates_and_keeps_nan() {
        for underflowing in [f32::NEG_INFINITY, -1e30, -88.0] {
            assert!(scalar_exp(underflowing) < 2e-38);
        }
        assert_eq!(scalar_exp(0.0), 1.0);
        assert!(scalar_exp(1e30).is_finite() && scalar_exp(1e30) > 1e38);
        assert!(scalar_exp(f32::NAN).is_nan());
        let sigmoid = sigmoid::<pulp::Scalar>;
        assert_eq!((sigmoid(0.0), sigmoid(200.0)), (0.5, 1.0));
        assert!(sigmoid(-200.0) < 1e-37);
        for x in [-80.0f32, -1.5, 0.3, 60.0] {
            assert!((f64::from(scalar_exp(x)) / f64::from(x).exp() - 1.0).abs() < 2e-7);
        }
    }

    #[test]
    fn reductions_are_right_at_every_length() {
        for length in [0, 1, 31, 32, 33, 64, 100] {
            let x: Vec<f32> = (0..length).map(|i| i as f32 - 3.0).collect();
            let ones = vec![1.0; length];
            let expected: f32 = x.iter().sum();
            assert_eq!(sum(&x), expected);
            assert_eq!(
                (dot::<pulp::Scalar>(&x, &ones), dot3(&x, &ones, &ones)),
                (expected, expected)
            );
            assert_eq!(maximum(&x), x.last().copied().unwrap_or(f32::NEG_INFINITY));
        }
    }
}
