//! `narrows check`: a proof that a plan runs, or what is wrong with it.

use narrows_plan::lower::lower;
use narrows_plan::model::Model;
use narrows_reference::Miniature;
use serde::Serialize;

use crate::args::low::{CheckArgs, OutputFormat};
use crate::args::resolve::{self, PlanFile};
use crate::errors::{CommandResult, Failure, Problem};
use crate::output;
use crate::report::numeric::NumericReport;
use crate::report::proof::{self, CheckReport};

/// Of the twin's weights and tokens.
const SEED: u64 = 1;

/// Reads, resolves, lowers, checks.
pub fn run(args: &CheckArgs) -> CommandResult<()> {
    let file = resolve::plan_file(&args.plan, &args.subject)?;
    resolve::sensible(&file)?;
    super::cost::warn_of_other_profile(&file, "checked");
    let resolved =
        file.plan.resolve(&file.model).map_err(|defects| Failure::file(&file.name, defects))?;
    let limit = super::cost::memory_bytes(args.memory_limit, file.profile.usable_memory());
    let proof = CheckReport::of(lower(&resolved), limit);
    let mut problems = proof.problems(&file.name);
    let numeric = match args.numeric && problems.is_empty() {
        true => Some(numeric(&file)?),
        false => None,
    };
    problems.extend(numeric.as_ref().and_then(|numeric| numeric.problem(&file.name)));
    match args.format {
        OutputFormat::Json => {
            output::print_json(&CheckOutput { proof: &proof, numeric: numeric.as_ref() })?
        }
        OutputFormat::Text if problems.is_empty() => {
            output::print(&proof::text(&proof, &file))?;
            numeric.as_ref().map_or(Ok(()), |numeric| output::print(&numeric.text()))?;
        }
        OutputFormat::Text => {}
    }
    if problems.is_empty() { Ok(()) } else { Err(Failure::failed(problems)) }
}

/// What `--format json` prints.
#[derive(Serialize)]
struct CheckOutput<'a> {
    #[serde(flatten)]
    proof: &'a CheckReport,
    #[serde(skip_serializing_if = "Option::is_none")]
    numeric: Option<&'a NumericReport>,
}

/// Runs the plan's twin.
fn numeric(file: &PlanFile) -> CommandResult<NumericReport> {
    let cannot = |why: String| {
        Failure::failed(vec![Problem::new(&file.name, format!("its twin cannot be run: {why}"))])
    };
    let twin =
        Miniature::new(&file.plan, &file.model).map_err(|defects| cannot(defects.to_string()))?;
    let open = |model: &Model, program| narrows_cpu::session(model, program, 1);
    let compared = twin.compare(&open, SEED).map_err(|error| cannot(error.to_string()))?;
    Ok(NumericReport::of(&twin, &compared))
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

    /// Every value of a document, with the way to it.
    fn pointers(value: &Value, path: String, found: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                for (key, value) in fields {
                    let key = key.replace('~', "~0").replace('/', "~1");
                    pointers(value, format!("{path}/{key}"), found);
                }
            }
            Value::Array(items) => {
                for (index, value) in items.iter().enumerate() {
                    pointers(value, format!("{path}/{index}"), found);
                }
            }
            _ => {}
        }
        found.push(path);
    }

    /// Whatever is edited, the plan is refused or proven.
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
                let proof = CheckReport::of(lower(&resolved), Bytes(1 << 40));
                let _ = proof.problems("fuzz");
            }
            Ok(())
        })
        .budget_ms(1500);
    }
}
