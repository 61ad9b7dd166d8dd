//! Flags for the format, the detail and the destination of output.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use clap::{Args, ValueEnum};

use crate::errors::{CommandResult, Failure, Problem};
use crate::output;

/// `--format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OutputFormat {
    /// A report for people
    Text,
    /// One JSON document
    Json,
}

/// `--format` alone.
#[derive(Debug, Args)]
pub struct FormatArgs {
    /// Output format
    #[arg(long, value_enum, default_value_t = OutputFormat::Text)]
    pub format: OutputFormat,
}

/// `--output` and `--format`.
#[derive(Debug, Args)]
pub struct OutputArgs {
    /// Write the plan to this file, or `-`
    #[arg(long, value_name = "FILE")]
    pub output: Option<OsString>,
    /// Output format
    #[command(flatten)]
    pub format: FormatArgs,
}

/// `--details`.
#[derive(Debug, Args)]
pub struct DetailArgs {
    /// Print the details of a text report too
    #[arg(short = 'v', long, visible_alias = "verbose")]
    pub details: bool,
}

/// Amount of detail in a text report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// The results, with summaries of long lists.
    Summary,
    /// Everything.
    Full,
}

/// Format and destination of a command's output.
#[derive(Debug)]
pub struct OutputSettings {
    /// Text or JSON.
    pub format: OutputFormat,
    /// File for the plan, if one was requested.
    pub plan_file: Option<OsString>,
}

impl DetailArgs {
    /// The amount of detail.
    pub fn resolve(&self) -> Detail {
        if self.details { Detail::Full } else { Detail::Summary }
    }
}

impl OutputSettings {
    /// Whether the plan goes to standard output. Reports then go to standard error.
    pub fn plan_on_stdout(&self) -> bool {
        self.plan_file.as_deref().is_some_and(output::is_stdout)
    }
}

impl OutputArgs {
    /// The settings.
    ///
    /// # Errors
    /// Two documents for standard output.
    pub fn resolve(&self) -> CommandResult<OutputSettings> {
        let settings =
            OutputSettings { format: self.format.format, plan_file: self.output.clone() };
        if settings.format == OutputFormat::Json && settings.plan_on_stdout() {
            let message = "the plan and the JSON answer would both go to standard output";
            let hint = "--format json alone: its `decisions` are the plan";
            return Err(Failure::input(Problem::new("--output", message).hint(hint)));
        }
        Ok(settings)
    }

    /// The settings of a command that writes the plan at its end. The file is checked before the long search.
    ///
    /// # Errors
    /// Two documents for standard output, and a file that cannot be written.
    pub fn resolve_checked(&self) -> CommandResult<OutputSettings> {
        let settings = self.resolve()?;
        settings.plan_file.as_deref().map_or(Ok(()), check_output)?;
        Ok(settings)
    }
}

/// Checks that an output can be written, unless it is standard output.
///
/// # Errors
/// A file that cannot be written.
pub fn check_output(file: &OsStr) -> CommandResult<()> {
    if output::is_stdout(file) { Ok(()) } else { output::check_writable(Path::new(file)) }
}

/// The file for rows, checked before a long computation.
///
/// # Errors
/// A file that cannot be written, and rows that would mix with JSON on standard output.
pub fn resolve_csv(
    file: Option<&OsString>,
    format: OutputFormat,
) -> CommandResult<Option<OsString>> {
    let Some(file) = file else { return Ok(None) };
    check_output(file)?;
    if output::is_stdout(file) && format == OutputFormat::Json {
        let message = "the rows and the JSON answer would both go to standard output";
        let problem = Problem::new("--csv", message);
        return Err(Failure::input(problem.hint("a file for one of them")));
    }
    Ok(Some(file.clone()))
}

/// Rejects a file that two flags write.
///
/// # Errors
/// The first flag whose file is that of an earlier one.
pub fn reject_repeated_outputs(outputs: &[(&str, &Path)]) -> CommandResult<()> {
    for (index, (flag, file)) in outputs.iter().enumerate() {
        let mut earlier = outputs[..index].iter();
        if let Some((other, _)) = earlier.find(|(_, other)| output::is_same_output(file, other)) {
            let message = format!("`{}` is the file of {other} too", file.display());
            return Err(Failure::input(Problem::new(*flag, message).hint("another file name")));
        }
    }
    Ok(())
}
