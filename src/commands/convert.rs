//! `narrows convert`: converts rows in CSV or in JSON into measurements.

use narrows_calibration::{measurements_from_csv, measurements_from_rows};
use narrows_plan::json;

use crate::args::ConvertArgs;
use crate::errors::{CommandResult, Failure, Problem};
use crate::{input, output};

/// Reads rows and prints measurements. Rows that begin with a brace are JSON.
pub fn run(args: &ConvertArgs) -> CommandResult<()> {
    let (path, text) = input::text(&args.rows)?;
    let unsuitable =
        |message: &str, hint: &str| Err(Failure::input(Problem::new(&path, message).hint(hint)));
    let file = match json::without_byte_order_mark(&text).trim_start().chars().next() {
        None => return unsuitable("is empty", "rows in CSV, or in JSON an object with `rows`"),
        Some('[') => return unsuitable("is a JSON array", "an object with the array as `rows`"),
        Some('{') => {
            args.check_json_rows(&path)?;
            measurements_from_rows(&text, &args.name, args.hardware.as_deref())
        }
        Some(_) => measurements_from_csv(&text, &args.csv_defaults(&path)?),
    };
    output::print_json(&file.map_err(|defects| Failure::file(&path, defects))?)
}
