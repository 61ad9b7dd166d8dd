//! Permutations that can be asked anywhere: a Feistel network over counters.
//!
//! Let n be the size and h the least number with 4ʰ ≥ n. A number below 4ʰ has a left half l and a
//! right half r of h bits each, and one round is
//!
//! ```text
//! (l, r) ↦ (r, l ⊕ F(r, kᵢ))          F: the low h bits of a mix of r and the round's key
//! ```
//!
//! which can be undone whatever F is; so rounds permute the numbers below 4ʰ. Those below n are
//! permuted by going on until the result is below n (the cycle that a number lies on comes back to
//! it, so this ends), in less than 4 passes on average since 4ʰ < 4n.
//!
//! What is computed here decides what every run reads: change nothing.

/// Four make a pseudorandom permutation of ideal rounds; small halves need more.
const ROUNDS: usize = 8;

/// 2⁶⁴ divided by the golden ratio, odd: the increment of SplitMix64.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// A permutation of the numbers below a size.
#[derive(Clone, Copy, Debug)]
pub struct Permutation {
    size: u64,
    half_bits: u32,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// The permutation of an epoch.
    pub fn new(size: u64, seed: u64, epoch: u64) -> Permutation {
        let bits = u64::BITS - size.saturating_sub(1).leading_zeros();
        let of_epoch = mix(mix(seed.wrapping_add(GOLDEN)) ^ epoch);
        let keys = std::array::from_fn(|round| {
            mix(of_epoch.wrapping_add(GOLDEN.wrapping_mul(round as u64 + 1)))
        });
        Permutation { size, half_bits: bits.div_ceil(2), keys }
    }

    /// The number at a place, which is taken modulo the size.
    pub fn at(&self, place: u64) -> u64 {
        if self.size <= 1 {
            return 0;
        }
        let mut number = self.pass(place % self.size);
        while number >= self.size {
            number = self.pass(number);
        }
        number
    }

    fn pass(&self, number: u64) -> u64 {
        // At most 32 bits each: no shift is by all of a number's bits.
        let mask = (1 << self.half_bits) - 1;
        let (mut left, mut right) = (number >> self.half_bits, number & mask);
        for key in self.keys {
            (left, right) = (right, left ^ (mix(right ^ key) & mask));
        }
        left << self.half_bits | right
    }
}

/// The finaliser of SplitMix64: every bit of the result depends on every bit of the number.
fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_has_one_place() {
        arbtest::arbtest(|u| {
            let size = u.int_in_range(1..=3000)?;
            let permutation = Permutation::new(size, u.arbitrary()?, u.arbitrary()?);
            let mut seen = vec![false; size as usize];
            for place in 0..size {
                let number = permutation.at(place) as usize;
                assert!(!std::mem::replace(&mut seen[number], true), "{number} twice");
            }
            Ok(())
        })
        .budget_ms(300);
    }

    #[test]
    fn sizes_may_be_huge() {
        for size in [1 << 32, (1 << 32) + 1, 1 << 62, (1 << 62) + 1, u64::MAX] {
            let permutation = Permutation::new(size, 1, 2);
            let numbers: Vec<u64> = (0..100).map(|place| permutation.at(place)).collect();
            assert!(numbers.iter().all(|number| *number < size));
            let mut distinct = numbers.clone();
            distinct.sort_unstable();
            distinct.dedup();
            assert_eq!(distinct.len(), numbers.len());
        }
    }

    /// Over many seeds, each of 12 numbers comes first as often as the others, and each pair of
    /// neighbours follows each other as often as the others: χ² with 11 and 131 degrees of freedom.
    #[test]
    fn no_order_is_preferred() {
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

    /// What runs have read stays what they read.
    #[test]
    fn the_order_is_what_it_was() {
        let order = |size, seed, epoch| -> Vec<u64> {
            let permutation = Permutation::new(size, seed, epoch);
            (0..size.min(8)).map(|place| permutation.at(place)).collect()
        };
        assert_eq!(order(8, 0, 0), [0, 3, 6, 2, 1, 7, 5, 4]);
        assert_eq!(order(8, 0, 1), [0, 6, 5, 3, 1, 2, 7, 4]);
        assert_eq!(order(1000, 42, 7), [457, 546, 65, 756, 66, 635, 301, 116]);
    }
}
