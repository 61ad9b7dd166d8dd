//! Predicted beside measured: a table for each kind of figure, then the errors in sum.

use narrows_cost_model::interval::Coverage;
use narrows_cost_model::measured::{Errors, MeasurementsFile, Orderings, Unit};
use narrows_plan::Seconds;
use serde::Serialize;

use super::page::{Align, Page, percent, plural};
use crate::args::low::executor_name;
use crate::validate::{Compared, Summary, overall, sources, tables};

/// More figures than this in one table are summed up only.
const SHOWN_MAX: usize = 60;

/// The report for people.
pub fn text(files: &[MeasurementsFile], compared: &[Compared]) -> String {
    let mut page = Page::default();
    for table in tables(compared) {
        page.heading(&table.name);
        if table.figures.len() <= SHOWN_MAX {
            figures(&mut page, &table);
        } else {
            let many = plural(table.figures.len() as u64, "figure");
            page.line(format!("{many}: --format json prints them"));
        }
    }
    for (title, summaries) in [
        ("Errors by table", tables(compared)),
        ("Errors by source", sources(compared)),
        ("Errors overall", overall(compared)),
    ] {
        page.heading(title);
        errors(&mut page, &summaries);
    }
    page.heading("Sources");
    for (name, source) in files.iter().flat_map(|file| &file.sources) {
        page.paragraph(&format!("{name}: {}. {}", source.citation, source.conditions));
    }
    page.finish()
}

fn figures(page: &mut Page, table: &Summary) {
    let row = |one: &&Compared| {
        let error = (one.predicted_s / one.measured_s - 1.0) * 100.0;
        vec![
            one.measurement.name.clone(),
            executor_name(one.measurement.executor).to_string(),
            time(one, one.measured_s),
            time(one, one.predicted_s),
            format!("{error:+.1} %"),
            format!("{} to {}", Seconds(one.interval_s[0]), time(one, one.interval_s[1])),
            if one.fitted { "fitted to it".into() } else { String::new() },
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
fn time(of: &Compared, seconds: f64) -> String {
    let time = Seconds(seconds);
    if per_gigabyte(of) { format!("{time} a GB") } else { time.to_string() }
}

/// Whether a figure's time is what freeing 10⁹ bytes takes.
fn per_gigabyte(of: &Compared) -> bool {
    of.measurement.unit == Unit::MbPerMs
}

fn errors(page: &mut Page, summaries: &[Summary]) {
    let row = |summary: &Summary| {
        let Errors {
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
            format!("{mean:.2} %"),
            format!("{median:.2} %"),
            format!("{worst:.2} %"),
            format!("{sign:+.2} %"),
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

/// The report for programs.
#[derive(Serialize)]
pub struct Document<'a> {
    figures: Vec<Figure<'a>>,
    tables: Vec<Sum>,
    sources: Vec<Sum>,
    overall: Vec<Sum>,
    citations: Vec<Citation<'a>>,
}

#[derive(Serialize)]
struct Figure<'a> {
    file: &'a str,
    table: &'a str,
    source: &'a str,
    name: &'a str,
    hardware: &'a str,
    executor: &'static str,
    race: Option<&'a str>,
    fitted: bool,
    /// What the times are for: the figure, or 10⁹ bytes that recomputation frees.
    per: &'static str,
    measured_s: f64,
    predicted_s: f64,
    error_percent: f64,
    interval_s: [f64; 2],
    inside: bool,
}

#[derive(Serialize)]
struct Sum {
    name: String,
    fitted: usize,
    #[serde(flatten)]
    errors: Errors,
    orderings: Orderings,
    coverage_90: Covered,
}

#[derive(Serialize)]
struct Covered {
    inside: usize,
    share: Option<f64>,
}

#[derive(Serialize)]
struct Citation<'a> {
    file: &'a str,
    name: &'a str,
    citation: &'a str,
    conditions: &'a str,
}

/// The JSON document.
pub fn json<'a>(files: &'a [MeasurementsFile], compared: &'a [Compared<'a>]) -> Document<'a> {
    let figure = |one: &'a Compared<'a>| Figure {
        file: one.file,
        table: &one.measurement.table,
        source: &one.measurement.source,
        name: &one.measurement.name,
        hardware: &one.measurement.hardware,
        executor: executor_name(one.measurement.executor),
        race: one.measurement.race.as_deref(),
        fitted: one.fitted,
        per: if per_gigabyte(one) { "gigabyte_freed" } else { "figure" },
        measured_s: one.measured_s,
        predicted_s: one.predicted_s,
        error_percent: (one.predicted_s / one.measured_s - 1.0) * 100.0,
        interval_s: one.interval_s,
        inside: (one.interval_s[0]..=one.interval_s[1]).contains(&one.measured_s),
    };
    let sums = |summaries: Vec<Summary>| {
        let sum = |Summary { name, errors, orderings, coverage, fitted, .. }| {
            let coverage_90 = Covered { inside: coverage.inside, share: coverage.share() };
            Sum { name, fitted, errors, orderings, coverage_90 }
        };
        summaries.into_iter().map(sum).collect()
    };
    let cited = |file: &'a MeasurementsFile| {
        file.sources.iter().map(|(name, source)| Citation {
            file: &file.name,
            name,
            citation: &source.citation,
            conditions: &source.conditions,
        })
    };
    Document {
        figures: compared.iter().map(figure).collect(),
        tables: sums(tables(compared)),
        sources: sums(sources(compared)),
        overall: sums(overall(compared)),
        citations: files.iter().flat_map(cited).collect(),
    }
}
