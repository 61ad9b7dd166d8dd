//! Cells of steps with large errors, and the term whose correction removes each.

use narrows_calibration::StepTerm;
use narrows_calibration::validation::{ErrorCell, MendingTerm};
use serde::Serialize;

use crate::report::page::{Align, Page};
use crate::text::{percents, signed_percents};

/// Steps of one model width, tensor axis and microbatch, with the term that would mend their error.
#[derive(Serialize)]
pub(super) struct CellReport {
    table: String,
    name: String,
    figures: usize,
    mean_signed_percent: f64,
    mended_by: Option<MendingReport>,
}

/// A factor on a term of the prediction that removes the mean error of a cell.
#[derive(Serialize)]
pub(super) struct MendingReport {
    term: StepTerm,
    factor: f64,
    table_mean_absolute_percent: f64,
    table_mean_absolute_percent_mended: f64,
}

impl CellReport {
    pub(super) fn new(cell: ErrorCell) -> CellReport {
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

/// Cells of steps with large errors.
pub(super) fn table(page: &mut Page, cells: &[CellReport]) {
    if cells.is_empty() {
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
    page.table(&columns, &cells.iter().map(row).collect::<Vec<_>>());
}
