//! `narrows validate`: predicted beside measured.

use narrows_calibration::validation::{self, ComparedFigure};

use crate::args::low::{OutputFormat, ValidateArgs};
use crate::args::validate::{ValidateSettings, validate};
use crate::errors::{CommandResult, Failure, Problem};
use crate::output;
use crate::report::validation as report;

/// Predicts every figure and prints both.
pub fn run(args: &ValidateArgs) -> CommandResult<()> {
    let asked = validate(args)?;
    let compared = super::waiting("predicting", args.format, || compare(&asked))?;
    match args.format {
        OutputFormat::Json => output::print_json(&report::json(&asked, &compared)),
        OutputFormat::Text => output::print(&report::text(&asked, &compared)),
    }
}

/// Predicts every figure, on the presets and on the given profiles.
fn compare(settings: &ValidateSettings) -> CommandResult<Vec<ComparedFigure<'_>>> {
    let files = settings.files.iter().map(|input| &input.read);
    let profiles = settings.profiles.iter().map(|input| &input.read);
    let compared = validation::compare(files, profiles)
        .map_err(|error| Failure::file(&settings.files[error.file].path, error.defects))?;
    if compared.is_empty() {
        return Err(Failure::input(Problem::new("--measurements", "there are no figures")));
    }
    Ok(compared)
}
