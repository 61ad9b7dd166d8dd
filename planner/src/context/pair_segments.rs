//! The segments of a request with other prices of pairs of microbatches.

use std::sync::OnceLock;

use crate::segment::{ExposedShares, PairPrices, PairWeights, SegmentSolver};

/// Weights are multiples of the reciprocal.
pub(super) const STEPS: usize = 4;

/// The segments of a request with other prices of pairs of microbatches, made when they are needed.
#[derive(Default)]
pub(super) struct PairSegments<'a> {
    /// Segments with other weights, by those in forward and in backward passes.
    weighted: [[OnceLock<SegmentSolver<'a>>; STEPS + 1]; STEPS + 1],
    /// Segments with [`ExposedShares::TRIED`].
    exposed: [OnceLock<SegmentSolver<'a>>; ExposedShares::TRIED.len()],
}

impl<'a> PairSegments<'a> {
    /// The segments with these multiples as weights in forward and in backward passes.
    pub(super) fn weighted(
        &self,
        base: &SegmentSolver<'a>,
        [forward, backward]: [usize; 2],
    ) -> &SegmentSolver<'a> {
        let weight = |number: usize| number as f64 / STEPS as f64;
        let weights = PairWeights { forward: weight(forward), backward: weight(backward) };
        let prices = PairPrices::Bound(weights);
        self.weighted[forward][backward].get_or_init(|| base.with_pair_prices(prices))
    }

    /// The segments with each of the shares that are tried.
    pub(super) fn exposed(
        &self,
        base: &SegmentSolver<'a>,
    ) -> impl Iterator<Item = &SegmentSolver<'a>> {
        self.exposed.iter().zip(ExposedShares::TRIED).map(|(segments, shares)| {
            segments.get_or_init(|| base.with_pair_prices(PairPrices::Exposed(shares)))
        })
    }

    /// All that were made.
    pub(super) fn iter(&self) -> impl Iterator<Item = &SegmentSolver<'a>> {
        self.weighted.as_flattened().iter().chain(&self.exposed).filter_map(OnceLock::get)
    }
}
