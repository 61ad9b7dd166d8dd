//! The report of `validate`: measurements, their predictions, and statistics of the errors.

mod cells;
mod hardware;
mod left_out;
mod measurements;
mod summary;

use narrows_calibration::measurements::{Citation, MeasurementsFile};
use narrows_calibration::validation::{
    ComparedMeasurement, MeasurementSummary, leave_one_out, overall, summarise_by_source,
    summarise_by_table, worst_cells,
};
use serde::Serialize;

use super::Report;
use super::page::Page;
use crate::args::{Detail, ValidateSettings};
use cells::CellReport;
use hardware::HardwareReport;
use left_out::LeftOutReport;
use measurements::MeasurementReport;
use summary::SummaryReport;

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
            hardware: hardware::named_by(settings, compared),
            tables: summaries(summarise_by_table(compared)),
            sources: summaries(summarise_by_source(compared)),
            overall: summaries(overall(compared)),
            citations: settings.files.iter().flat_map(|file| citations(&file.contents)).collect(),
            uses_profile_files: !settings.profiles.is_empty(),
        }
    }
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
        summary::table(&mut page, &self.overall, detail);
        page.heading("Errors by table");
        summary::table(&mut page, &self.tables, detail);
        page.heading("Errors by source");
        summary::table(&mut page, &self.sources, detail);
        page.paragraph(
            "Errors: (predicted − measured) / measured. Order: pairs of implementations of the same job that are \
             predicted in the measured order. In interval: measurements within their 90 % interval.",
        );
        left_out::table(&mut page, &self.left_out);
        cells::table(&mut page, &self.cells);
        for table in &self.tables {
            measurements::table(&mut page, table.name(), &self.measurements, detail);
        }
        measurements::legend(&mut page, &self.measurements);
        if self.uses_profile_files {
            hardware::list(&mut page, &self.hardware);
        }
        page.heading("Sources");
        for CitationReport { name, citation, conditions, .. } in &self.citations {
            page.paragraph(&format!("{name}: {citation}. {conditions}"));
        }
        page
    }
}
