//! Reports of commands.
//!
//! A report is one struct. Its serialisation is the output of `--format json`, whose keys have units and do not change.
//! [`Report::page`] lays the same values out for people, as text or as HTML. Fields that are not serialized are needed by
//! the page only.

mod assumptions;
mod baselines;
mod break_even;
mod calibration;
mod check;
mod compare;
mod decisions;
mod doctor;
mod documents;
mod exact_step;
mod explain;
mod export;
mod export_weights;
mod factor;
mod field_list;
mod framework;
mod generation;
mod html;
mod infeasible;
mod kernel_coverage;
mod kernels;
mod numeric;
mod page;
mod plan;
mod prediction;
mod run;
mod search;
mod sensitivity;
mod solution;
mod step_cost;
mod token_file;
mod trace;
mod training_run;
mod validation;
mod whatif;
mod whatif_columns;
mod whatif_csv;

pub use baselines::{BaselinePlan, BaselinesReport};
pub use break_even::BreakEvenReport;
pub use calibration::CalibrationReport;
pub use check::{CheckReport, check_problems};
pub use compare::CompareReport;
pub use doctor::DoctorReport;
pub use documents::write_documents;
pub use explain::{ExplainReport, PricedFile};
pub use export::ExportReport;
pub use export_weights::ExportWeightsReport;
pub use factor::FactorReport;
pub use field_list::FieldListReport;
pub use framework::FrameworkReport;
pub use generation::GenerationReport;
pub use html::{SCRIPT as SORT_SCRIPT, fragment as html_fragment};
pub use infeasible::InfeasibleReport;
pub use numeric::NumericReport;
pub use plan::PlanReport;
pub use prediction::exceeded_memory;
pub use run::{NullRunReport, RunHeader, RunHistory, RunReport, progress_line};
pub use sensitivity::SensitivityReport;
pub use solution::SolutionReport;
pub use token_file::{NewTokenFileReport, TokenFileReport};
pub use trace::{
    MeasuredTrace, TraceExtent, TraceText, add_measured_steps, add_predicted_step,
    add_simulated_step,
};
pub use validation::ValidationReport;
pub use whatif::WhatIfReport;

use narrows_plan::Bytes;
use page::Page;
use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde::Serialize;

use crate::args::{Detail, OutputFormat};
use crate::errors::CommandResult;
use crate::output;
use crate::plot::PlotKind;

/// The result of a command.
pub trait Report: Serialize {
    /// The answer for people.
    fn page(&self, detail: Detail) -> Page;

    /// The answer in plain words, which leads its HTML page; empty where the page begins with such words.
    fn summary(&self) -> String {
        String::new()
    }

    /// Reason why the answer has no picture of this kind, a clause with its conjunction; `None` where it has none.
    fn reason_without_picture(&self, _kind: PlotKind) -> Option<String> {
        None
    }
}

/// Prints a report on standard output; its text goes to standard error where `stdout_in_use` by a file.
pub fn print(
    report: &impl Report,
    format: OutputFormat,
    detail: Detail,
    stdout_in_use: bool,
) -> CommandResult<()> {
    match format {
        OutputFormat::Json => output::print_json(report),
        OutputFormat::Text if stdout_in_use => {
            output::eprint(&report.page(detail).text());
            Ok(())
        }
        OutputFormat::Text => output::print(&report.page(detail).text()),
    }
}

/// The JSON Schema of a report, as it is printed with `--format json`.
pub fn schema<R: Report + JsonSchema>() -> serde_json::Value {
    let settings = SchemaSettings::draft2020_12().for_serialize();
    settings.into_generator().into_root_schema_for::<R>().into()
}

/// A memory limit in bytes; `None` for `Bytes(u64::MAX)`, which stands for no limit.
fn finite_limit(limit: Bytes) -> Option<u64> {
    (limit != Bytes(u64::MAX)).then_some(limit.0)
}
