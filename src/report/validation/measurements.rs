//! Measurements beside their predictions.

use narrows_calibration::measurements::MeasurementUnit;
use narrows_calibration::validation::ComparedMeasurement;
use narrows_plan::{Executor, Seconds};
use serde::Serialize;

use crate::args::Detail;
use crate::report::page::{Align, Cell, Page};
use crate::text::{plural, signed_percents};

/// A table with more measurements than this is summarised.
const LISTED_MAX: usize = 60;

/// A measurement and its prediction.
#[derive(Serialize)]
pub(super) struct MeasurementReport<'a> {
    file: &'a str,
    table: &'a str,
    source: &'a str,
    name: &'a str,
    hardware: &'a str,
    executor: Executor,
    #[serde(rename = "race")]
    comparison_group: Option<&'a str>,
    fitted: bool,
    /// Hardware, recomputation and vocabulary of the fit, where they differ from those of the file.
    #[serde(rename = "terms_of_fit")]
    fit_conditions: Option<[String; 3]>,
    per: TimeUnit,
    measured_s: f64,
    predicted_s: f64,
    error_percent: f64,
    interval_s: [f64; 2],
    inside: bool,
}

/// Unit of work to which a time refers.
#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum TimeUnit {
    /// The measurement itself.
    #[serde(rename = "figure")]
    Measurement,
    /// 10⁹ bytes that recomputation frees.
    GigabyteFreed,
}

impl<'a> MeasurementReport<'a> {
    pub(super) fn new(entry: &'a ComparedMeasurement<'a>) -> MeasurementReport<'a> {
        let measurement = entry.measurement;
        let [low, high] = entry.interval_s;
        MeasurementReport {
            file: entry.file,
            table: &measurement.table,
            source: &measurement.source,
            name: &measurement.name,
            hardware: &measurement.hardware,
            executor: measurement.executor,
            comparison_group: measurement.comparison_group.as_deref(),
            fitted: entry.fitted,
            fit_conditions: entry.fit_conditions.map(|conditions| conditions.labels()),
            per: match measurement.unit {
                MeasurementUnit::MbPerMs => TimeUnit::GigabyteFreed,
                _ => TimeUnit::Measurement,
            },
            measured_s: entry.measured_s,
            predicted_s: entry.predicted_s,
            error_percent: (entry.predicted_s / entry.measured_s - 1.0) * 100.0,
            interval_s: entry.interval_s,
            inside: (low..=high).contains(&entry.measured_s),
        }
    }

    /// The name of its table, as summaries have it.
    fn table_name(&self) -> String {
        format!("{}: {}", self.file, self.table)
    }

    fn time(&self, seconds: f64) -> Cell {
        match self.per {
            TimeUnit::Measurement => Seconds(seconds).into(),
            TimeUnit::GigabyteFreed => format!("{}/GB", Seconds(seconds)).into(),
        }
    }

    /// Symbols of measurements that were fitted to (`*`), and of measurements outside their interval (`!`).
    fn symbols(&self) -> &'static str {
        match (self.fitted, &self.fit_conditions, self.inside) {
            (true, None, true) => " *",
            (true, None, false) => " *!",
            (true, Some(_), true) => " **",
            (true, Some(_), false) => " **!",
            (false, _, true) => "",
            (false, _, false) => " !",
        }
    }
}

/// The measurements of one table.
pub(super) fn table(page: &mut Page, name: &str, all: &[MeasurementReport], detail: Detail) {
    let measurements: Vec<&MeasurementReport> =
        all.iter().filter(|entry| entry.table_name() == name).collect();
    page.heading(name);
    if measurements.len() > LISTED_MAX {
        let count = plural(measurements.len() as u64, "measurement");
        page.line(format!("{count}: --format json prints them"));
        return;
    }
    let row = |entry: &&MeasurementReport| {
        let interval = entry.interval_s.map(Seconds);
        let interval = format!("{} to {}", interval[0], interval[1]);
        let full = |cell: String| match detail {
            Detail::Full => Cell::Text(cell),
            _ => String::new().into(),
        };
        vec![
            format!("{}{}", entry.name, entry.symbols()).into(),
            entry.time(entry.measured_s),
            entry.time(entry.predicted_s),
            signed_percents(entry.error_percent, 1).into(),
            full(interval),
            full(entry.executor.name().to_owned()),
        ]
    };
    let columns = [
        ("measurement", Align::Left),
        ("measured", Align::Right),
        ("predicted", Align::Right),
        ("error", Align::Right),
        ("90 % interval", Align::Left),
        ("executor", Align::Left),
    ];
    page.table(&columns, &measurements.iter().map(row).collect::<Vec<_>>());
}

/// The legend of the symbols.
pub(super) fn legend(page: &mut Page, measurements: &[MeasurementReport]) {
    if measurements.iter().any(|entry| entry.fitted) {
        page.line("* fitted: a price was fitted to this measurement, so it tests no prediction");
    }
    if measurements.iter().any(|entry| !entry.inside) {
        page.line("! outside its 90 % interval");
    }
    let mut counts: Vec<(&[String; 3], u64)> = vec![];
    for conditions in measurements.iter().filter_map(|entry| entry.fit_conditions.as_ref()) {
        match counts.iter_mut().find(|(known, _)| *known == conditions) {
            Some((_, count)) => *count += 1,
            None => counts.push((conditions, 1)),
        }
    }
    for ([hardware, recompute, vocabulary], count) in counts {
        page.paragraph(&format!(
            "** fitted: the GPT prices were fitted to {} under other conditions than the file's: \
             hardware `{hardware}`, recomputation `{recompute}`, a vocabulary of {vocabulary}, \
             `fullrank-tp` with one chunk per stage. Their \
             predictions here are neither a test nor errors of that fit.",
            plural(count, "measurement"),
        ));
    }
}
