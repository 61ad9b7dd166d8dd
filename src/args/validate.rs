//! What the flags of `validate` mean.

use narrows_calibration::measurements::{self, MeasurementsFile};
use narrows_cost_model::Profile;
use narrows_cost_model::profile::preset_names;

use crate::errors::{CommandResult, Failure, Problem, Problems};
use crate::input;
use crate::output;

use super::low::ValidateArgs;
use super::resolve::only_one_stdin;

/// What is predicted, and on what.
#[derive(Debug)]
pub struct ValidateSettings {
    /// The measurements that are asked for: the files given, or those that come with the program.
    pub files: Vec<MeasurementInput<MeasurementsFile>>,
    /// Profiles that measurements may name besides the presets; no two of one name.
    pub profiles: Vec<MeasurementInput<Profile>>,
}

/// What was read, and where.
#[derive(Debug)]
pub struct MeasurementInput<T> {
    /// The file's path, for messages.
    pub path: String,
    /// What it holds.
    pub read: T,
}

/// What is asked of `validate`.
pub fn validate(args: &ValidateArgs) -> CommandResult<ValidateSettings> {
    only_one_stdin(args.measurements.iter().chain(&args.hardware))?;
    let mut problems = Problems::default();
    let mut profiles: Vec<MeasurementInput<Profile>> = vec![];
    for argument in &args.hardware {
        if let Some(read) = problems.take(input::profile(argument)) {
            let path = argument.to_string_lossy().into_owned();
            profiles.push(MeasurementInput { path, read });
        }
    }
    let names = profiles.iter().map(|given| (given.read.name(), given.path.as_str()));
    once("--hardware", names.collect(), &mut problems);
    let mut files: Vec<MeasurementInput<MeasurementsFile>> = vec![];
    if args.measurements.is_empty() {
        let shipped =
            measurements::shipped().map_err(|found| Failure::file("the program's figures", found));
        let shipped = problems.take(shipped).unwrap_or_default().into_iter();
        files.extend(shipped.map(|read| MeasurementInput { path: read.name.clone(), read }));
    }
    for argument in &args.measurements {
        let read = input::text(argument).and_then(|(path, text)| {
            let read = measurements::read(&path, &text);
            let read = read.map_err(|defects| Failure::file(&path, defects))?;
            Ok(MeasurementInput { path, read })
        });
        files.extend(problems.take(read));
    }
    let names = files.iter().map(|given| (given.read.name.as_str(), given.path.as_str()));
    once("--measurements", names.collect(), &mut problems);
    if let Some(failure) = problems.failure() {
        return Err(failure);
    }
    warn_of_unused(&files, &profiles);
    Ok(ValidateSettings { files, profiles })
}

/// No two of the names, which stand beside paths, may be one.
fn once(flag: &str, names: Vec<(&str, &str)>, problems: &mut Problems) {
    for (index, (name, path)) in names.iter().enumerate() {
        if let Some((_, other)) = names[..index].iter().find(|(known, _)| known == name) {
            let problem = format!("two files call themselves `{name}`: {other} and {path}");
            let problem = Problem::new(flag, problem)
                .hint("another `name` in one of them: figures are told apart by it");
            problems.push(problem);
        }
    }
}

/// Nothing would show that a profile was given for nothing.
fn warn_of_unused(
    files: &[MeasurementInput<MeasurementsFile>],
    profiles: &[MeasurementInput<Profile>],
) {
    for MeasurementInput { path, read: profile } in profiles {
        let mut figures = files.iter().flat_map(|file| &file.read.measurements);
        if !figures.any(|figure| figure.hardware == profile.name()) {
            let name = profile.name();
            output::warn(&format!(
                "no measurement is of `{name}`: --hardware {path} changes nothing"
            ));
        }
    }
}

impl ValidateSettings {
    /// Where the profile of this name comes from, where it was given.
    pub fn given(&self, name: &str) -> Option<&MeasurementInput<Profile>> {
        self.profiles.iter().find(|given| given.read.name() == name)
    }
}

impl MeasurementInput<Profile> {
    /// Whether it stands in the place of the preset of its name.
    pub fn hides_preset(&self) -> bool {
        preset_names().any(|known| known == self.read.name() && known != self.path)
    }
}
