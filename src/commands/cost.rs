//! `narrows cost`: the price of a plan.

use narrows_planner::predict::predict_program;

use narrows_plan::lower::lower;
use narrows_plan::{Bytes, Plan};
use narrows_planner::MemoryLimit;

use crate::args::low::PlanFileArgs;
use crate::args::resolve::{self, PlanFile};
use crate::errors::{Failure, Outcome};
use crate::output;
use crate::report::Findings;

/// Prices a plan file, or plans first.
pub fn run(args: &PlanFileArgs) -> Outcome<()> {
    let answer = resolve::answer(&args.output)?;
    let Some(file) = &args.plan else {
        let request = resolve::request(&args.request)?;
        let searched = super::searched(&request, answer.format);
        return super::plan::present(&request, &searched, &answer);
    };
    let mut file = resolve::plan_file(file, &args.request.subject)?;
    resolve::replace(&mut file, &args.request)?;
    warn_of_other_profile(&file);
    let PlanFile { name, plan, model, profile } = &file;
    let plan = &Plan { hardware: resolve::origin(profile), ..plan.clone() };
    let resolved = plan.resolve(model).map_err(|defects| Failure::file(name, defects))?;
    let program = lower(&resolved);
    let executor = args.request.executor;
    let prediction = predict_program(model, profile, executor, &resolved, &program);
    let memory_limit = memory_bytes(args.request.memory_limit, profile.usable_memory());
    let needed = prediction.peak_memory_bytes.iter().copied().max().unwrap_or(0);
    if Bytes(needed) > memory_limit {
        let needed = Bytes(needed);
        output::warn(&format!("{name} needs {needed} a device, the limit is {memory_limit}"));
    }
    let findings = Findings {
        model,
        profile,
        executor,
        memory_limit,
        plan,
        resolved: &resolved,
        prediction: &prediction,
        search: None,
    };
    super::plan::deliver(&findings, &answer)
}

/// The bytes a limit allows.
pub fn memory_bytes(limit: MemoryLimit, usable: Bytes) -> Bytes {
    match limit {
        MemoryLimit::Auto => usable,
        MemoryLimit::None => Bytes(u64::MAX),
        MemoryLimit::Bytes(bytes) => bytes,
    }
}

/// Prices belong to a profile: a plan made for another is priced anew, and that is said.
fn warn_of_other_profile(file: &PlanFile) {
    let PlanFile { name, plan, profile, .. } = file;
    if plan.hardware.fingerprint != profile.fingerprint() {
        let made = &plan.hardware.name;
        let priced = profile.name();
        let version = if made == priced { "another version of " } else { "" };
        output::warn(&format!("{name} was made for {version}`{made}`; re-priced on `{priced}`"));
    }
}
