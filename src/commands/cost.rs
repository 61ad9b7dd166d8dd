//! `narrows cost`: predicts the step time and the memory of a plan, or a step under another framework.

use narrows_cost_model::Profile;
use narrows_plan::{Bytes, CheckedProgram, Plan, PlanSource, lower};
use narrows_planner::{Prediction, SearchCache, predict_program};

use super::framework;
use super::plan::{report_plan, report_search};
use super::search::{search_until_signal, warn_of_measurement};
use crate::args::{CostArgs, CostSettings, PlanFile, PlanSelection};
use crate::errors::{CommandResult, Failure};
use crate::output;
use crate::priced_plan::PricedPlan;
use crate::report::{PlanReport, check_problems, exceeded_memory};

/// Prices a plan file, or searches for a plan first.
pub fn run(args: &CostArgs) -> CommandResult<()> {
    if let Some(settings) = args.resolve_framework()? {
        return framework::run(&settings);
    }
    let CostSettings { selection, memory_limit, report: settings } = args.resolve()?;
    let file = match selection {
        PlanSelection::File(file) => file,
        PlanSelection::Search(request) => {
            let cache = SearchCache::default();
            let result = search_until_signal(&request, &cache, settings.output.format);
            return report_search(&request, result, &cache, &settings);
        }
    };
    let priced = price(&file)?;
    warn_of_exceeded_memory(&file.name, &priced.prediction, memory_limit);
    let report = PlanReport::new(&file.model, &priced, memory_limit)
        .with_training_run(priced.training_run(settings.training_run.as_ref())?);
    report_plan(report, &file.profile, &settings)
}

/// Warns of a plan that needs more memory than a device may use.
pub fn warn_of_exceeded_memory(name: &str, prediction: &Prediction, memory_limit: Bytes) {
    if let Some(text) = exceeded_memory(name, prediction, memory_limit) {
        output::warn(&text);
    }
}

/// Proves a plan and prices it for its executor.
pub fn price(file: &PlanFile) -> CommandResult<PricedPlan> {
    file.validate()?;
    warn_of_other_profile(file, "re-priced");
    warn_of_measurement(&file.profile);
    let PlanFile { name, plan, model, profile } = file;
    let plan = Plan { hardware: source(profile), ..plan.clone() };
    let resolved = plan.resolve(model).map_err(|defects| Failure::file(name, defects))?;
    let program = CheckedProgram::check(lower(&resolved))
        .map_err(|errors| Failure::failed(check_problems(name, &errors)))?;
    let prediction = predict_program(model, profile, plan.executor, &resolved, &program);
    Ok(PricedPlan { plan, resolved, program, prediction })
}

/// The name and the fingerprint of a profile, as plans record them.
fn source(profile: &Profile) -> PlanSource {
    PlanSource { name: profile.name().into(), fingerprint: profile.fingerprint().into() }
}

/// Warns of a plan that was made for another profile than that of the command. `action` is "re-priced" or "checked".
pub fn warn_of_other_profile(file: &PlanFile, action: &str) {
    let PlanFile { name, plan, profile, .. } = file;
    if plan.hardware.fingerprint != profile.fingerprint() {
        let (original, current) = (&plan.hardware.name, profile.name());
        let version = match original == current {
            false => "",
            true if profile.file().measured.is_some() => "another machine or measurement called ",
            true => "another version of ",
        };
        output::warn(&format!(
            "{name} was made for {version}`{original}`; {action} on `{current}`"
        ));
    }
}
