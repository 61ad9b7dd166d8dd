//! Statistics of predictions beside measurements.
//!
//! ```text
//! eᵢ = predictedᵢ / measuredᵢ − 1      mean |e|, median |e|, worst |e|, signed mean of e
//! ```
//! A comparison group is one job with several implementations. Of every two whose measured times differ, the faster one
//! must be predicted to be the faster one.

use serde::Serialize;

/// The errors of a set of measurements.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ErrorSummary {
    /// Number of measurements.
    #[serde(rename = "figures")]
    pub count: usize,
    /// Mean of |e|, in percent.
    pub mean_absolute_percent: f64,
    /// Median of |e|, in percent.
    pub median_absolute_percent: f64,
    /// The largest |e|, in percent.
    pub worst_absolute_percent: f64,
    /// Mean of e, in percent: above zero when predictions are too long on the whole.
    pub mean_signed_percent: f64,
}

/// Number of pairs within comparison groups, and of those that are predicted in the measured order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Orderings {
    /// Pairs within comparison groups.
    pub pairs: usize,
    /// Pairs in the right order.
    pub right: usize,
}

/// Times of one implementation in a comparison group.
#[derive(Clone, Copy)]
pub(super) struct ComparisonTime<'a> {
    pub comparison_group: &'a str,
    pub measured_s: f64,
    pub predicted_s: f64,
}

/// Number of measurements within their intervals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct IntervalCoverage {
    /// Number of measurements.
    #[serde(rename = "figures")]
    pub count: usize,
    /// Measurements within their intervals.
    pub inside: usize,
}

impl ErrorSummary {
    /// Summarises pairs of a predicted and a measured time; `None` for no pairs.
    pub fn of(pairs: impl IntoIterator<Item = (f64, f64)>) -> Option<ErrorSummary> {
        let errors: Vec<f64> = pairs.into_iter().map(|(p, m)| (p / m - 1.0) * 100.0).collect();
        let mut sizes: Vec<f64> = errors.iter().map(|error| error.abs()).collect();
        sizes.sort_by(f64::total_cmp);
        let worst = *sizes.last()?;
        let (low, high) = (sizes[(sizes.len() - 1) / 2], sizes[sizes.len() / 2]);
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
        Some(ErrorSummary {
            count: errors.len(),
            mean_absolute_percent: mean(&sizes),
            median_absolute_percent: (low + high) / 2.0,
            worst_absolute_percent: worst,
            mean_signed_percent: mean(&errors),
        })
    }
}

impl Orderings {
    /// Counts the pairs of each comparison group.
    pub(super) fn count(times: &[ComparisonTime]) -> Orderings {
        let mut orderings = Orderings::default();
        for (index, one) in times.iter().enumerate() {
            for other in &times[index + 1..] {
                if one.comparison_group != other.comparison_group
                    || one.measured_s == other.measured_s
                {
                    continue;
                }
                orderings.pairs += 1;
                let measured = one.measured_s < other.measured_s;
                let predicted = one.predicted_s < other.predicted_s;
                let tied = one.predicted_s == other.predicted_s;
                orderings.right += usize::from(!tied && measured == predicted);
            }
        }
        orderings
    }
}

impl IntervalCoverage {
    /// Counts measurements with their intervals.
    pub fn count(measurements: impl IntoIterator<Item = (f64, [f64; 2])>) -> IntervalCoverage {
        let mut coverage = IntervalCoverage::default();
        for (measured_s, [low, high]) in measurements {
            coverage.count += 1;
            coverage.inside += usize::from(low <= measured_s && measured_s <= high);
        }
        coverage
    }

    /// Fraction of the measurements within their intervals; `None` for no measurements.
    pub fn share(&self) -> Option<f64> {
        (self.count > 0).then(|| self.inside as f64 / self.count as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_summarised() {
        let errors = ErrorSummary::of([(1.1, 1.0), (0.8, 1.0), (1.0, 1.0), (1.3, 1.0)]).unwrap();
        assert_eq!(errors.count, 4);
        assert!((errors.mean_absolute_percent - 15.0).abs() < 1e-9);
        assert!((errors.median_absolute_percent - 15.0).abs() < 1e-9);
        assert!((errors.worst_absolute_percent - 30.0).abs() < 1e-9);
        assert!((errors.mean_signed_percent - 5.0).abs() < 1e-9);
        assert_eq!(ErrorSummary::of([]), None);
    }

    #[test]
    fn only_pairs_of_one_group_are_compared() {
        let time = |comparison_group, measured_s, predicted_s| ComparisonTime {
            comparison_group,
            measured_s,
            predicted_s,
        };
        let times =
            [time("a", 1.0, 1.0), time("a", 2.0, 3.0), time("a", 3.0, 2.0), time("b", 1.0, 9.0)];
        assert_eq!(Orderings::count(&times), Orderings { pairs: 3, right: 2 });
        let tied = [time("a", 1.0, 1.0), time("a", 2.0, 1.0), time("a", 2.0, 5.0)];
        assert_eq!(Orderings::count(&tied), Orderings { pairs: 2, right: 1 });
    }
}
