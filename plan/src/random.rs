//! SplitMix64: the source of all random bits outside tests.
//!
//! Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014). The n-th output is
//! [`mix64`] of `seed + n·`[`GAMMA`], so a stream depends on its seed alone, on every machine, and any position of
//! it can be computed directly. Initial parameters, the order of sequences and prediction intervals depend on these
//! bits: a change of the generator changes losses and predictions.

/// The increment of the state: 2⁶⁴ over the golden ratio, made odd.
pub const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// The output function: a bijection of 64 bits in which each bit depends on all bits of the argument.
pub fn mix64(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// A sequential SplitMix64 generator.
///
/// ```
/// use narrows_plan::random::SplitMix64;
///
/// assert_eq!(SplitMix64::new(0).next_u64(), 0xe220_a839_7b1d_cdaf);
/// ```
#[derive(Clone, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// A generator with this seed.
    pub fn new(seed: u64) -> SplitMix64 {
        SplitMix64(seed)
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GAMMA);
        mix64(self.0)
    }

    /// A number below `count`, which must be more than zero.
    pub fn below(&mut self, count: usize) -> usize {
        ((u128::from(self.next_u64()) * count as u128) >> 64) as usize
    }

    /// A number in the open interval (0, 1).
    pub fn uniform(&mut self) -> f64 {
        ((self.next_u64() >> 11) as f64 + 0.5) / (1_u64 << 53) as f64
    }

    /// A number of the standard normal distribution, by Box and Muller.
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * self.uniform().ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first outputs for the seed 1234567, as the authors' C code prints them.
    #[test]
    fn bits_equal_the_reference_implementation() {
        let mut random = SplitMix64::new(1_234_567);
        assert_eq!(random.next_u64(), 6_457_827_717_110_365_317);
        assert_eq!(random.next_u64(), 3_203_168_211_198_807_973);
        assert_eq!(mix64(1_234_567_u64.wrapping_add(GAMMA)), 6_457_827_717_110_365_317);
    }
}
