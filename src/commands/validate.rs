//! `narrows validate`: compares predictions with measurements.

use narrows_calibration::validation::{self, ComparedMeasurement};
use narrows_cost_model::profile;

use crate::args::{OutputFormat, ValidateArgs, ValidateSettings};
use crate::errors::{self, CommandResult, Failure, Problem};
use crate::plot::validation_figures;
use crate::progress::with_spinner;
use crate::report::{self, ValidationReport, write_documents};

/// Predicts every measurement and reports both.
pub fn run(args: &ValidateArgs) -> CommandResult<()> {
    let settings = args.resolve()?;
    let format = args.format.format;
    let compared = with_spinner("predicting", format == OutputFormat::Text, || compare(&settings))?;
    let report = ValidationReport::new(&settings, &compared);
    let profile = |name: &str| match settings.profile(name) {
        Some(input) => Some(input.contents.clone()),
        None => profile::preset(name).ok(),
    };
    errors::all([
        report::print(&report, format, args.detail.resolve(), false),
        write_documents(&report, || validation_figures(&compared, &profile), &settings.documents),
    ])
}

/// Predicts every measurement, on the presets and on the given profiles.
fn compare(settings: &ValidateSettings) -> CommandResult<Vec<ComparedMeasurement<'_>>> {
    let files = settings.files.iter().map(|input| &input.contents);
    let profiles = settings.profiles.iter().map(|input| &input.contents);
    let compared = validation::compare(files, profiles)
        .map_err(|error| Failure::file(&settings.files[error.file].path, error.defects))?;
    if compared.is_empty() {
        return Err(Failure::input(Problem::new("--measurements", "there are no measurements")));
    }
    Ok(compared)
}
