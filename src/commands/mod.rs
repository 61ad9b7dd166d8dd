//! One file a command. A command resolves its arguments, asks the planner, and reports.

mod calibrate;
mod check;
mod convert;
mod cost;
mod data;
mod doctor;
mod explain;
mod plan;
pub mod run;
mod schema;
mod validate;

pub use explain::GivenPlan;

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::Once;
use std::time::Duration;

use clap::Parser;
use clap::error::ErrorKind;
use indicatif::{ProgressBar, ProgressStyle};
use narrows_cost_model::Profile;
use narrows_planner::{Request, SearchResult, search};

use crate::args::low::{Command, LowArgs, OutputFormat};
use crate::errors::{CommandResult, ExitStatus};
use crate::output;
use crate::report::page::plural;

/// Exit codes that scripts rely on.
const FAILED: u8 = 1;
const BAD_INPUT: u8 = 2;
/// What shells give for a program that Ctrl-C ended.
const STOPPED: u8 = 130;

/// Runs the command line.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let low = match LowArgs::try_parse_from(arguments) {
        Ok(low) => low,
        Err(error) => {
            // Printing fails when nobody listens any more, and then nobody needs to know.
            let _ = error.print();
            let asked = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
            return if asked { ExitCode::SUCCESS } else { BAD_INPUT.into() };
        }
    };
    match execute(&low.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            output::tell(&failure.to_string());
            match failure.ending {
                ExitStatus::Failed => FAILED.into(),
                ExitStatus::BadInput => BAD_INPUT.into(),
                ExitStatus::Stopped => STOPPED.into(),
            }
        }
    }
}

fn execute(command: &Command) -> CommandResult<()> {
    match command {
        Command::Plan(args) => plan::run(args),
        Command::Cost(args) => cost::run(args),
        Command::Explain(args) => explain::run(args),
        Command::Check(args) => check::run(args),
        Command::Run(args) => run::run(args),
        Command::Data(args) => data::run(args),
        Command::Convert(args) => convert::run(args),
        Command::Validate(args) => validate::run(args),
        Command::Calibrate(args) => calibrate::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Schema(args) => schema::run(args),
    }
}

/// How often the progress on a terminal is drawn.
const TICK: Duration = Duration::from_millis(120);

/// Searches, and shows on a terminal that it does.
fn searched(request: &Request, format: OutputFormat) -> SearchResult {
    let Request { model, devices, profile, .. } = request;
    warn_of_measurement(profile);
    let doing = format!("planning {} on {}", model.name, plural(*devices, "device"));
    waiting(&doing, format, || search(request))
}

/// Says once what a prediction rests on, where that is a measurement which does not repeat.
fn warn_of_measurement(profile: &Profile) {
    static TOLD: Once = Once::new();
    if let Some(warning) = profile.warning() {
        TOLD.call_once(|| output::warn(&warning));
    }
}

/// Does something that takes its time, and shows on a terminal that it does.
fn waiting<T>(doing: &str, format: OutputFormat, task: impl FnOnce() -> T) -> T {
    let progress = match format {
        OutputFormat::Json => ProgressBar::hidden(),
        // Draws on standard error, and only when that is a terminal.
        OutputFormat::Text => ProgressBar::new_spinner(),
    };
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed}") {
        progress.set_style(style);
    }
    progress.set_message(doing.to_owned());
    progress.enable_steady_tick(TICK);
    let done = task();
    progress.finish_and_clear();
    done
}
