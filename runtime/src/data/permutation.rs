//! Permutations with random access: a Feistel network over counters.
//!
//! Let n be the size and h the least integer with 4ʰ ≥ n. An integer below 4ʰ has a left half l and a
//! right half r of h bits each, and one round is
//!
//! ```text
//! (l, r) ↦ (r, l ⊕ F(r, kᵢ))          F: the low h bits of a mix of r and the round's key
//! ```
//!
//! which is invertible for every F; so rounds permute the integers below 4ʰ. The integers below n are
//! permuted by repeating the network until the result is below n (cycle walking, which ends because
//! every cycle returns to its start), in less than 4 passes on average since 4ʰ < 4n.
//!
//! These permutations decide which tokens existing checkpoints resume with and must never change.

use narrows_plan::random::{GAMMA, mix64};

/// Rounds of the network. Four suffice with ideal round functions; small halves need more.
const ROUNDS: usize = 8;

/// A permutation of the integers below a size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Permutation {
    size: u64,
    half_bits: u32,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// The permutation of an epoch.
    pub fn new(size: u64, seed: u64, epoch: u64) -> Permutation {
        let bits = u64::BITS - size.saturating_sub(1).leading_zeros();
        let epoch_key = mix64(mix64(seed.wrapping_add(GAMMA)) ^ epoch);
        let keys = std::array::from_fn(|round| {
            mix64(epoch_key.wrapping_add(GAMMA.wrapping_mul(round as u64 + 1)))
        });
        Permutation { size, half_bits: bits.div_ceil(2), keys }
    }

    /// The image of an index, which is taken modulo the size.
    pub fn at(&self, index: u64) -> u64 {
        if self.size <= 1 {
            return 0;
        }
        let mut image = self.apply_rounds(index % self.size);
        while image >= self.size {
            image = self.apply_rounds(image);
        }
        image
    }

    fn apply_rounds(&self, index: u64) -> u64 {
        // Halves have at most 32 bits, so that no shift is by 64.
        let mask = (1 << self.half_bits) - 1;
        let (mut left, mut right) = (index >> self.half_bits, index & mask);
        for key in self.keys {
            (left, right) = (right, left ^ (mix64(right ^ key) & mask));
        }
        left << self.half_bits | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_integer_has_one_preimage() {
        arbtest::arbtest(|u| {
            let size = u.int_in_range(1..=3000)?;
            let permutation = Permutation::new(size, u.arbitrary()?, u.arbitrary()?);
            let mut images = vec![false; size as usize];
            for index in 0..size {
                let image = permutation.at(index) as usize;
                assert!(!std::mem::replace(&mut images[image], true), "{image} twice");
            }
            Ok(())
        })
        .budget_ms(300);
    }

    #[test]
    fn large_sizes_are_permuted() {
        for size in [1 << 32, (1 << 32) + 1, 1 << 62, (1 << 62) + 1, u64::MAX] {
            let permutation = Permutation::new(size, 1, 2);
            let images: Vec<u64> = (0..100).map(|index| permutation.at(index)).collect();
            assert!(images.iter().all(|image| *image < size));
            let mut distinct = images.clone();
            distinct.sort_unstable();
            distinct.dedup();
            assert_eq!(distinct.len(), images.len());
        }
    }

    /// Over many seeds, each of 12 integers comes first equally often, and so does each ordered pair at
    /// the first two indices: χ² with 11 and 131 degrees of freedom.
    #[test]
    fn orders_are_uniform() {
        let (size, seeds) = (12, 40_000);
        let mut first = vec![0.0; 12];
        let mut pairs = vec![0.0; 144];
        for seed in 0..seeds {
            let permutation = Permutation::new(size, seed, seed % 3);
            let (one, two) = (permutation.at(0), permutation.at(1));
            first[one as usize] += 1.0;
            pairs[(one * size + two) as usize] += 1.0;
        }
        let chi_squared = |counts: &[f64], expected: f64| -> f64 {
            counts.iter().map(|count: &f64| (count - expected).powi(2) / expected).sum()
        };
        assert!(chi_squared(&first, seeds as f64 / 12.0) < 31.3, "{first:?}");
        let pairs: Vec<f64> =
            (0..144).filter(|at| at / 12 != at % 12).map(|at| pairs[at]).collect();
        assert!(chi_squared(&pairs, seeds as f64 / 132.0) < 187.0, "{pairs:?}");
    }

    /// Checkpoints depend on these values.
    #[test]
    fn orders_are_stable() {
        let order = |size, seed, epoch| -> Vec<u64> {
            let permutation = Permutation::new(size, seed, epoch);
            (0..size.min(8)).map(|index| permutation.at(index)).collect()
        };
        assert_eq!(order(8, 0, 0), [0, 3, 6, 2, 1, 7, 5, 4]);
        assert_eq!(order(8, 0, 1), [0, 6, 5, 3, 1, 2, 7, 4]);
        assert_eq!(order(1000, 42, 7), [457, 546, 65, 756, 66, 635, 301, 116]);
    }
}
