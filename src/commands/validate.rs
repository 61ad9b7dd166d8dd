//! `narrows validate`: predicted beside measured.

use crate::args::low::{OutputFormat, ValidateArgs};
use crate::args::validate::validate;
use crate::errors::CommandResult;
use crate::output;
use crate::report::validation;
use crate::validate::compare;

/// Predicts every figure and prints both.
pub fn run(args: &ValidateArgs) -> CommandResult<()> {
    let asked = validate(args)?;
    let compared = super::waiting("predicting", args.format, || compare(&asked))?;
    match args.format {
        OutputFormat::Json => output::print_json(&validation::json(&asked, &compared)),
        OutputFormat::Text => output::print(&validation::text(&asked, &compared)),
    }
}
