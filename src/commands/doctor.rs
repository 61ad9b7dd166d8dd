//! `narrows doctor`: says what this machine can run, and what it lacks.

use crate::args::doctor::DoctorArgs;
use crate::args::low::OutputFormat;
use crate::errors::CommandResult;
use crate::loader;
use crate::output;
use crate::report::doctor::DoctorReport;

/// Looks, and reports.
pub fn run(args: &DoctorArgs) -> CommandResult<()> {
    loader::bring_within_reach();
    let finding = DoctorReport::look();
    match args.format {
        OutputFormat::Json => output::print_json(&finding),
        OutputFormat::Text => output::print(&finding.text()),
    }
}
