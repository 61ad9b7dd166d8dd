//! The report of `validate`: measurements, their predictions, and statistics of the errors.

use narrows_calibration::StepTerm;
use narrows_calibration::measurements::{Citation, MeasurementUnit, MeasurementsFile};
use narrows_calibration::validation::{
    ComparedMeasurement, ErrorCell, ErrorSummary, IntervalCoverage, LeftOutMeasurement,
    MeasurementSummary, MendingTerm, Orderings, leave_one_out, overall, summarise_by_source,
    summarise_by_table, worst_cells,
};
use narrows_plan::{Executor, Seconds};
use serde::Serialize;

use super::Report;
use super::page::{Align, Cell, Page};
use crate::args::{Detail, MeasurementInput, ValidateSettings};
use crate::text::{percents, plural, signed_percents};

/// A table with more measurements than this is summarised.
const LISTED_MAX: usize = 60;

/// Cells of steps that are printed.
const CELLS_MAX: usize = 5;

/// Output of `validate`.
#[derive(Serialize)]
pub struct ValidationReport<'a> {
    #[serde(rename = "figures")]
    measurements: Vec<MeasurementReport<'a>>,
    /// Fitted step times, each predicted by a fit to the other ones.
    left_out: Vec<LeftOutReport<'a>>,
    /// Cells of steps with the largest errors.
    cells: Vec<CellReport>,
    hardware: Vec<HardwareReport<'a>>,
    tables: Vec<SummaryReport>,
    sources: Vec<SummaryReport>,
    overall: Vec<SummaryReport>,
    citations: Vec<CitationReport<'a>>,
    /// Whether profile files are used besides the presets.
    #[serde(skip)]
    uses_profile_files: bool,
}

#[derive(Serialize)]
struct MeasurementReport<'a> {
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

#[derive(Serialize)]
struct LeftOutReport<'a> {
    file: &'a str,
    name: &'a str,
    measured_s: f64,
    predicted_s: f64,
    error_percent: f64,
}

/// Steps of one model width, tensor axis and microbatch, with the term that would mend their error.
#[derive(Serialize)]
struct CellReport {
    table: String,
    name: String,
    figures: usize,
    mean_signed_percent: f64,
    mended_by: Option<MendingReport>,
}

/// A factor on a term of the prediction that removes the mean error of a cell.
#[derive(Serialize)]
struct MendingReport {
    term: StepTerm,
    factor: f64,
    table_mean_absolute_percent: f64,
    table_mean_absolute_percent_mended: f64,
}

/// A profile that measurements name.
#[derive(Serialize)]
struct HardwareReport<'a> {
    name: &'a str,
    /// The path of its file, or that it is a preset.
    from: &'a str,
    /// Whether a file replaces the preset of the same name.
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

impl SummaryReport {
    /// Errors and coverage in words.
    fn verdict(&self) -> String {
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
struct CoverageReport {
    inside: usize,
    share: Option<f64>,
}

#[derive(Serialize)]
struct CitationReport<'a> {
    file: &'a str,
    name: &'a str,
    citation: &'a str,
    conditions: &'a str,
}

impl<'a> ValidationReport<'a> {
    /// The report on compared measurements.
    pub fn new(
        settings: &'a ValidateSettings,
        compared: &'a [ComparedMeasurement<'a>],
    ) -> ValidationReport<'a> {
        let summaries = |summaries: Vec<MeasurementSummary>| {
            summaries.into_iter().map(SummaryReport::new).collect()
        };
        let left_out = leave_one_out(compared);
        ValidationReport {
            measurements: compared.iter().map(MeasurementReport::new).collect(),
            left_out: left_out.iter().map(LeftOutReport::new).collect(),
            cells: worst_cells(compared, CELLS_MAX).into_iter().map(CellReport::new).collect(),
            hardware: hardware(settings, compared),
            tables: summaries(summarise_by_table(compared)),
            sources: summaries(summarise_by_source(compared)),
            overall: summaries(overall(compared)),
            citations: settings.files.iter().flat_map(|file| citations(&file.contents)).collect(),
            uses_profile_files: !settings.profiles.is_empty(),
        }
    }
}

impl<'a> MeasurementReport<'a> {
    fn new(entry: &'a ComparedMeasurement<'a>) -> MeasurementReport<'a> {
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

impl CellReport {
    fn new(cell: ErrorCell) -> CellReport {
        let mending =
            |MendingTerm { term, factor, table_error, table_error_mended }| MendingReport {
                term,
                factor,
                table_mean_absolute_percent: table_error * 100.0,
                table_mean_absolute_percent_mended: table_error_mended * 100.0,
            };
        CellReport {
            table: cell.table,
            name: cell.name,
            figures: cell.count,
            mean_signed_percent: cell.mean_error * 100.0,
            mended_by: cell.mended_by.map(mending),
        }
    }
}

impl<'a> LeftOutReport<'a> {
    fn new(left_out: &LeftOutMeasurement<'a>) -> LeftOutReport<'a> {
        LeftOutReport {
            file: left_out.measurement.file,
            name: &left_out.measurement.measurement.name,
            measured_s: left_out.measurement.measured_s,
            predicted_s: left_out.predicted_s,
            error_percent: left_out.error() * 100.0,
        }
    }
}

impl SummaryReport {
    fn new(summary: MeasurementSummary) -> SummaryReport {
        let MeasurementSummary { name, errors, orderings, coverage, fitted, .. } = summary;
        let IntervalCoverage { inside, .. } = coverage;
        let coverage_90 = CoverageReport { inside, share: coverage.share() };
        SummaryReport { name, fitted, errors, orderings, coverage_90 }
    }
}

/// The profiles that measurements name, each once.
fn hardware<'a>(
    settings: &'a ValidateSettings,
    compared: &'a [ComparedMeasurement<'a>],
) -> Vec<HardwareReport<'a>> {
    let mut reports: Vec<HardwareReport> = vec![];
    for entry in compared {
        let name = entry.measurement.hardware.as_str();
        if reports.iter().all(|known| known.name != name) {
            let input = settings.profile(name);
            let file = input.filter(|input| input.path != name);
            reports.push(HardwareReport {
                name,
                from: file.map_or("the preset", |file| file.path.as_str()),
                hides_preset: input.is_some_and(MeasurementInput::replaces_preset),
            });
        }
    }
    reports
}

fn citations(file: &MeasurementsFile) -> impl Iterator<Item = CitationReport<'_>> {
    file.sources.iter().map(|(name, Citation { citation, conditions })| CitationReport {
        file: &file.name,
        name,
        citation,
        conditions,
    })
}

impl Report for ValidationReport<'_> {
    fn page(&self, detail: Detail) -> Page {
        let mut page = Page::default();
        page.heading("Errors of all measurements");
        if let Some(all) = self.overall.first() {
            page.paragraph(&all.verdict());
        }
        summary_table(&mut page, &self.overall, detail);
        page.heading("Errors by table");
        summary_table(&mut page, &self.tables, detail);
        page.heading("Errors by source");
        summary_table(&mut page, &self.sources, detail);
        page.paragraph(
            "Errors: (predicted − measured) / measured. Order: pairs of implementations of the same job that are \
             predicted in the measured order. In interval: measurements within their 90 % interval.",
        );
        self.left_out(&mut page);
        self.cells(&mut page);
        for table in &self.tables {
            self.table(&mut page, &table.name, detail);
        }
        self.legend(&mut page);
        self.hardware(&mut page);
        page.heading("Sources");
        for CitationReport { name, citation, conditions, .. } in &self.citations {
            page.paragraph(&format!("{name}: {citation}. {conditions}"));
        }
        page
    }
}

impl ValidationReport<'_> {
    fn table(&self, page: &mut Page, name: &str, detail: Detail) {
        let measurements: Vec<&MeasurementReport> =
            self.measurements.iter().filter(|entry| entry.table_name() == name).collect();
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
    fn legend(&self, page: &mut Page) {
        if self.measurements.iter().any(|entry| entry.fitted) {
            page.line(
                "* fitted: a price was fitted to this measurement, so it tests no prediction",
            );
        }
        if self.measurements.iter().any(|entry| !entry.inside) {
            page.line("! outside its 90 % interval");
        }
        let mut counts: Vec<(&[String; 3], u64)> = vec![];
        for conditions in self.measurements.iter().filter_map(|entry| entry.fit_conditions.as_ref())
        {
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

    fn left_out(&self, page: &mut Page) {
        if self.left_out.is_empty() {
            return;
        }
        page.heading("Fitted step times, each left out of the fit in turn");
        let row = |entry: &LeftOutReport| {
            vec![
                entry.name.to_owned().into(),
                Seconds(entry.measured_s).into(),
                Seconds(entry.predicted_s).into(),
                signed_percents(entry.error_percent, 1).into(),
            ]
        };
        let columns = [
            ("measurement left out", Align::Left),
            ("measured", Align::Right),
            ("predicted without it", Align::Right),
            ("error", Align::Right),
        ];
        page.table(&columns, &self.left_out.iter().map(row).collect::<Vec<Vec<Cell>>>());
    }

    /// Cells of steps with large errors.
    fn cells(&self, page: &mut Page) {
        if self.cells.is_empty() {
            return;
        }
        page.heading("Steps with the largest errors, and the correction that removes each");
        let row = |cell: &CellReport| {
            let (mended_by, table) = match &cell.mended_by {
                Some(mending) => (
                    format!("{} × {:.2}", mending.term.name(), mending.factor),
                    format!(
                        "{} → {}",
                        percents(mending.table_mean_absolute_percent, 1),
                        percents(mending.table_mean_absolute_percent_mended, 1)
                    ),
                ),
                None => ("no single term".to_owned(), String::new()),
            };
            vec![
                cell.name.clone(),
                cell.figures.to_string(),
                signed_percents(cell.mean_signed_percent, 1),
                mended_by,
                table,
            ]
        };
        let columns = [
            ("model, tensor axis, microbatch, hardware", Align::Left),
            ("n", Align::Right),
            ("error", Align::Right),
            ("correction", Align::Left),
            ("mean of its table", Align::Left),
        ];
        page.table(&columns, &self.cells.iter().map(row).collect::<Vec<_>>());
    }

    /// The profiles, where files replace or extend the presets.
    fn hardware(&self, page: &mut Page) {
        if !self.uses_profile_files {
            return;
        }
        page.heading("Hardware");
        for HardwareReport { name, from, hides_preset } in &self.hardware {
            let replacement =
                if *hides_preset { ", which replaces the preset of that name" } else { "" };
            page.line(format!("{name}: {from}{replacement}"));
        }
    }
}

fn summary_table(page: &mut Page, summaries: &[SummaryReport], detail: Detail) {
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
