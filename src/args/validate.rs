//! What the flags of `validate` mean.

use narrows_cost_model::measured::{self, MeasurementsFile};

use crate::errors::{Failure, Outcome, Problems};
use crate::input;

use super::low::ValidateArgs;
use super::resolve::only_one_stdin;

/// The measurements that are asked for: the files given, or those that come with the program.
pub fn validate(args: &ValidateArgs) -> Outcome<Vec<MeasurementsFile>> {
    if args.measurements.is_empty() {
        return measured::shipped().map_err(|found| Failure::file("the program's figures", found));
    }
    only_one_stdin(&args.measurements)?;
    let mut problems = Problems::default();
    let read = args.measurements.iter().map(|file| {
        let (name, text) = input::text(file)?;
        measured::read(&name, &text).map_err(|defects| Failure::file(&name, defects))
    });
    let files: Vec<_> = read.map(|file| problems.take(file)).collect();
    problems.failure().map_or(Ok(files.into_iter().flatten().collect()), Err)
}
