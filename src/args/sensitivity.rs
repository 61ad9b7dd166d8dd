//! Flags of `sensitivity`.

use std::ffi::OsString;

use clap::Args;
use narrows_planner::Request;

use crate::errors::{CommandResult, Failure, Problem};
use crate::plot::PlotKind;
use crate::whatif::Scenario;

use super::documents::DocumentFiles;
use super::framework::RefusedFrameworkArgs;
use super::output::{Detail, DetailArgs, FormatArgs, OutputFormat, resolve_csv};
use super::plan::PlanningArgs;
use super::request::validate;
use super::training_run::TrainingRunArgs;
use super::values::ObjectiveArg;

/// Flags of `sensitivity`.
#[derive(Debug, Args)]
pub struct SensitivityArgs {
    /// Write one row per number to this CSV file, or `-`
    #[arg(long, value_name = "FILE")]
    pub csv: Option<OsString>,
    /// Picture and page.
    #[command(flatten)]
    pub documents: DocumentFiles,
    /// Planning request.
    #[command(flatten)]
    pub planning: PlanningArgs,
    /// Another framework.
    #[command(flatten)]
    pub framework: RefusedFrameworkArgs,
    /// Output format.
    #[command(flatten)]
    pub format: FormatArgs,
    /// Detail of the report.
    #[command(flatten)]
    pub detail: DetailArgs,
}

/// Settings of `sensitivity`.
#[derive(Debug)]
pub struct SensitivitySettings {
    /// The request whose numbers are varied, with all of its sizes set.
    pub scenario: Scenario,
    /// The same request with its present numbers.
    pub request: Request,
    /// File for the rows.
    pub csv: Option<OsString>,
    /// Picture and page.
    pub documents: DocumentFiles,
    /// Text or JSON.
    pub format: OutputFormat,
    /// Detail of the report.
    pub detail: Detail,
}

impl SensitivityArgs {
    /// The settings.
    ///
    /// # Errors
    /// Inputs that cannot be read, an invalid request, and files that cannot be written.
    pub fn resolve(&self) -> CommandResult<SensitivitySettings> {
        self.framework.refuse()?;
        let (format, detail) = (self.format.format, self.detail.resolve());
        if self.planning.request.objective != ObjectiveArg::StepTime {
            let problem = Problem::new("--objective", "sensitivities are those of the step time");
            return Err(Failure::input(problem.hint("--objective step-time")));
        }
        let training_run = TrainingRunArgs::default();
        let (scenario, _) = Scenario::new(self.planning.clone(), training_run, ("--sweep", &[]))?;
        let request = scenario.request(&[])?;
        validate(&request)?;
        let csv = resolve_csv(self.csv.as_ref(), format)?;
        let documents =
            self.documents.resolve(PlotKind::OF_SENSITIVITY, &[("--csv", self.csv.as_deref())])?;
        let scenario = scenario.with_sizes_of(&request);
        Ok(SensitivitySettings { scenario, request, csv, documents, format, detail })
    }
}
