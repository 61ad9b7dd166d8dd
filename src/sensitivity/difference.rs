//! Elasticities and gains with their intervals.

use narrows_cost_model::interval::quantile;
use schemars::JsonSchema;
use serde::Serialize;

use super::variant::StepSample;

/// Probability that a draw lies below an interval, and above it.
const TAIL: f64 = 0.05;

/// A number with its 90 % interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Estimate {
    /// The value.
    pub value: f64,
    /// 90 % interval of the value.
    pub interval: [f64; 2],
}

/// d ln(step time) / d ln(value) between two samples whose values differ by this factor.
pub fn elasticity(low: &StepSample, high: &StepSample, factor: f64) -> Estimate {
    let log_factor = factor.ln();
    estimate(low, high, |log_ratio| log_ratio / log_factor)
}

/// Share of the step time that a change saves: 1 − changed / present.
pub fn gain(present: &StepSample, changed: &StepSample) -> Estimate {
    estimate(present, changed, |log_ratio| 0.0 - log_ratio.exp_m1())
}

/// A function of ln(b / a), for the predicted times and for every draw.
fn estimate(a: &StepSample, b: &StepSample, of: impl Fn(f64) -> f64) -> Estimate {
    let value = of((b.time_s / a.time_s).ln());
    let mut draws: Vec<f64> =
        a.log_times.iter().zip(&b.log_times).map(|(a, b)| of(b - a)).collect();
    draws.sort_by(f64::total_cmp);
    let [low, high] = [TAIL, 1.0 - TAIL].map(|fraction| quantile(&draws, fraction));
    Estimate { value, interval: [low.min(value), high.max(value)] }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(time_s: f64, ratios: [f64; 3]) -> StepSample {
        StepSample { time_s, log_times: ratios.map(|ratio| (time_s * ratio).ln()).to_vec() }
    }

    /// Half of a + b/x with a = b = x = 1 depends on x: the elasticity is −1/2.
    #[test]
    fn an_elasticity_is_the_share_that_scales() {
        let (low, high) = (1.0 / 1.05, 1.05);
        let [at_low, at_high] = [low, high].map(|x| sample(1.0 + 1.0 / x, [1.0; 3]));
        let found = elasticity(&at_low, &at_high, high / low);
        assert!((found.value + 0.5).abs() < 1e-3, "{found:?}");
        assert!(found.interval.iter().all(|end| (end - found.value).abs() < 1e-12), "{found:?}");
    }

    #[test]
    fn errors_of_both_ends_cancel() {
        let (a, b) = (sample(2.0, [0.5, 1.0, 2.0]), sample(1.0, [0.5, 1.0, 2.0]));
        let found = gain(&a, &b);
        assert!((found.value - 0.5).abs() < 1e-12);
        assert!(found.interval.iter().all(|end| (end - 0.5).abs() < 1e-12), "{found:?}");
        let b = sample(1.0, [1.0, 1.0, 1.0]);
        let [low, high] = gain(&a, &b).interval;
        assert!(low < 0.2 && high > 0.7, "errors that differ widen the interval");
    }
}
