//! `narrows doctor`: reports what this machine can run, and what is missing.

use crate::args::DoctorArgs;
use crate::cuda_loader;
use crate::errors::CommandResult;
use crate::report::{self, DoctorReport};

/// Inspects the machine and reports.
pub fn run(args: &DoctorArgs) -> CommandResult<()> {
    cuda_loader::make_libraries_loadable();
    report::print(&DoctorReport::inspect(), args.format.format, args.detail.resolve(), false)
}
