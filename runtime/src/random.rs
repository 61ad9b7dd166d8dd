//! Counter-based random numbers: element n of a stream is a function of the seed, the stream's name
//! and n alone, so that a device can generate any shard without the elements before it.

use std::f64::consts::TAU;

use narrows_plan::model::{LinearKind, ParameterId, WeightId};
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
        let (radius, angle) = self.polar(first);
        radius * if n == first { angle.cos() } else { angle.sin() }
    }

    /// Radius and angle of the pair of normal deviates that begins with the even number `first`.
    fn polar(&self, first: u64) -> (f64, f64) {
        let radius = (-2.0 * (1.0 - self.uniform(first)).ln()).sqrt();
        (radius, TAU * self.uniform(first + 1))
    }

    /// The standard normal deviates from the n-th on, with the bits of [`normal`](CounterRng::normal). Both of a pair are
    /// computed at once.
    pub fn normals_from(self, n: u64) -> impl Iterator<Item = f64> {
        let mut second = None;
        (n..).map(move |n| {
            if let Some(second) = second.take() {
                return second;
            }
            if n % 2 == 1 {
                return self.normal(n);
            }
            let (radius, angle) = self.polar(n);
            let (sine, cosine) = angle.sin_cos();
            second = Some(radius * sine);
            radius * cosine
        })
    }
}

/// Name of the stream that the initial values of a parameter are drawn from.
///
/// Frozen: the initial weights of every model, and so all losses, depend on these bytes. The names are
/// independent of the names in messages and checkpoints, which happen to be equal.
pub fn random_stream_name(id: ParameterId) -> String {
    let of_linear = |linear: LinearKind, part: &str| {
        let linear = match linear {
            LinearKind::Q => "q",
            LinearKind::K => "k",
            LinearKind::V => "v",
            LinearKind::O => "o",
            LinearKind::Gate => "gate",
            LinearKind::Up => "up",
            LinearKind::Down => "down",
        };
        format!("{linear}{part}")
    };
    let weight = match id.weight {
        WeightId::Embedding => "embedding".into(),
        WeightId::Norm1 => "norm1".into(),
        WeightId::Norm2 => "norm2".into(),
        WeightId::FinalNorm => "final_norm".into(),
        WeightId::Head => "head".into(),
        WeightId::Dense(linear) => of_linear(linear, ""),
        WeightId::FactorA(linear) => of_linear(linear, ".a"),
        WeightId::FactorB(linear) => of_linear(linear, ".b"),
        WeightId::Bias(linear) => of_linear(linear, ".bias"),
        WeightId::QkNorm(linear) => of_linear(linear, ".norm"),
        WeightId::CrossingGate(linear) => of_linear(linear, ".gate"),
        WeightId::CrossingGateBias(linear) => of_linear(linear, ".gate.bias"),
        WeightId::CrossingGateU(linear) => of_linear(linear, ".gate.u"),
        WeightId::CrossingGateV(linear) => of_linear(linear, ".gate.v"),
        WeightId::LatentNormScale(linear) => of_linear(linear, ".latent_norm.scale"),
        WeightId::LatentNormBias(linear) => of_linear(linear, ".latent_norm.bias"),
    };
    match id.block {
        Some(block) => format!("layer {block} {weight}"),
        None => weight,
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

    /// A change of any of these names changes the initial weights of existing models.
    #[test]
    fn names_of_random_streams_are_frozen() {
        let of_block = |block, weight| ParameterId { block: Some(block), weight };
        let outside_blocks = |weight| ParameterId { block: None, weight };
        for (id, name) in [
            (outside_blocks(WeightId::Embedding), "embedding"),
            (outside_blocks(WeightId::FinalNorm), "final_norm"),
            (outside_blocks(WeightId::Head), "head"),
            (of_block(0, WeightId::Norm1), "layer 0 norm1"),
            (of_block(1, WeightId::Norm2), "layer 1 norm2"),
            (of_block(2, WeightId::Dense(LinearKind::Q)), "layer 2 q"),
            (of_block(3, WeightId::FactorA(LinearKind::K)), "layer 3 k.a"),
            (of_block(4, WeightId::FactorB(LinearKind::V)), "layer 4 v.b"),
            (of_block(5, WeightId::CrossingGate(LinearKind::O)), "layer 5 o.gate"),
            (of_block(5, WeightId::CrossingGateBias(LinearKind::O)), "layer 5 o.gate.bias"),
            (of_block(6, WeightId::CrossingGateU(LinearKind::Gate)), "layer 6 gate.gate.u"),
            (of_block(7, WeightId::CrossingGateV(LinearKind::Up)), "layer 7 up.gate.v"),
            (
                of_block(8, WeightId::LatentNormScale(LinearKind::Down)),
                "layer 8 down.latent_norm.scale",
            ),
            (of_block(19, WeightId::LatentNormBias(LinearKind::Q)), "layer 19 q.latent_norm.bias"),
        ] {
            assert_eq!(random_stream_name(id), name);
        }
    }

    #[test]
    fn consecutive_normal_deviates_have_the_same_bits() {
        let stream = CounterRng::new(1, "embedding");
        for first in [0, 1, 2, 7] {
            for (normal, n) in stream.normals_from(first).zip(first..first + 100) {
                assert_eq!(normal.to_bits(), stream.normal(n).to_bits(), "{n} from {first}");
            }
        }
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
