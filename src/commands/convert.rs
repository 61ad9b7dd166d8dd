//! `narrows convert`: rows of comma-separated values as measurements.

use narrows_calibration::measurements::Citation;
use narrows_calibration::{CsvDefaults, measurements_from_csv};

use crate::args::low::ConvertArgs;
use crate::errors::{CommandResult, Failure};
use crate::input;
use crate::output;

/// Reads rows and prints measurements.
pub fn run(args: &ConvertArgs) -> CommandResult<()> {
    let (name, text) = input::text(&args.rows)?;
    let source = Citation {
        citation: args.source.clone(),
        conditions: format!(
            "Not said by the rows: recomputation `{}`, a vocabulary of {}, hardware `{}`.",
            args.recompute_name(),
            args.vocabulary,
            args.hardware
        ),
    };
    let assumed = CsvDefaults {
        name: args.name.clone(),
        source,
        hardware: args.hardware.clone(),
        vocabulary: args.vocabulary,
        recompute: args.recompute,
    };
    let file =
        measurements_from_csv(&text, &assumed).map_err(|defects| Failure::file(&name, defects))?;
    output::print_json(&file)
}
