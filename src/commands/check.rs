//! `narrows check`: proves a plan, or reports what is wrong with it.

use narrows_plan::lower;
use narrows_plan::model::Model;
use narrows_reference::Miniature;

use super::cost::warn_of_other_profile;
use crate::args::{CheckArgs, CheckSettings, Detail, OutputFormat, PlanFile};
use crate::errors::{CommandResult, Failure, Problem};
use crate::report::{self, CheckReport, NumericReport};

/// Seed of the miniature's weights and tokens.
const SEED: u64 = 1;

/// Resolves, lowers and checks a plan, and runs its miniature if requested.
pub fn run(args: &CheckArgs) -> CommandResult<()> {
    let CheckSettings { file, memory_limit, numeric, format } = args.resolve()?;
    warn_of_other_profile(&file, "checked");
    let resolved =
        file.plan.resolve(&file.model).map_err(|defects| Failure::file(&file.name, defects))?;
    let mut report = CheckReport::new(&file, lower(&resolved), memory_limit);
    if numeric && report.is_proven() {
        report = report.with_numeric(run_miniature(&file)?);
    }
    let problems = report.problems();
    if problems.is_empty() || format == OutputFormat::Json {
        report::print(&report, format, Detail::Summary, false)?;
    }
    if problems.is_empty() { Ok(()) } else { Err(Failure::failed(problems)) }
}

/// Runs the miniature of a plan and compares it with the reference.
fn run_miniature(file: &PlanFile) -> CommandResult<NumericReport> {
    let failed = |error: String| {
        let message = format!("the miniature of the plan cannot be run: {error}");
        Failure::failed(vec![Problem::new(&file.name, message)])
    };
    let miniature =
        Miniature::new(&file.plan, &file.model).map_err(|defects| failed(defects.to_string()))?;
    let open = |model: &Model, program| narrows_cpu::session(model, program, 1);
    let comparison = miniature.compare(&open, SEED).map_err(|error| failed(error.to_string()))?;
    Ok(NumericReport::new(&miniature, &comparison))
}

#[cfg(test)]
mod tests {
    use narrows_plan::model::presets;
    use narrows_plan::{Bytes, Plan};
    use narrows_planner::Request;
    use serde_json::Value;

    use super::*;

    fn request() -> Request {
        Request {
            micro_batch: Some(1),
            tensor: Some(2),
            pipeline: Some(2),
            data: Some(1),
            ..Request::new(
                presets::find("cola-tiny").unwrap(),
                narrows_cost_model::profile::preset("a100-80gb").unwrap(),
                4,
                4,
                64,
            )
        }
    }

    /// JSON pointers of all values in a document.
    fn pointers(value: &Value, path: String, pointers_of_all: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                for (key, value) in fields {
                    let key = key.replace('~', "~0").replace('/', "~1");
                    pointers(value, format!("{path}/{key}"), pointers_of_all);
                }
            }
            Value::Array(items) => {
                for (index, value) in items.iter().enumerate() {
                    pointers(value, format!("{path}/{index}"), pointers_of_all);
                }
            }
            _ => {}
        }
        pointers_of_all.push(path);
    }

    /// An edited plan is rejected or proven.
    #[test]
    fn edited_plans_never_panic() {
        let request = request();
        let best = narrows_planner::search(&request).best.unwrap();
        let plan = serde_json::to_value(&best.plan).unwrap();
        let mut places = vec![];
        pointers(&plan, String::new(), &mut places);
        let words = ["row", "column", "replicate", "token", "online", "x@partial", "block", "one"];
        arbtest::arbtest(|u| {
            let mut edited = plan.clone();
            for _ in 0..u.int_in_range(1..=3)? {
                let value = match u.int_in_range(0..=4)? {
                    0 => Value::from(u.int_in_range(0..=9_u64)?),
                    1 => Value::from(u.arbitrary::<u64>()?),
                    2 => Value::Null,
                    3 => Value::from(*u.choose(&words)?),
                    _ => plan.pointer(u.choose(&places)?).cloned().unwrap_or_default(),
                };
                if let Some(place) = edited.pointer_mut(u.choose(&places)?) {
                    *place = value;
                }
            }
            if let Ok(plan) = Plan::read(&edited.to_string())
                && let Ok(resolved) = plan.resolve(&request.model)
            {
                let Request { model, profile, .. } = request.clone();
                let file = PlanFile { name: "fuzz".into(), plan, model, profile };
                let _ = CheckReport::new(&file, lower(&resolved), Bytes(1 << 40)).problems();
            }
            Ok(())
        })
        .budget_ms(1500);
    }
}
