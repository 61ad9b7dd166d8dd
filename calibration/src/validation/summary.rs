//! Summaries of compared measurements by table and by source.

use super::compare::ComparedMeasurement;
use super::errors::{ComparisonTime, ErrorSummary, IntervalCoverage, Orderings};

/// Statistics of a group of measurements.
pub struct MeasurementSummary<'a> {
    /// The name of the group.
    pub name: String,
    /// Errors of the predictions.
    pub errors: ErrorSummary,
    /// Orderings within comparison groups.
    pub orderings: Orderings,
    /// Measurements within their intervals.
    pub coverage: IntervalCoverage,
    /// Measurements that a prediction was fitted to.
    pub fitted: usize,
    /// The measurements.
    pub measurements: Vec<&'a ComparedMeasurement<'a>>,
}

/// A summary of each table, in the order in which they first appear.
pub fn summarise_by_table<'a>(
    compared: &'a [ComparedMeasurement<'a>],
) -> Vec<MeasurementSummary<'a>> {
    summarise_by(compared, |entry| format!("{}: {}", entry.file, entry.measurement.table))
}

/// A summary of each source, in the order in which they first appear.
pub fn summarise_by_source<'a>(
    compared: &'a [ComparedMeasurement<'a>],
) -> Vec<MeasurementSummary<'a>> {
    summarise_by(compared, |entry| format!("{}: {}", entry.file, entry.measurement.source))
}

/// Summaries of all measurements, and of those that no prediction was fitted to.
pub fn overall<'a>(compared: &'a [ComparedMeasurement<'a>]) -> Vec<MeasurementSummary<'a>> {
    let all = summary("all".into(), compared.iter().collect());
    let not_fitted = compared.iter().filter(|entry| !entry.fitted).collect();
    all.into_iter().chain(summary("not fitted to".into(), not_fitted)).collect()
}

fn summarise_by<'a>(
    compared: &'a [ComparedMeasurement<'a>],
    name: impl Fn(&ComparedMeasurement) -> String,
) -> Vec<MeasurementSummary<'a>> {
    let mut groups: Vec<(String, Vec<&ComparedMeasurement>)> = vec![];
    for entry in compared {
        let name = name(entry);
        match groups.iter_mut().find(|(known, _)| *known == name) {
            Some((_, measurements)) => measurements.push(entry),
            None => groups.push((name, vec![entry])),
        }
    }
    groups.into_iter().filter_map(|(name, measurements)| summary(name, measurements)).collect()
}

fn summary<'a>(
    name: String,
    measurements: Vec<&'a ComparedMeasurement<'a>>,
) -> Option<MeasurementSummary<'a>> {
    let pairs = measurements.iter().map(|entry| (entry.predicted_s, entry.measured_s));
    let errors = ErrorSummary::of(pairs)?;
    let comparison_time = |entry: &&'a ComparedMeasurement| {
        let comparison_group = entry.measurement.comparison_group.as_deref()?;
        let (measured_s, predicted_s) = (entry.measured_s, entry.predicted_s);
        Some(ComparisonTime { comparison_group, measured_s, predicted_s })
    };
    let comparison_times: Vec<ComparisonTime> =
        measurements.iter().filter_map(comparison_time).collect();
    let orderings = Orderings::count(&comparison_times);
    let coverage = IntervalCoverage::count(
        measurements.iter().map(|entry| (entry.measured_s, entry.interval_s)),
    );
    let fitted = measurements.iter().filter(|entry| entry.fitted).count();
    Some(MeasurementSummary { name, errors, orderings, coverage, fitted, measurements })
}
