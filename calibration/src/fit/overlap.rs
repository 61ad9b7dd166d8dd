//! The factors by which computation and the collectives beside it slow each other on a CPU.
//!
//! Instruction i takes aᵢ in a step in order, and dᵢ in a step with overlap, of which the fraction fᵢ beside instructions of
//! the other kind. With the factor s on what runs beside them,
//!
//! ```text
//! aᵢ = (1 − fᵢ)·dᵢ + fᵢ·dᵢ / s          s = Σ fᵢ·dᵢ / (Σ aᵢ − Σ (1 − fᵢ)·dᵢ)
//! ```
//! over the instructions of a step with fᵢ > 0. The median over pairs of a step in order and one with overlap counts, because
//! other load of the machine disturbs single steps.

use std::ops::RangeInclusive;

use narrows_cost_model::profile::{OverlapSpec, Profile, Provenance};
use narrows_plan::Defects;

use crate::statistics::upper_median;

/// Factors of profiles.
const SLOWDOWN: RangeInclusive<f64> = 1.0..=10.0;

/// Times of instructions of one kind that ran, for a part of their time, beside those of the other kind.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OverlappedTimes {
    /// Σ aᵢ: their times in order.
    pub alone_s: f64,
    /// Σ fᵢ·dᵢ: their time beside the other kind.
    pub beside_s: f64,
    /// Σ (1 − fᵢ)·dᵢ: the rest of their time.
    pub rest_s: f64,
}

/// Times of the instructions of a step that overlap.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OverlappedInstructions {
    /// Computation beside collectives.
    pub computation: OverlappedTimes,
    /// Collectives beside computation.
    pub collectives: OverlappedTimes,
}

impl OverlappedTimes {
    /// The factor; `None` where nothing ran beside the other kind. Without progress beside the other kind, it is the largest of
    /// profiles.
    fn slowdown(&self) -> Option<f64> {
        let (low, high) = SLOWDOWN.into_inner();
        let alone_s = self.alone_s - self.rest_s;
        let is_stopped = alone_s * high <= self.beside_s;
        let factor = if is_stopped { high } else { self.beside_s / alone_s };
        (self.beside_s > 0.0).then(|| factor.clamp(low, high))
    }
}

/// The profile with the factors that the steps show; unchanged where nothing overlapped.
///
/// # Errors
/// A profile that the factors make invalid.
pub fn with_overlap(
    profile: Profile,
    steps: &[OverlappedInstructions],
    provenance: Provenance,
) -> Result<Profile, Defects> {
    let median = |times: fn(&OverlappedInstructions) -> OverlappedTimes| {
        upper_median(steps.iter().filter_map(|step| times(step).slowdown()).collect())
    };
    let slowdowns = [median(|step| step.computation), median(|step| step.collectives)];
    let [Some(compute_slowdown), Some(collective_slowdown)] = slowdowns else {
        return Ok(profile);
    };
    let mut file = profile.file().clone();
    file.overlap = Some(OverlapSpec { compute_slowdown, collective_slowdown, provenance });
    file.resolve()
}
