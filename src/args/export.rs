//! Flags of `export`.

use std::ffi::OsString;

use clap::Args;

use super::output::{FormatArgs, OutputFormat, check_output};
use super::plan_file::PlanFile;
use super::request::ModelArgs;
use crate::errors::{CommandResult, Failure, Problem};
use crate::export::Framework;
use crate::output;

/// Flags of `export`.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// A plan file, or `-`
    #[arg(value_name = "PLAN")]
    pub plan: OsString,
    /// Framework whose configuration is written
    #[arg(long, value_enum, value_name = "FRAMEWORK")]
    pub to: Framework,
    /// Write the configuration to this file, or `-` [default: -; with --format json none]
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<OsString>,
    /// Write the configuration even though it does not express every decision of the plan
    ///
    /// What is lost stands at its head.
    #[arg(long)]
    pub allow_loss: bool,
    /// Model and hardware.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Output format.
    #[command(flatten)]
    pub format: FormatArgs,
}

/// Settings of `export`.
#[derive(Debug)]
pub struct PlanExportSettings {
    /// The plan.
    pub file: PlanFile,
    /// The framework.
    pub framework: Framework,
    /// File for the configuration, or `-`; `None` where the answer alone has it.
    pub output: Option<OsString>,
    /// Whether decisions may be lost.
    pub allow_loss: bool,
    /// Format of the answer.
    pub format: OutputFormat,
}

impl ExportArgs {
    /// The settings.
    ///
    /// # Errors
    /// A plan or model that cannot be read or is invalid, and two documents for standard output.
    pub fn resolve(&self) -> CommandResult<PlanExportSettings> {
        let format = self.format.format;
        let stdout = || (format == OutputFormat::Text).then(|| OsString::from("-"));
        let output = self.output.clone().or_else(stdout);
        if format == OutputFormat::Json && output.as_deref().is_some_and(output::is_stdout) {
            let message = "the configuration and the JSON answer would both go to standard output";
            let hint = "--format json alone: its `configuration` is the text";
            return Err(Failure::input(Problem::new("--output", message).hint(hint)));
        }
        output.as_deref().map_or(Ok(()), check_output)?;
        let file = PlanFile::read(&self.plan, &self.model)?;
        file.validate()?;
        let (framework, allow_loss) = (self.to, self.allow_loss);
        Ok(PlanExportSettings { file, framework, output, allow_loss, format })
    }
}
