//! Counter-based random numbers: element n of a stream is a function of the seed, the stream's name
//! and n alone, so that a device can generate any shard without the elements before it.

use std::f64::consts::TAU;

use narrows_plan::random::{GAMMA, mix64};

/// A named stream of random numbers that is addressed by position.
///
/// The bits are those of SplitMix64 (Steele, Lea, Flood 2014), whose n-th output is a mix of
/// `state + (n+1)·γ`; the state here is `mix(mix(seed) ⊕ FNV-1a(name))`. Normal deviates are
/// generated in pairs by the Box-Muller transform: with u₁ in (0, 1] and u₂ in [0, 1), element 2p is
/// √(−2·ln u₁)·cos 2πu₂ and element 2p+1 is √(−2·ln u₁)·sin 2πu₂.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterRng {
    state: u64,
}

impl CounterRng {
    /// The stream of this name in a run with this seed.
    pub fn new(seed: u64, name: &str) -> CounterRng {
        CounterRng { state: mix64(mix64(seed) ^ fnv1a(name.bytes())) }
    }

    /// The n-th 64 random bits.
    pub fn bits(&self, n: u64) -> u64 {
        mix64(self.state.wrapping_add(n.wrapping_add(1).wrapping_mul(GAMMA)))
    }

    /// The n-th uniform deviate in [0, 1), a multiple of 2⁻⁵³.
    pub fn uniform(&self, n: u64) -> f64 {
        (self.bits(n) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// The n-th standard normal deviate.
    pub fn normal(&self, n: u64) -> f64 {
        let first = n & !1;
        let radius = (-2.0 * (1.0 - self.uniform(first)).ln()).sqrt();
        let angle = TAU * self.uniform(first + 1);
        radius * if n == first { angle.cos() } else { angle.sin() }
    }
}

/// The 64-bit FNV-1a hash, which does not depend on the compiler or its version.
pub fn fnv1a(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first outputs of SplitMix64 for the seed 1234567, as the C code of its authors prints them.
    #[test]
    fn bits_equal_those_of_splitmix64() {
        let stream = CounterRng { state: 1_234_567 };
        assert_eq!(stream.bits(0), 6_457_827_717_110_365_317);
        assert_eq!(stream.bits(1), 3_203_168_211_198_807_973);
    }

    #[test]
    fn normal_deviates_have_normal_moments() {
        let stream = CounterRng::new(1, "embedding");
        let count = 20_000;
        let mean = |power: i32| {
            (0..count).map(|n| stream.normal(n).powi(power)).sum::<f64>() / count as f64
        };
        assert!(mean(1).abs() < 0.03, "{}", mean(1));
        assert!((mean(2) - 1.0).abs() < 0.05, "{}", mean(2));
        assert!((mean(4) - 3.0).abs() < 0.3, "{}", mean(4));
        assert_ne!(stream, CounterRng::new(2, "embedding"));
        assert_ne!(stream, CounterRng::new(1, "head"));
    }
}
