//! `narrows doctor`: says what this machine can run, and what it lacks.

use crate::args::doctor::DoctorArgs;
use crate::args::low::Format;
use crate::errors::Outcome;
use crate::loader;
use crate::output;
use crate::report::doctor::Finding;

/// Looks, and reports.
pub fn run(args: &DoctorArgs) -> Outcome<()> {
    loader::bring_within_reach();
    let finding = Finding::look();
    match args.format {
        Format::Json => output::print_json(&finding),
        Format::Text => output::print(&finding.text()),
    }
}
