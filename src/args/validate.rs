//! Flags of `validate`.

use std::ffi::OsString;

use clap::Args;
use narrows_calibration::measurements::{self, MeasurementsFile};
use narrows_cost_model::Profile;
use narrows_cost_model::profile::preset_names;

use crate::errors::{CommandResult, Failure, Problem, Problems};
use crate::plot::PlotKind;
use crate::{input, output};

use super::documents::DocumentFiles;
use super::output::{DetailArgs, FormatArgs};
use super::request::at_most_one_stdin;

/// Flags of `validate`.
#[derive(Debug, Args)]
pub struct ValidateArgs {
    /// A measurements file, or `-`; may be repeated [default: the published measurements]
    #[arg(long, value_name = "FILE")]
    pub measurements: Vec<OsString>,
    /// A profile that measurements name, besides the presets, as `calibrate` writes it; may be repeated
    ///
    /// A profile with the name of a preset replaces it, and the report says so.
    #[arg(long, value_name = "FILE")]
    pub hardware: Vec<OsString>,
    /// Picture and page.
    #[command(flatten)]
    pub documents: DocumentFiles,
    /// Output format.
    #[command(flatten)]
    pub format: FormatArgs,
    /// Detail of the report.
    #[command(flatten)]
    pub detail: DetailArgs,
}

/// Measurements to predict, and the hardware that they name.
#[derive(Debug)]
pub struct ValidateSettings {
    /// The files of `--measurements`, or the built-in ones.
    pub files: Vec<MeasurementInput<MeasurementsFile>>,
    /// The profiles of `--hardware`, with distinct names.
    pub profiles: Vec<MeasurementInput<Profile>>,
    /// Picture and page.
    pub documents: DocumentFiles,
}

/// An input file and its contents.
#[derive(Debug)]
pub struct MeasurementInput<T> {
    /// The path of the file, for messages.
    pub path: String,
    /// The contents.
    pub contents: T,
}

impl ValidateArgs {
    /// The settings.
    ///
    /// # Errors
    /// Files that cannot be read, and two files of one name.
    pub fn resolve(&self) -> CommandResult<ValidateSettings> {
        at_most_one_stdin(self.measurements.iter().chain(&self.hardware))?;
        let documents = self.documents.resolve(PlotKind::OF_MEASUREMENTS, &[])?;
        let mut problems = Problems::default();
        let mut profiles: Vec<MeasurementInput<Profile>> = vec![];
        for argument in &self.hardware {
            if let Some(contents) = problems.take(input::profile(argument)) {
                let path = argument.to_string_lossy().into_owned();
                profiles.push(MeasurementInput { path, contents });
            }
        }
        let names = profiles.iter().map(|input| (input.contents.name(), input.path.as_str()));
        require_distinct("--hardware", names.collect(), &mut problems);
        let mut files: Vec<MeasurementInput<MeasurementsFile>> = vec![];
        if self.measurements.is_empty() {
            let shipped = measurements::shipped()
                .map_err(|defects| Failure::file("the built-in measurements", defects));
            let shipped = problems.take(shipped).unwrap_or_default().into_iter();
            files.extend(
                shipped.map(|read| MeasurementInput { path: read.name.clone(), contents: read }),
            );
        }
        for argument in &self.measurements {
            let input = input::text(argument).and_then(|(path, text)| {
                let contents =
                    measurements::read(&text).map_err(|defects| Failure::file(&path, defects))?;
                Ok(MeasurementInput { path, contents })
            });
            files.extend(problems.take(input));
        }
        let names = files.iter().map(|input| (input.contents.name.as_str(), input.path.as_str()));
        require_distinct("--measurements", names.collect(), &mut problems);
        problems.into_result()?;
        warn_of_unused_profiles(&files, &profiles);
        Ok(ValidateSettings { files, profiles, documents })
    }
}

/// Reports every name that two files share. `names` holds names and paths.
fn require_distinct(flag: &str, names: Vec<(&str, &str)>, problems: &mut Problems) {
    for (index, (name, path)) in names.iter().enumerate() {
        if let Some((_, other)) = names[..index].iter().find(|(known, _)| known == name) {
            let message = format!("two files are named `{name}`: {other} and {path}");
            let problem = Problem::new(flag, message)
                .hint("another `name` in one of them: the report tells measurements apart by it");
            problems.push(problem);
        }
    }
}

fn warn_of_unused_profiles(
    files: &[MeasurementInput<MeasurementsFile>],
    profiles: &[MeasurementInput<Profile>],
) {
    for MeasurementInput { path, contents: profile } in profiles {
        let mut measurements = files.iter().flat_map(|file| &file.contents.measurements);
        if !measurements.any(|entry| entry.hardware == profile.name()) {
            let name = profile.name();
            output::warn(&format!(
                "--hardware {path} has no effect: no measurement names `{name}`"
            ));
        }
    }
}

impl ValidateSettings {
    /// The profile of this name, if `--hardware` gave one.
    pub fn profile(&self, name: &str) -> Option<&MeasurementInput<Profile>> {
        self.profiles.iter().find(|input| input.contents.name() == name)
    }
}

impl MeasurementInput<Profile> {
    /// Whether the profile replaces the preset of the same name.
    pub fn replaces_preset(&self) -> bool {
        preset_names().any(|known| known == self.contents.name() && known != self.path)
    }
}
