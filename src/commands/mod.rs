//! One file per command. A command resolves its flags, calls the other crates, and prints a report.

mod break_even;
mod calibrate;
mod check;
mod compare;
mod convert;
mod cost;
mod data;
mod doctor;
mod explain;
mod export;
mod export_weights;
mod factor;
mod framework;
mod generate;
mod ineffective;
mod plan;
mod plot;
mod run;
mod schema;
mod search;
mod sensitivity;
mod shell;
mod ui;
mod validate;
mod whatif;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::error::ErrorKind;

use crate::allocator::begin_failure;
use crate::args::{Command, CommandLine, in_words, process_of_words};
use crate::cluster::{report_failure, report_reason};
use crate::errors::{CommandResult, ExitStatus, Failure, Problem};
use crate::output;

/// Runs the command line. A process of a run that fails before it has read its flags tells the others.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let words: Vec<OsString> = arguments.into_iter().collect();
    let command_line = match CommandLine::parse_from_words(words.clone()) {
        Ok(command_line) => command_line,
        Err(error) => {
            let requested =
                matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
            if requested {
                return match output::print(&error.render().ansi().to_string()) {
                    Ok(()) => ExitCode::SUCCESS,
                    Err(failure) => {
                        output::eprint(&failure.to_string());
                        failure.status.into()
                    }
                };
            }
            let message = in_words(error.render().ansi().to_string());
            let Some(process) = process_of_words(&words) else {
                output::eprint(&message);
                return ExitStatus::BadInput.into();
            };
            // The output of all processes is interleaved.
            let label = format!(" {}:", process.label());
            let (head, rest) = message.split_at(message.find(' ').unwrap_or(0));
            output::eprint(&format!("{head}{label}{rest}"));
            let text = in_words(error.to_string());
            let reason = text.lines().next().unwrap_or_default();
            report_reason(&process, reason.trim_start_matches("error: "));
            return ExitStatus::BadInput.into();
        }
    };
    let started = start_threads().and_then(|()| command_line.files.check());
    let started = started.map_err(|failure| match process_of_words(&words) {
        Some(process) => report_failure(&process, failure),
        None => failure,
    });
    match started.and_then(|()| execute(&command_line.command)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            let message = failure.to_string();
            begin_failure(failure.status);
            output::eprint(&message);
            failure.status.into()
        }
    }
}

/// Starts the threads that searches and texts share. Started on demand, they would panic where the system refuses them.
fn start_threads() -> CommandResult<()> {
    rayon::ThreadPoolBuilder::new().build_global().map_err(|error| {
        let problem = Problem::new("threads", format!("the system refuses them: {error}"));
        let problem = problem.hint("`ulimit -v`, `ulimit -u` and the limits of the container");
        Failure { status: ExitStatus::Environment, problems: vec![problem] }
    })
}

/// Runs a command.
pub fn execute(command: &Command) -> CommandResult<()> {
    match command {
        Command::Plan(args) => plan::run(args),
        Command::Cost(args) => cost::run(args),
        Command::Explain(args) => explain::run(args),
        Command::Compare(args) => compare::run(args),
        Command::WhatIf(args) => whatif::run(args),
        Command::Sensitivity(args) => sensitivity::run(args),
        Command::Ui(args) => ui::run(args),
        Command::Check(args) => check::run(args),
        Command::Export(args) => export::run(args),
        Command::Run(args) => run::run(args),
        Command::Plot(args) => plot::run(args),
        Command::Data(args) => data::run(args),
        Command::Generate(args) => generate::run(args),
        Command::ExportWeights(args) => export_weights::run(args),
        Command::Factor(args) => factor::run(args),
        Command::Convert(args) => convert::run(args),
        Command::Validate(args) => validate::run(args),
        Command::Calibrate(args) => calibrate::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Schema(args) => schema::run(args),
        Command::Completions(args) => shell::completions(args),
        Command::Man(args) => shell::man(args),
    }
}
