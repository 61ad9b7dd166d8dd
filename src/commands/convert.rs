//! `narrows convert`: converts rows in CSV or in JSON into measurements.

use narrows_calibration::{measurements_from_csv, measurements_from_rows};

use crate::args::ConvertArgs;
use crate::errors::{CommandResult, Failure};
use crate::{input, output};

/// Reads rows and prints measurements. Rows that begin with a brace are JSON.
pub fn run(args: &ConvertArgs) -> CommandResult<()> {
    let (path, text) = input::text(&args.rows)?;
    let file = if text.trim_start().starts_with('{') {
        args.check_json_rows()?;
        measurements_from_rows(&text, &args.name, args.hardware.as_deref())
    } else {
        measurements_from_csv(&text, &args.csv_defaults()?)
    };
    output::print_json(&file.map_err(|defects| Failure::file(&path, defects))?)
}
