//! `narrows completions` and `narrows man`: what shells and `man` know of the command line.

use clap::CommandFactory;

use crate::args::{CommandLine, CompletionsArgs, ManArgs};
use crate::errors::CommandResult;
use crate::output::{self, write_failure};

/// Prints the completions of a shell.
pub fn completions(args: &CompletionsArgs) -> CommandResult<()> {
    let mut script = vec![];
    clap_complete::generate(args.shell, &mut CommandLine::command(), "narrows", &mut script);
    output::print(&String::from_utf8_lossy(&script))
}

/// Writes a manual page for the program and one for each command.
pub fn man(args: &ManArgs) -> CommandResult<()> {
    output::require_folder_name("DIR", &args.dir)?;
    output::create_folder(&args.dir)?;
    let written = clap_mangen::generate_to(CommandLine::command(), &args.dir);
    written.map_err(|error| write_failure(&args.dir.display().to_string(), &error))
}
