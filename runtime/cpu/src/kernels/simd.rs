//! Loops for the widest vectors of the machine, and the functions they need in a form that
//! vectorises.
//!
//! [`vectorized`] runs a [`SimdBody`] through `pulp`, which compiles it for AVX-512, AVX2 and the
//! baseline, and picks one at run time. Only what is inlined is compiled for those vectors. That is
//! why a body is a type and not a function or a closure: those are called through a shim which the
//! compiler need not inline. All that a body calls in its loops must be `#[inline(always)]`.

use std::marker::PhantomData;

pub use pulp::Simd;

/// Sums are kept in this many lanes, so that additions need not wait for each other.
const LANES: usize = 32;

/// A loop over operands `W`.
pub trait SimdBody<W> {
    /// Runs it, for vectors `S`. Implementations are `#[inline(always)]`.
    fn run<S: Simd>(work: W);
}

struct SimdCall<B, W>(PhantomData<B>, W);

impl<W, B: SimdBody<W>> pulp::WithSimd for SimdCall<B, W> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        B::run::<S>(self.1);
    }
}

/// Runs `B` as compiled for the widest vectors of this machine.
pub fn dispatch_simd<B: SimdBody<W>, W>(work: W) {
    pulp::Arch::new().dispatch(SimdCall::<B, W>(PhantomData, work));
}

/// x·y + z, rounded once where the vectors can.
#[inline(always)]
pub fn mul_add<S: Simd>(x: f32, y: f32, z: f32) -> f32 {
    // Without the instruction, `mul_add` is a call.
    if S::IS_SCALAR { x * y + z } else { x.mul_add(y, z) }
}

/// eˣ with a relative error below 2·10⁻⁷. Below −87.3 it is e^−87.3, about 10⁻³⁸, above 88.3 it is
/// e^88.3, and of no number it is none.
///
/// x = n·ln 2 + r with |r| ≤ ln 2 / 2; the polynomial for eʳ is that of Cephes' `expf`.
#[inline(always)]
pub fn exp<S: Simd>(x: f32) -> f32 {
    const LOW: f32 = -87.3;
    const HIGH: f32 = 88.3;
    /// 1.5·2²³: a number added to it is rounded to an integer, found in its lowest bits.
    const MAGIC: f32 = 12_582_912.0;
    // As comparisons, which leave a NaN as it is.
    let x = if x < LOW { LOW } else { x };
    let x = if x > HIGH { HIGH } else { x };
    let shifted = mul_add::<S>(x, std::f32::consts::LOG2_E, MAGIC);
    let n = shifted - MAGIC;
    let r = mul_add::<S>(n, 2.121_944_4e-4, mul_add::<S>(n, -0.693_359_4, x));
    let p = mul_add::<S>(1.987_569_1e-4, r, 1.398_2e-3);
    let p = mul_add::<S>(p, r, 8.333_452e-3);
    let p = mul_add::<S>(p, r, 4.166_579_6e-2);
    let p = mul_add::<S>(p, r, 1.666_666_5e-1);
    let p = mul_add::<S>(p, r, 0.5);
    let e = mul_add::<S>(p * r, r, r) + 1.0;
    // Bits 0x4B40_0000 + n, moved to the exponent: what MAGIC has there falls out at the top.
    e * f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3F80_0000))
}

/// 1 / (1 + e⁻ˣ).
#[inline(always)]
pub fn sigmoid<S: Simd>(x: f32) -> f32 {
    1.0 / (1.0 + exp::<S>(-x))
}

/// All lanes combined, halves with halves.
#[inline(always)]
fn reduce_lanes<F: LaneReduce>(lanes: [f32; LANES]) -> f32 {
    let halves = reduce_halves::<F, LANES, 16>(lanes);
    let quarters = reduce_halves::<F, 16, 8>(halves);
    let [a, b, c, d] = reduce_halves::<F, 8, 4>(quarters);
    F::combine(F::combine(a, c), F::combine(b, d))
}

#[inline(always)]
fn reduce_halves<F: LaneReduce, const N: usize, const HALF: usize>(lanes: [f32; N]) -> [f32; HALF] {
    let mut made = [0.0; HALF];
    for lane in 0..HALF {
        made[lane] = F::combine(lanes[lane], lanes[lane + HALF]);
    }
    made
}

/// What two lanes are combined with.
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
pub fn sum_squares<S: Simd>(x: &[f32]) -> f32 {
    dot::<S>(x, x)
}

/// Σ xᵢyᵢ.
#[inline(always)]
pub fn dot<S: Simd>(x: &[f32], y: &[f32]) -> f32 {
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
pub fn dot3<S: Simd>(x: &[f32], y: &[f32], z: &[f32]) -> f32 {
    let chunks = (x.chunks_exact(LANES), y.chunks_exact(LANES), z.chunks_exact(LANES));
    let rest = chunks.0.remainder().iter().zip(chunks.1.remainder()).zip(chunks.2.remainder());
    let mut sum: f32 = rest.map(|((x, y), z)| x * y * z).sum();
    let mut lanes = [0.0; LANES];
    for ((x, y), z) in chunks.0.zip(chunks.1).zip(chunks.2) {
        for lane in 0..LANES {
            // Not `madd`: the compiler then shuffles lanes, and the norm's backward pass takes half
            // as long again.
            lanes[lane] += x[lane] * y[lane] * z[lane];
        }
    }
    sum += reduce_lanes::<LaneSum>(lanes);
    sum
}

/// Σx.
#[inline(always)]
pub fn sum(x: &[f32]) -> f32 {
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
pub fn sum_exp<S: Simd>(x: &[f32], shift: f32) -> f32 {
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

/// The largest, −∞ of nothing. NaNs are passed over: they show in the sums that follow.
#[inline(always)]
pub fn maximum(x: &[f32]) -> f32 {
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

    /// What has no vectors computes like what has.
    fn plain(x: f32) -> f32 {
        exp::<pulp::Scalar>(x)
    }

    struct Exps;

    impl SimdBody<&mut [f32]> for Exps {
        #[inline(always)]
        fn run<S: Simd>(values: &mut [f32]) {
            for value in values {
                *value = exp::<S>(*value);
            }
        }
    }

    #[test]
    fn exp_is_exact_to_a_few_units() {
        let inputs: Vec<f32> = (-872_000..883_000).map(|i| i as f32 * 1e-4).collect();
        let mut outputs = inputs.clone();
        dispatch_simd::<Exps, _>(&mut outputs[..]);
        let worst = inputs
            .iter()
            .zip(&outputs)
            .map(|(x, e)| (f64::from(*e) / f64::from(*x).exp() - 1.0).abs())
            .fold(0.0, f64::max);
        assert!(worst < 2e-7, "relative error {worst:e}");
    }

    #[test]
    fn exp_at_the_ends() {
        for nothing in [f32::NEG_INFINITY, -1e30, -88.0] {
            assert!(plain(nothing) < 2e-38);
        }
        assert_eq!(plain(0.0), 1.0);
        assert!(plain(1e30).is_finite() && plain(1e30) > 1e38);
        assert!(plain(f32::NAN).is_nan());
        let sigmoid = sigmoid::<pulp::Scalar>;
        assert_eq!((sigmoid(0.0), sigmoid(200.0)), (0.5, 1.0));
        assert!(sigmoid(-200.0) < 1e-37);
        for x in [-80.0f32, -1.5, 0.3, 60.0] {
            assert!((f64::from(plain(x)) / f64::from(x).exp() - 1.0).abs() < 2e-7);
        }
    }

    #[test]
    fn sums_of_every_length() {
        for length in [0, 1, 31, 32, 33, 64, 100] {
            let x: Vec<f32> = (0..length).map(|i| i as f32 - 3.0).collect();
            let ones = vec![1.0; length];
            let wanted: f32 = x.iter().sum();
            assert_eq!(sum(&x), wanted);
            assert_eq!(
                (dot::<pulp::Scalar>(&x, &ones), dot3::<pulp::Scalar>(&x, &ones, &ones)),
                (wanted, wanted)
            );
            assert_eq!(maximum(&x), x.last().copied().unwrap_or(f32::NEG_INFINITY));
        }
    }
}
