//! The rotary position embedding (RoPE).
//!
//! Of the first w features of a head, features i and i + w/2 are a pair. At position p pair i rotates by the
//! angle p·fᵢ, with fᵢ = θ^(−2i/w) unless the frequencies are scaled; the other features of the head keep their
//! values. A scaling may also multiply rotated features by an attention factor. The scalings and their formulas
//! are those of `modeling_rope_utils` of Hugging Face transformers.

use std::f64::consts::{PI, TAU};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The rotary position embedding of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base θ of the frequencies.
    pub theta: f64,
    /// Rotated features w of each head: even, and at most the width of a head.
    pub dim: u64,
    /// Scaling of the frequencies for sequences longer than those of an earlier training.
    pub scaling: Option<RopeScaling>,
}

/// A change of the frequencies.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum RopeScaling {
    /// All frequencies divided by the factor (position interpolation).
    Linear {
        /// Divisor of the frequencies.
        factor: f64,
    },
    /// Low frequencies divided by the factor, high ones kept, and a linear transition between (LLaMA 3.1).
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// Rotations in `original_length` positions up to which a frequency is low.
        low_freq_factor: f64,
        /// Rotations in `original_length` positions from which a frequency is high.
        high_freq_factor: f64,
        /// Sequence length of the earlier training, in tokens.
        original_length: u64,
    },
    /// As `llama3`, with a transition that is linear in the index of the pair (YaRN, arXiv 2309.00071).
    Yarn {
        /// Divisor of low frequencies.
        factor: f64,
        /// Rotations in `original_length` positions from which a frequency is high.
        beta_fast: f64,
        /// Rotations in `original_length` positions up to which a frequency is low.
        beta_slow: f64,
        /// Factor of rotated features.
        attention_factor: f64,
        /// Sequence length of the earlier training, in tokens.
        original_length: u64,
    },
    /// Each frequency divided by a number of its own, which differs between short and long sequences (LongRoPE,
    /// arXiv 2402.13753).
    LongRope {
        /// Divisors in sequences up to `original_length`, one for each pair.
        short: Vec<f64>,
        /// Divisors in longer sequences, one for each pair.
        long: Vec<f64>,
        /// Factor of rotated features.
        attention_factor: f64,
        /// Sequence length of the earlier training, in tokens.
        original_length: u64,
    },
}

/// The frequencies of a [`Rope`] in sequences of one length.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeFrequencies {
    /// Radians per position, one for each pair.
    pub frequencies: Vec<f64>,
    /// Factor of rotated features.
    pub attention_factor: f64,
}

impl Rope {
    /// RoPE of heads of `dim` features, all of them rotated, without scaling.
    pub fn plain(theta: f64, dim: u64) -> Rope {
        Rope { theta, dim, scaling: None }
    }

    /// The frequencies in sequences of `length` tokens.
    pub fn frequencies(&self, length: u64) -> RopeFrequencies {
        let plain = (0..self.dim / 2).map(|pair| {
            let exponent = -2.0 * pair as f64 / self.dim as f64;
            self.theta.powf(exponent)
        });
        let (frequencies, attention_factor) = match &self.scaling {
            None => (plain.collect(), 1.0),
            Some(RopeScaling::Linear { factor }) => (plain.map(|f| f / factor).collect(), 1.0),
            Some(RopeScaling::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_length,
            }) => {
                let share_kept = |f: f64| {
                    let rotations = *original_length as f64 * f / TAU;
                    ((rotations - low) / (high - low)).clamp(0.0, 1.0)
                };
                (plain.map(|f| blend(f, *factor, share_kept(f))).collect(), 1.0)
            }
            Some(RopeScaling::Yarn {
                factor,
                beta_fast,
                beta_slow,
                attention_factor,
                original_length,
            }) => {
                let pair_of = |rotations| self.pair_with_rotations(rotations, *original_length);
                let low = pair_of(*beta_fast).floor().max(0.0);
                let high = pair_of(*beta_slow).ceil().min(self.dim as f64 - 1.0);
                // A transition of no pairs would divide by zero.
                let width = if low == high { 0.001 } else { high - low };
                let share_kept = |pair| 1.0 - ((pair as f64 - low) / width).clamp(0.0, 1.0);
                let scaled = plain.enumerate().map(|(pair, f)| blend(f, *factor, share_kept(pair)));
                (scaled.collect(), *attention_factor)
            }
            Some(RopeScaling::LongRope { short, long, attention_factor, original_length }) => {
                let divisors = if length > *original_length { long } else { short };
                (plain.zip(divisors).map(|(f, divisor)| f / divisor).collect(), *attention_factor)
            }
        };
        RopeFrequencies { frequencies, attention_factor }
    }

    /// Longest sequence whose frequencies are those of all shorter ones, in tokens; `None` where no length
    /// changes them.
    pub fn length_of_change(&self) -> Option<u64> {
        match &self.scaling {
            Some(RopeScaling::LongRope { original_length, .. }) => Some(*original_length),
            _ => None,
        }
    }

    /// Index, as a real number, of the pair that rotates `rotations` times in `length` positions.
    fn pair_with_rotations(&self, rotations: f64, length: u64) -> f64 {
        let wavelength = length as f64 / (2.0 * PI * rotations);
        self.dim as f64 * wavelength.ln() / (2.0 * self.theta.ln())
    }
}

impl RopeFrequencies {
    /// Cosines of all pairs at a position and then their sines, both times the attention factor; computed in
    /// f64.
    pub fn row(&self, position: u64) -> impl Iterator<Item = f64> + '_ {
        let angles = || self.frequencies.iter().map(move |f| position as f64 * f);
        let cosines = angles().map(f64::cos);
        cosines.chain(angles().map(f64::sin)).map(|value| value * self.attention_factor)
    }
}

/// The part `share_kept` of a frequency, and the rest divided by `factor`.
fn blend(frequency: f64, factor: f64, share_kept: f64) -> f64 {
    frequency * share_kept + frequency / factor * (1.0 - share_kept)
}
