//! `narrows validate`: predicted beside measured.

use crate::args::low::{Format, ValidateArgs};
use crate::args::validate::validate;
use crate::errors::Outcome;
use crate::output;
use crate::report::validation;
use crate::validate::compare;

/// Predicts every figure and prints both.
pub fn run(args: &ValidateArgs) -> Outcome<()> {
    let asked = validate(args)?;
    let compared = super::waiting("predicting", args.format, || compare(&asked))?;
    match args.format {
        Format::Json => output::print_json(&validation::json(&asked, &compared)),
        Format::Text => output::print(&validation::text(&asked, &compared)),
    }
}
