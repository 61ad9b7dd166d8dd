//! `narrows convert`: converts CSV rows into measurements.

use narrows_calibration::measurements_from_csv;

use crate::args::ConvertArgs;
use crate::errors::{CommandResult, Failure};
use crate::{input, output};

/// Reads rows and prints measurements.
pub fn run(args: &ConvertArgs) -> CommandResult<()> {
    let (name, text) = input::text(&args.rows)?;
    let file = measurements_from_csv(&text, &args.csv_defaults())
        .map_err(|defects| Failure::file(&name, defects))?;
    output::print_json(&file)
}
