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
    resolve::sensible(&file)?;
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
                let proof = Proof::of(lower(&resolved), Bytes(1 << 40));
                let _ = proof.problems("fuzz");
            }
            Ok(())
        })
        .budget_ms(1500);
    }
}
