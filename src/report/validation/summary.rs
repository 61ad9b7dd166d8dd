//! Errors and coverage of groups of measurements.

use narrows_calibration::validation::{
    ErrorSummary, IntervalCoverage, MeasurementSummary, Orderings,
};
use serde::Serialize;

use crate::args::Detail;
use crate::report::page::{Align, Page};
use crate::text::{percents, plural, signed_percents};

/// Errors of a group of measurements.
#[derive(Serialize)]
pub(super) struct SummaryReport {
    name: String,
    fitted: usize,
    #[serde(flatten)]
    errors: ErrorSummary,
    orderings: Orderings,
    coverage_90: CoverageReport,
}

impl SummaryReport {
    /// The name of the group.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Errors and coverage in words.
    pub(super) fn verdict(&self) -> String {
        let ErrorSummary { count, mean_absolute_percent, worst_absolute_percent, .. } = self.errors;
        format!(
            "Predictions are {} from the measurements on average, at worst {}; {} of {} lie within their 90 % interval.",
            percents(mean_absolute_percent, 1),
            percents(worst_absolute_percent, 1),
            self.coverage_90.inside,
            plural(count as u64, "measurement"),
        )
    }
}

#[derive(Serialize)]
pub(super) struct CoverageReport {
    inside: usize,
    share: Option<f64>,
}

impl SummaryReport {
    pub(super) fn new(summary: MeasurementSummary) -> SummaryReport {
        let MeasurementSummary { name, errors, orderings, coverage, fitted, .. } = summary;
        let IntervalCoverage { inside, .. } = coverage;
        let coverage_90 = CoverageReport { inside, share: coverage.share() };
        SummaryReport { name, fitted, errors, orderings, coverage_90 }
    }
}

/// The errors of groups of measurements.
pub(super) fn table(page: &mut Page, summaries: &[SummaryReport], detail: Detail) {
    let row = |summary: &SummaryReport| {
        let ErrorSummary {
            count,
            mean_absolute_percent: mean,
            median_absolute_percent: median,
            worst_absolute_percent: worst,
            mean_signed_percent: bias,
        } = summary.errors;
        let Orderings { pairs, right } = summary.orderings;
        let full = |cell: String| if detail == Detail::Full { cell } else { String::new() };
        vec![
            summary.name.clone(),
            count.to_string(),
            full(summary.fitted.to_string()),
            percents(mean, 2),
            full(percents(median, 2)),
            percents(worst, 2),
            full(signed_percents(bias, 2)),
            if pairs == 0 { String::new() } else { format!("{right} of {pairs}") },
            format!("{} of {count}", summary.coverage_90.inside),
        ]
    };
    let columns = [
        ("", Align::Left),
        ("n", Align::Right),
        ("fitted", Align::Right),
        ("mean", Align::Right),
        ("median", Align::Right),
        ("worst", Align::Right),
        ("bias", Align::Right),
        ("order", Align::Right),
        ("in interval", Align::Right),
    ];
    page.table(&columns, &summaries.iter().map(row).collect::<Vec<_>>());
}
