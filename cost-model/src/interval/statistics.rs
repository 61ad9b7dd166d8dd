//! Quantiles of draws and residuals.

use narrows_plan::random::SplitMix64;

use crate::profile::RelativeError;

/// The probability that an interval contains the measured value.
pub const COVERAGE: f64 = 0.9;

/// Smallest number of residuals that are drawn from in place of a normal distribution; fewer do not show the tails of their
/// distribution.
pub const RESIDUALS_MIN: usize = 10;

/// 90 % of a standard normal distribution lie within ± this value.
const NORMAL_90: f64 = 1.645;

/// The middle 90 % of all sums `draw + scale · residual`, as logarithms relative to the point prediction:
/// low ≤ 0 ≤ high. Draws are ln x(θ_b) − ln x(θ); no draws count as one draw of 0.
pub fn prediction_interval(draws: &[f64], residuals: &[f64], scale: f64) -> [f64; 2] {
    let point = [0.0];
    let draws = if draws.is_empty() { &point[..] } else { draws };
    let scale = scale * small_sample_factor(residuals.len());
    central_interval(
        draws.iter().flat_map(|draw| residuals.iter().map(move |r| draw + scale * r)).collect(),
    )
}

/// √((n + 1)/(n − 1)): the ratio of the spread of the next value of a normal distribution to that of a sample of n.
pub fn small_sample_factor(sample: usize) -> f64 {
    let n = sample.max(2) as f64;
    ((n + 1.0) / (n - 1.0)).sqrt()
}

/// The middle 90 % of logarithms, extended to contain 0.
pub(super) fn central_interval(mut logarithms: Vec<f64>) -> [f64; 2] {
    logarithms.sort_by(f64::total_cmp);
    let tail = (1.0 - COVERAGE) / 2.0;
    let [low, high] = [tail, 1.0 - tail].map(|fraction| quantile(&logarithms, fraction));
    [low.min(0.0), high.max(0.0)]
}

/// A quantile of sorted numbers, with linear interpolation; 0 for an empty list.
pub fn quantile(sorted: &[f64], fraction: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let position = fraction.clamp(0.0, 1.0) * last as f64;
    let (below, above) = (sorted[position.floor() as usize], sorted[position.ceil() as usize]);
    below + (above - below) * position.fract()
}

/// The quantiles of sorted numbers at the middles of `count` equal parts.
pub fn equal_quantiles(sorted: &[f64], count: usize) -> Vec<f64> {
    let fraction = |index: usize| (index as f64 + 0.5) / count as f64;
    (0..count).map(|index| quantile(sorted, fraction(index))).collect()
}

/// The numbers in ascending order, or `count` of their quantiles where there are more than `count`.
pub fn thin_to_quantiles(mut numbers: Vec<f64>, count: usize) -> Vec<f64> {
    numbers.sort_by(f64::total_cmp);
    if numbers.len() <= count { numbers } else { equal_quantiles(&numbers, count) }
}

/// Draws one error of a price, ln(measured / predicted).
///
/// With ten residuals or more the error is one of them; with fewer, it is normally distributed with the 90 %
/// half-width of the profile. Both cases take two numbers from `random`.
pub fn draw_error(error: &RelativeError, random: &mut SplitMix64) -> f64 {
    let sigma = (1.0 + error.half_width_90).ln() / NORMAL_90;
    let normal = random.normal();
    let index = random.below(error.residuals.len().max(1));
    match error.residuals.len() {
        0 => sigma * normal,
        few @ 1..RESIDUALS_MIN => sigma * normal * small_sample_factor(few),
        many => error.residuals[index] * small_sample_factor(many),
    }
}
