//! `narrows cost`: the price of a plan.

use narrows_plan::decisions::ResolvedPlan;
use narrows_plan::lower::lower;
use narrows_plan::{Bytes, CheckedProgram, Plan};
use narrows_planner::{MemoryLimit, Prediction, predict_program};

use crate::args::low::PlanFileArgs;
use crate::args::resolve::{self, PlanFile};
use crate::errors::{CommandResult, Failure};
use crate::output;
use crate::report::{PlanReport, proof};

/// A plan that was proved and priced.
pub struct PricedPlan {
    /// The plan, naming the hardware it was priced on.
    pub plan: Plan,
    /// Its decisions, resolved against the model.
    pub resolved: ResolvedPlan,
    /// What it is expected to do.
    pub prediction: Prediction,
}

/// Prices a plan file, or plans first.
pub fn run(args: &PlanFileArgs) -> CommandResult<()> {
    let answer = resolve::answer(&args.output)?;
    let Some(argument) = &args.plan else {
        let request = resolve::request(&args.request)?;
        let searched = super::searched(&request, answer.format);
        return super::plan::present(&request, &searched, &answer);
    };
    let mut file = resolve::plan_file(argument, &args.request.subject)?;
    resolve::replace(&mut file, &args.request)?;
    resolve::launch(&mut file, &args.request);
    let PricedPlan { plan, resolved, prediction } = &price(&file)?;
    let PlanFile { name, model, profile, .. } = &file;
    let memory_limit = memory_bytes(args.request.memory_limit, profile.usable_memory());
    let needed = Bytes(prediction.peak_memory_bytes.iter().copied().max().unwrap_or(0));
    if needed > memory_limit {
        output::warn(&format!("{name} needs {needed} a device, the limit is {memory_limit}"));
    }
    let (search, executor) = (None, plan.executor);
    let findings =
        PlanReport { model, profile, executor, memory_limit, plan, resolved, prediction, search };
    super::plan::deliver(&findings, &answer)
}

/// Proves and prices a plan for the executor it names. Only what was proved has a price.
pub fn price(file: &PlanFile) -> CommandResult<PricedPlan> {
    resolve::sensible(file)?;
    warn_of_other_profile(file, "re-priced");
    super::warn_of_measurement(&file.profile);
    let PlanFile { name, plan, model, profile } = file;
    let plan = Plan { hardware: resolve::origin(profile), ..plan.clone() };
    let resolved = plan.resolve(model).map_err(|defects| Failure::file(name, defects))?;
    let program = CheckedProgram::check(lower(&resolved))
        .map_err(|errors| Failure::failed(proof::problems(name, &errors)))?;
    let prediction = predict_program(model, profile, plan.executor, &resolved, &program);
    Ok(PricedPlan { plan, resolved, prediction })
}

/// The bytes a limit allows.
pub fn memory_bytes(limit: MemoryLimit, usable: Bytes) -> Bytes {
    match limit {
        MemoryLimit::Auto => usable,
        MemoryLimit::None => Bytes(u64::MAX),
        MemoryLimit::Bytes(bytes) => bytes,
    }
}

/// Prices and memory belong to a profile: a plan made for another is `dealt` with anew, and that is
/// said.
pub fn warn_of_other_profile(file: &PlanFile, dealt: &str) {
    let PlanFile { name, plan, profile, .. } = file;
    if plan.hardware.fingerprint != profile.fingerprint() {
        let made = &plan.hardware.name;
        let priced = profile.name();
        let version = match made == priced {
            false => "",
            true if profile.file().measured.is_some() => "another machine or measurement called ",
            true => "another version of ",
        };
        output::warn(&format!("{name} was made for {version}`{made}`; {dealt} on `{priced}`"));
    }
}
