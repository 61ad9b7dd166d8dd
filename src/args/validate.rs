//! What the flags of `validate` mean.

use narrows_cost_model::Profile;
use narrows_cost_model::measured::{self, MeasurementsFile};

use crate::errors::{Failure, Outcome, Problem, Problems};
use crate::input;

use super::low::ValidateArgs;
use super::resolve::only_one_stdin;

/// What is predicted, and on what.
#[derive(Debug)]
pub struct Validation {
    /// The measurements that are asked for: the files given, or those that come with the program.
    pub files: Vec<MeasurementsFile>,
    /// Profiles that measurements may name besides the presets.
    pub profiles: Vec<Profile>,
}

/// What is asked of `validate`.
pub fn validate(args: &ValidateArgs) -> Outcome<Validation> {
    only_one_stdin(args.measurements.iter().chain(&args.hardware))?;
    let mut problems = Problems::default();
    let read = args.hardware.iter().map(|file| input::profile(file));
    let profiles: Vec<_> = read.map(|profile| problems.take(profile)).collect();
    if args.measurements.is_empty() {
        let files =
            measured::shipped().map_err(|found| Failure::file("the program's figures", found))?;
        let profiles = profiles.into_iter().flatten().collect();
        return problems.failure().map_or(Ok(Validation { files, profiles }), Err);
    }
    let read = args.measurements.iter().map(|file| {
        let (name, text) = input::text(file)?;
        measured::read(&name, &text).map_err(|defects| Failure::file(&name, defects))
    });
    let files: Vec<_> = read.map(|file| problems.take(file)).collect();
    let files: Vec<_> = files.into_iter().flatten().collect();
    for (index, file) in files.iter().enumerate() {
        if files[..index].iter().any(|other| other.name == file.name) {
            let problem = format!("two files call themselves `{}`", file.name);
            let problem = Problem::new("--measurements", problem)
                .hint("another `name` in one of them: figures are told apart by it");
            problems.take(Err::<(), _>(Failure::input(problem)));
        }
    }
    let profiles = profiles.into_iter().flatten().collect();
    problems.failure().map_or(Ok(Validation { files, profiles }), Err)
}
