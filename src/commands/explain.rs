//! `narrows explain`: why the plan is what it is, and what else there was.

use narrows_planner::{Prediction, Request, explain};

use crate::args::low::{OutputFormat, PlanFileArgs};
use crate::args::resolve;
use crate::errors::CommandResult;
use crate::output;
use crate::report::{infeasible, json, rivals};

/// A plan that was given, to compare with what the search finds.
pub struct GivenPlan {
    /// The file's name.
    pub name: String,
    /// What it is expected to do.
    pub prediction: Prediction,
}

/// Searches, prices what else there was, explains.
pub fn run(args: &PlanFileArgs) -> CommandResult<()> {
    let answer = resolve::answer(&args.output)?;
    let (request, given) = match &args.plan {
        None => (resolve::request(&args.request)?, None),
        Some(_) => with_plan(args)?,
    };
    let searched = super::searched(&request, answer.format);
    if let (Some(file), Some(best)) = (&answer.output, &searched.best) {
        output::write_plan(file, &best.plan)?;
    }
    let explanation =
        super::waiting("pricing the alternatives", answer.format, || explain(&request, &searched));
    match answer.format {
        OutputFormat::Json => {
            output::print_json(&json::explained(&explanation, given.as_ref(), &searched.report))?;
        }
        OutputFormat::Text => {
            let text = rivals::text(&request, &searched, &explanation, given.as_ref());
            if answer.plan_on_stdout() { output::tell(&text) } else { output::print(&text)? }
        }
    }
    match searched.best {
        Some(_) => Ok(()),
        None => Err(infeasible::failure(&request, &searched.report)),
    }
}

/// The request that a plan answers, with the plan's own price.
fn with_plan(args: &PlanFileArgs) -> CommandResult<(Request, Option<GivenPlan>)> {
    let Some(argument) = &args.plan else { return Ok((resolve::request(&args.request)?, None)) };
    let mut file = resolve::plan_file(argument, &args.request.subject)?;
    resolve::launch(&mut file, &args.request);
    let request = resolve::request_of_plan(&args.request, &file)?;
    let priced = super::cost::price(&file)?;
    let given = GivenPlan { name: file.name, prediction: priced.prediction };
    Ok((request, Some(given)))
}
