//! Predicted beside measured: a table for each kind of figure, then the errors in sum.

use narrows_calibration::measurements::{MeasurementUnit, MeasurementsFile};
use narrows_calibration::validation::{
    ComparedFigure, Coverage, ErrorSummary, FigureSummary, LeftOutFigure, Orderings, leave_one_out,
    overall, summarize_by_source, summarize_by_table,
};
use narrows_plan::Seconds;
use serde::Serialize;

use super::page::{Align, TextPage, percent, percents, plural, signed_percents};
use crate::args::low::executor_name;
use crate::args::validate::{MeasurementInput, ValidateSettings};

/// More figures than this in one table are summed up only.
const SHOWN_MAX: usize = 60;

/// The report for people.
pub fn text(asked: &ValidateSettings, compared: &[ComparedFigure]) -> String {
    let mut page = TextPage::default();
    for table in summarize_by_table(compared) {
        page.heading(&table.name);
        if table.figures.len() <= SHOWN_MAX {
            figures(&mut page, &table);
        } else {
            let many = plural(table.figures.len() as u64, "figure");
            page.line(format!("{many}: --format json prints them"));
        }
    }
    for (title, summaries) in [
        ("Errors by table", summarize_by_table(compared)),
        ("Errors by source", summarize_by_source(compared)),
        ("Errors overall", overall(compared)),
    ] {
        page.heading(title);
        errors(&mut page, &summaries);
    }
    other_terms(&mut page, compared);
    without_themselves(&mut page, &leave_one_out(compared));
    hardware(&mut page, asked, compared);
    page.heading("Sources");
    for (name, source) in asked.files.iter().flat_map(|file| &file.read.sources) {
        page.paragraph(&format!("{name}: {}. {}", source.citation, source.conditions));
    }
    page.finish()
}

fn figures(page: &mut TextPage, table: &FigureSummary) {
    let row = |one: &&ComparedFigure| {
        let error = (one.predicted_s / one.measured_s - 1.0) * 100.0;
        vec![
            one.measurement.name.clone(),
            executor_name(one.measurement.executor).to_string(),
            time(one, one.measured_s),
            time(one, one.predicted_s),
            signed_percents(error, 1),
            format!("{} to {}", Seconds(one.interval_s[0]), time(one, one.interval_s[1])),
            match (one.fitted, one.fit_conditions) {
                (true, None) => "fitted to it".into(),
                (true, Some(_)) => "fitted to it, on other terms".into(),
                (false, _) => String::new(),
            },
        ]
    };
    let rows: Vec<_> = table.figures.iter().map(row).collect();
    let columns = [
        ("figure", Align::Left),
        ("executor", Align::Left),
        ("measured", Align::Right),
        ("predicted", Align::Right),
        ("error", Align::Right),
        ("90 % between", Align::Left),
        ("", Align::Left),
    ];
    page.table(&columns, &rows);
}

/// A time, and for what where it is not for the figure itself.
fn time(of: &ComparedFigure, seconds: f64) -> String {
    let time = Seconds(seconds);
    if per_gigabyte(of) { format!("{time} a GB") } else { time.to_string() }
}

/// Whether a figure's time is what freeing 10⁹ bytes takes.
fn per_gigabyte(of: &ComparedFigure) -> bool {
    of.measurement.unit == MeasurementUnit::MbPerMs
}

fn errors(page: &mut TextPage, summaries: &[FigureSummary]) {
    let row = |summary: &FigureSummary| {
        let ErrorSummary {
            figures,
            mean_absolute_percent: mean,
            median_absolute_percent: median,
            worst_absolute_percent: worst,
            mean_signed_percent: sign,
        } = summary.errors;
        let Orderings { pairs, right } = summary.orderings;
        let Coverage { figures: of, inside } = summary.coverage;
        let share = percent(summary.coverage.share().unwrap_or_default());
        let order = if pairs == 0 { String::new() } else { format!("{right} of {pairs}") };
        vec![
            summary.name.clone(),
            figures.to_string(),
            if summary.fitted == 0 { String::new() } else { summary.fitted.to_string() },
            percents(mean, 2),
            percents(median, 2),
            percents(worst, 2),
            signed_percents(sign, 2),
            order,
            format!("{inside} of {of} ({share})"),
        ]
    };
    let rows: Vec<_> = summaries.iter().map(row).collect();
    let columns = [
        ("", Align::Left),
        ("figures", Align::Right),
        ("fitted to", Align::Right),
        ("mean", Align::Right),
        ("median", Align::Right),
        ("worst", Align::Right),
        ("signed", Align::Right),
        ("in the right order", Align::Right),
        ("in the 90 % interval", Align::Right),
    ];
    page.table(&columns, &rows);
}

/// Figures of a fit that are looked at otherwise than the fit did.
fn other_terms(page: &mut TextPage, compared: &[ComparedFigure]) {
    let mut found: Vec<([String; 3], u64)> = vec![];
    for terms in compared.iter().filter_map(|one| one.fit_conditions) {
        let words = terms.labels();
        match found.iter_mut().find(|(known, _)| *known == words) {
            Some((_, count)) => *count += 1,
            None => found.push((words, 1)),
        }
    }
    for ([hardware, recompute, vocabulary], count) in found {
        page.paragraph(&format!(
            "{} the fit of GPTs has seen on other terms than the file's: hardware `{hardware}`, recomputation \
             `{recompute}`, a vocabulary of {vocabulary}. What stands beside them is neither a prediction nor an \
             error of that fit.",
            plural(count, "figure"),
        ));
    }
}

/// What the factor of steps is worth.
fn without_themselves(page: &mut TextPage, figures: &[LeftOutFigure]) {
    if figures.is_empty() {
        return;
    }
    page.heading("Step times that were fitted to, each left out of the fit in turn");
    let row = |one: &LeftOutFigure| {
        let figure = one.figure;
        vec![
            figure.measurement.name.clone(),
            time(figure, figure.measured_s),
            time(figure, one.predicted_s),
            signed_percents(one.error() * 100.0, 1),
        ]
    };
    let columns = [
        ("figure left out", Align::Left),
        ("measured", Align::Right),
        ("predicted without it", Align::Right),
        ("error", Align::Right),
    ];
    page.table(&columns, &figures.iter().map(row).collect::<Vec<_>>());
}

/// Which profiles were used, where some were given: one may be called like a preset.
fn hardware(page: &mut TextPage, asked: &ValidateSettings, compared: &[ComparedFigure]) {
    if asked.profiles.is_empty() {
        return;
    }
    page.heading("Hardware");
    for HardwareReport { name, from, hides_preset } in used(asked, compared) {
        let instead = if hides_preset { ", in the place of the preset of that name" } else { "" };
        page.line(format!("{name}: {from}{instead}"));
    }
}

/// The profiles that figures are of, each once.
fn used<'a>(
    asked: &'a ValidateSettings,
    compared: &'a [ComparedFigure<'a>],
) -> Vec<HardwareReport<'a>> {
    let mut used: Vec<HardwareReport> = vec![];
    for one in compared {
        let name = one.measurement.hardware.as_str();
        if used.iter().all(|known| known.name != name) {
            let given = asked.given(name);
            let file = given.filter(|given| given.path != name);
            let from = file.map_or("the preset", |given| given.path.as_str());
            used.push(HardwareReport {
                name,
                from,
                hides_preset: given.is_some_and(MeasurementInput::hides_preset),
            });
        }
    }
    used
}

/// The report for programs.
#[derive(Serialize)]
pub struct ValidationReport<'a> {
    figures: Vec<FigureReport<'a>>,
    /// Step times that were fitted to, by a fit to the others.
    left_out: Vec<LeftOutReport<'a>>,
    hardware: Vec<HardwareReport<'a>>,
    tables: Vec<SummaryReport>,
    sources: Vec<SummaryReport>,
    overall: Vec<SummaryReport>,
    citations: Vec<SourceReport<'a>>,
}

#[derive(Serialize)]
struct FigureReport<'a> {
    file: &'a str,
    table: &'a str,
    source: &'a str,
    name: &'a str,
    hardware: &'a str,
    executor: &'static str,
    race: Option<&'a str>,
    fitted: bool,
    /// Where it is fitted to on other terms than the file's: hardware, recomputation, vocabulary.
    terms_of_fit: Option<[String; 3]>,
    /// What the times are for: the figure, or 10⁹ bytes that recomputation frees.
    per: &'static str,
    measured_s: f64,
    predicted_s: f64,
    error_percent: f64,
    interval_s: [f64; 2],
    inside: bool,
}

#[derive(Serialize)]
struct LeftOutReport<'a> {
    file: &'a str,
    name: &'a str,
    measured_s: f64,
    predicted_s: f64,
    error_percent: f64,
}

/// A profile that figures are of.
#[derive(Serialize)]
struct HardwareReport<'a> {
    name: &'a str,
    /// The path of its file, or that it is a preset.
    from: &'a str,
    /// Whether a file is taken in the place of the preset of its name.
    hides_preset: bool,
}

#[derive(Serialize)]
struct SummaryReport {
    name: String,
    fitted: usize,
    #[serde(flatten)]
    errors: ErrorSummary,
    orderings: Orderings,
    coverage_90: CoverageReport,
}

#[derive(Serialize)]
struct CoverageReport {
    inside: usize,
    share: Option<f64>,
}

#[derive(Serialize)]
struct SourceReport<'a> {
    file: &'a str,
    name: &'a str,
    citation: &'a str,
    conditions: &'a str,
}

/// The JSON document.
pub fn json<'a>(
    asked: &'a ValidateSettings,
    compared: &'a [ComparedFigure<'a>],
) -> ValidationReport<'a> {
    let figure = |one: &'a ComparedFigure<'a>| FigureReport {
        file: one.file,
        table: &one.measurement.table,
        source: &one.measurement.source,
        name: &one.measurement.name,
        hardware: &one.measurement.hardware,
        executor: executor_name(one.measurement.executor),
        race: one.measurement.race.as_deref(),
        fitted: one.fitted,
        terms_of_fit: one.fit_conditions.map(|terms| terms.labels()),
        per: if per_gigabyte(one) { "gigabyte_freed" } else { "figure" },
        measured_s: one.measured_s,
        predicted_s: one.predicted_s,
        error_percent: (one.predicted_s / one.measured_s - 1.0) * 100.0,
        interval_s: one.interval_s,
        inside: (one.interval_s[0]..=one.interval_s[1]).contains(&one.measured_s),
    };
    let sums = |summaries: Vec<FigureSummary>| {
        let sum = |FigureSummary { name, errors, orderings, coverage, fitted, .. }| {
            let coverage_90 = CoverageReport { inside: coverage.inside, share: coverage.share() };
            SummaryReport { name, fitted, errors, orderings, coverage_90 }
        };
        summaries.into_iter().map(sum).collect()
    };
    let cited = |file: &'a MeasurementsFile| {
        file.sources.iter().map(|(name, source)| SourceReport {
            file: &file.name,
            name,
            citation: &source.citation,
            conditions: &source.conditions,
        })
    };
    let without = |one: LeftOutFigure<'a>| LeftOutReport {
        file: one.figure.file,
        name: &one.figure.measurement.name,
        measured_s: one.figure.measured_s,
        predicted_s: one.predicted_s,
        error_percent: one.error() * 100.0,
    };
    ValidationReport {
        figures: compared.iter().map(figure).collect(),
        left_out: leave_one_out(compared).into_iter().map(without).collect(),
        hardware: used(asked, compared),
        tables: sums(summarize_by_table(compared)),
        sources: sums(summarize_by_source(compared)),
        overall: sums(overall(compared)),
        citations: asked.files.iter().flat_map(|file| cited(&file.read)).collect(),
    }
}
