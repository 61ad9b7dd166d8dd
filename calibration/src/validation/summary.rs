//! Summaries of compared figures by table and by source.

use super::compare::ComparedFigure;
use super::errors::{ComparisonTime, ErrorSummary, IntervalCoverage, Orderings};

/// Statistics of a group of figures.
pub struct FigureSummary<'a> {
    /// The name of the group.
    pub name: String,
    /// Errors of the predictions.
    pub errors: ErrorSummary,
    /// Orderings within comparison groups.
    pub orderings: Orderings,
    /// Figures within their intervals.
    pub coverage: IntervalCoverage,
    /// Figures that a prediction was fitted to.
    pub fitted: usize,
    /// The figures.
    pub figures: Vec<&'a ComparedFigure<'a>>,
}

/// A summary of each table, in the order in which they first appear.
pub fn summarize_by_table<'a>(compared: &'a [ComparedFigure<'a>]) -> Vec<FigureSummary<'a>> {
    summarize_by(compared, |figure| format!("{}: {}", figure.file, figure.measurement.table))
}

/// A summary of each source, in the order in which they first appear.
pub fn summarize_by_source<'a>(compared: &'a [ComparedFigure<'a>]) -> Vec<FigureSummary<'a>> {
    summarize_by(compared, |figure| format!("{}: {}", figure.file, figure.measurement.source))
}

/// Summaries of all figures, and of those that no prediction was fitted to.
pub fn overall<'a>(compared: &'a [ComparedFigure<'a>]) -> Vec<FigureSummary<'a>> {
    let all = summary("all".into(), compared.iter().collect());
    let not_fitted = compared.iter().filter(|figure| !figure.fitted).collect();
    all.into_iter().chain(summary("not fitted to".into(), not_fitted)).collect()
}

fn summarize_by<'a>(
    compared: &'a [ComparedFigure<'a>],
    name: impl Fn(&ComparedFigure) -> String,
) -> Vec<FigureSummary<'a>> {
    let mut groups: Vec<(String, Vec<&ComparedFigure>)> = vec![];
    for figure in compared {
        let name = name(figure);
        match groups.iter_mut().find(|(known, _)| *known == name) {
            Some((_, figures)) => figures.push(figure),
            None => groups.push((name, vec![figure])),
        }
    }
    groups.into_iter().filter_map(|(name, figures)| summary(name, figures)).collect()
}

fn summary<'a>(name: String, figures: Vec<&'a ComparedFigure<'a>>) -> Option<FigureSummary<'a>> {
    let pairs = figures.iter().map(|figure| (figure.predicted_s, figure.measured_s));
    let errors = ErrorSummary::of(pairs)?;
    let comparison_time = |figure: &&'a ComparedFigure| {
        let comparison_group = figure.measurement.comparison_group.as_deref()?;
        let (measured_s, predicted_s) = (figure.measured_s, figure.predicted_s);
        Some(ComparisonTime { comparison_group, measured_s, predicted_s })
    };
    let comparison_times: Vec<ComparisonTime> =
        figures.iter().filter_map(comparison_time).collect();
    let orderings = Orderings::count(&comparison_times);
    let coverage = IntervalCoverage::count(figures.iter().map(|of| (of.measured_s, of.interval_s)));
    let fitted = figures.iter().filter(|figure| figure.fitted).count();
    Some(FigureSummary { name, errors, orderings, coverage, fitted, figures })
}
