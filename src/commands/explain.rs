//! `narrows explain`: why the plan is what it is.

use crate::args::low::PlanFileArgs;
use crate::args::resolve;
use crate::errors::Outcome;

/// Searches, and explains what was found.
pub fn run(args: &PlanFileArgs) -> Outcome<()> {
    let answer = resolve::answer(&args.output)?;
    let request = resolve::request(&args.request)?;
    let searched = super::searched(&request, answer.format);
    super::plan::present(&request, &searched, &answer)
}
