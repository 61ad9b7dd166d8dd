//! Statistics of predictions beside measurements.
//!
//! ```text
//! eᵢ = predictedᵢ / measuredᵢ − 1      mean |e|, median |e|, worst |e|, signed mean of e
//! ```
//! A race is a job that was done in several ways: of every two of them whose measured times differ, the faster one must
//! be predicted to be the faster one.

use serde::Serialize;

/// The errors of a set of figures.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ErrorSummary {
    /// Number of figures.
    pub figures: usize,
    /// Mean of |e|, in percent.
    pub mean_absolute_percent: f64,
    /// Median of |e|, in percent.
    pub median_absolute_percent: f64,
    /// The largest |e|, in percent.
    pub worst_absolute_percent: f64,
    /// Mean of e, in percent: above zero when predictions are too long on the whole.
    pub mean_signed_percent: f64,
}

/// How often the faster of two ways to do a job is predicted to be the faster one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Orderings {
    /// Pairs within races.
    pub pairs: usize,
    /// Pairs in the right order.
    pub right: usize,
}

/// One way to do a job.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OrderingCase<'a> {
    /// The job.
    pub job: &'a str,
    /// Its measured time.
    pub measured_s: f64,
    /// Its predicted time.
    pub predicted_s: f64,
}

/// How many figures lie within their intervals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Coverage {
    /// Number of figures.
    pub figures: usize,
    /// Figures within their intervals.
    pub inside: usize,
}

impl ErrorSummary {
    /// Summarizes pairs of a predicted and a measured time; `None` for no pairs.
    pub fn of(pairs: impl IntoIterator<Item = (f64, f64)>) -> Option<ErrorSummary> {
        let errors: Vec<f64> = pairs.into_iter().map(|(p, m)| (p / m - 1.0) * 100.0).collect();
        let mut sizes: Vec<f64> = errors.iter().map(|error| error.abs()).collect();
        sizes.sort_by(f64::total_cmp);
        let worst = *sizes.last()?;
        let (low, high) = (sizes[(sizes.len() - 1) / 2], sizes[sizes.len() / 2]);
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
        Some(ErrorSummary {
            figures: errors.len(),
            mean_absolute_percent: mean(&sizes),
            median_absolute_percent: (low + high) / 2.0,
            worst_absolute_percent: worst,
            mean_signed_percent: mean(&errors),
        })
    }
}

impl Orderings {
    /// Counts the pairs of each job.
    pub fn count(cases: &[OrderingCase]) -> Orderings {
        let mut counted = Orderings::default();
        for (index, one) in cases.iter().enumerate() {
            for other in &cases[index + 1..] {
                if one.job != other.job || one.measured_s == other.measured_s {
                    continue;
                }
                counted.pairs += 1;
                let measured = one.measured_s < other.measured_s;
                let predicted = one.predicted_s < other.predicted_s;
                let tied = one.predicted_s == other.predicted_s;
                counted.right += usize::from(!tied && measured == predicted);
            }
        }
        counted
    }
}

impl Coverage {
    /// Counts figures with their intervals.
    pub fn count(figures: impl IntoIterator<Item = (f64, [f64; 2])>) -> Coverage {
        let mut counted = Coverage::default();
        for (figure, [low, high]) in figures {
            counted.figures += 1;
            counted.inside += usize::from(low <= figure && figure <= high);
        }
        counted
    }

    /// The fraction within; `None` for no figures.
    pub fn share(&self) -> Option<f64> {
        (self.figures > 0).then(|| self.inside as f64 / self.figures as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_summarized() {
        let errors = ErrorSummary::of([(1.1, 1.0), (0.8, 1.0), (1.0, 1.0), (1.3, 1.0)]).unwrap();
        assert_eq!(errors.figures, 4);
        assert!((errors.mean_absolute_percent - 15.0).abs() < 1e-9);
        assert!((errors.median_absolute_percent - 15.0).abs() < 1e-9);
        assert!((errors.worst_absolute_percent - 30.0).abs() < 1e-9);
        assert!((errors.mean_signed_percent - 5.0).abs() < 1e-9);
        assert_eq!(ErrorSummary::of([]), None);
    }

    #[test]
    fn pairs_within_one_job_are_ordered() {
        let case = |job, measured_s, predicted_s| OrderingCase { job, measured_s, predicted_s };
        let cases =
            [case("a", 1.0, 1.0), case("a", 2.0, 3.0), case("a", 3.0, 2.0), case("b", 1.0, 9.0)];
        assert_eq!(Orderings::count(&cases), Orderings { pairs: 3, right: 2 });
        let tied = [case("a", 1.0, 1.0), case("a", 2.0, 1.0), case("a", 2.0, 5.0)];
        assert_eq!(Orderings::count(&tied), Orderings { pairs: 2, right: 1 });
    }
}
