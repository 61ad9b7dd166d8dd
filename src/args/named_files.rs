//! Files that a command line names: none that it reads may be one that it writes.

use std::ffi::OsString;
use std::path::Path;

use clap::{Arg, ArgMatches, Command};
use narrows_cost_model::profile;
use narrows_plan::model::presets;

use super::data::{is_same_file, output_is_input};
use crate::errors::{CommandResult, Failure, Problem};
use crate::output;

/// Flags of files that a command writes.
const OUTPUTS: [&str; 6] = ["output", "plot", "report", "trace", "csv", "metrics"];

/// Names of the values of files that a command reads, besides those that contain `FILE`.
const INPUTS: [&str; 5] = ["PLAN", "METRICS", "ROWS", "INPUT", "WEIGHTS"];

/// Files by flag, and by what the command does with them.
#[derive(Debug, Default)]
pub struct NamedFiles {
    inputs: Vec<(String, OsString)>,
    outputs: Vec<(String, OsString)>,
}

impl NamedFiles {
    /// The files of parsed words.
    pub(super) fn of(command: &Command, matches: &ArgMatches) -> NamedFiles {
        let mut files = NamedFiles::default();
        let Some((name, matches)) = matches.subcommand() else { return files };
        let Some(command) = command.find_subcommand(name) else { return files };
        for arg in command.get_arguments() {
            let id = arg.get_id().as_str();
            let values = || matches.get_raw(id).into_iter().flatten().map(OsString::from);
            let place = match (arg.get_long(), arg.get_value_names()) {
                (Some(long), _) => format!("--{long}"),
                (None, Some([name, ..])) => name.to_string(),
                (None, _) => continue,
            };
            let named = values().map(|file| (place.clone(), file));
            match arg.get_long().is_some_and(|long| OUTPUTS.contains(&long)) {
                true => files.outputs.extend(named),
                false if is_input(arg) => files.inputs.extend(named),
                false => {}
            }
        }
        files
    }

    /// Rejects files without a name, and outputs that would replace an input.
    ///
    /// # Errors
    /// The flag or the name of the argument.
    pub fn check(&self) -> CommandResult<()> {
        let mut files = self.outputs.iter().chain(&self.inputs);
        if let Some((flag, _)) = files.find(|(_, file)| file.is_empty()) {
            let problem = Problem::new(flag, "the file name is empty");
            return Err(Failure::input(problem.hint("the name of a file")));
        }
        let outputs = self.outputs.iter().filter(|(_, file)| !output::is_stdout(file));
        for (flag, file) in outputs {
            let is_overwritten =
                |input: &&OsString| is_same_file(input, Path::new(file)) && !is_preset(input);
            if let Some(input) = self.inputs.iter().map(|(_, input)| input).find(is_overwritten) {
                return Err(Failure::input(output_is_input(flag, input)));
            }
        }
        Ok(())
    }
}

fn is_input(arg: &Arg) -> bool {
    let is_file = |name: &str| name.contains("FILE") || INPUTS.contains(&name);
    arg.get_value_names().into_iter().flatten().any(|name| is_file(name))
}

/// Whether a value names a preset, and no file.
fn is_preset(value: &OsString) -> bool {
    let name = value.to_str().unwrap_or_default();
    presets::find(name).is_ok() || profile::preset(name).is_ok()
}
