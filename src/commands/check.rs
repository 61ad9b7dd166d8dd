//! `narrows check`: a proof that a plan runs, or what is wrong with it.

use narrows_plan::lower::lower;

use crate::args::low::{CheckArgs, Format};
use crate::args::resolve;
use crate::errors::{Failure, Outcome};
use crate::output;
use crate::report::proof::{self, Proof};

/// Reads, resolves, lowers, checks.
pub fn run(args: &CheckArgs) -> Outcome<()> {
    let file = resolve::plan_file(&args.plan, &args.subject)?;
    let resolved =
        file.plan.resolve(&file.model).map_err(|defects| Failure::file(&file.name, defects))?;
    let limit = super::cost::memory_bytes(args.memory_limit, file.profile.usable_memory());
    let proof = Proof::of(lower(&resolved), limit);
    let problems = proof.problems(&file.name);
    match args.format {
        Format::Json => output::print_json(&proof)?,
        Format::Text if problems.is_empty() => output::print(&proof::text(&proof, &file))?,
        Format::Text => {}
    }
    if problems.is_empty() { Ok(()) } else { Err(Failure::failed(problems)) }
}
