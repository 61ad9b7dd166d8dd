//! Fitted steps, each predicted by a fit to the other ones.

use narrows_calibration::validation::LeftOutMeasurement;
use narrows_plan::Seconds;
use serde::Serialize;

use crate::report::page::{Align, Cell, Page};
use crate::text::signed_percents;

/// A fitted step, predicted without its own measurement.
#[derive(Serialize)]
pub(super) struct LeftOutReport<'a> {
    file: &'a str,
    name: &'a str,
    measured_s: f64,
    predicted_s: f64,
    error_percent: f64,
}

impl<'a> LeftOutReport<'a> {
    pub(super) fn new(left_out: &LeftOutMeasurement<'a>) -> LeftOutReport<'a> {
        LeftOutReport {
            file: left_out.measurement.file,
            name: &left_out.measurement.measurement.name,
            measured_s: left_out.measurement.measured_s,
            predicted_s: left_out.predicted_s,
            error_percent: left_out.error() * 100.0,
        }
    }
}

/// Fitted steps, predicted without their own measurement.
pub(super) fn table(page: &mut Page, left_out: &[LeftOutReport]) {
    if left_out.is_empty() {
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
    page.table(&columns, &left_out.iter().map(row).collect::<Vec<Vec<Cell>>>());
}
