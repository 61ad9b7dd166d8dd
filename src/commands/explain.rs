//! `narrows explain`: explains why a plan is the fastest, and what the alternatives cost.

use narrows_planner::{Explanation, Objective, Request, SearchCache, SearchResult, explain};

use super::cost::{price, warn_of_exceeded_memory};
use super::search::{search_until, until_signal};
use crate::args::{ExplainArgs, ExplainSettings, OutputFormat};
use crate::errors::{self, CommandResult};
use crate::output;
use crate::progress::with_spinner;
use crate::report::{self, ExplainReport, InfeasibleReport, PricedFile, write_documents};
use crate::step_cost::StepCost;

/// Searches, prices the alternatives, explains.
pub fn run(args: &ExplainArgs) -> CommandResult<()> {
    let ExplainSettings { request, compared, output, documents, detail, price_per_device_hour } =
        args.resolve()?;
    let compared = match compared {
        None => None,
        Some(file) => {
            let prediction = price(&file)?.prediction;
            let memory_limit = request.arena_limit();
            warn_of_exceeded_memory(&file.name, &prediction, memory_limit);
            Some(PricedFile { name: file.name, prediction, memory_limit })
        }
    };
    let cache = SearchCache::default();
    let (result, written, explanation) = until_signal(|stop| {
        let result = search_until(&request, &cache, output.format, stop);
        let written = match (&output.plan_file, &result.best) {
            (Some(file), Some(best)) => output::write_plan(file, &best.plan),
            _ => Ok(()),
        };
        let visible = output.format == OutputFormat::Text;
        let explanation = with_spinner("pricing the alternatives", visible, || {
            explain(&request, &result, &cache, stop)
        });
        (result, written, explanation)
    });
    let explained = match &result.best {
        Some(best) => request.beside(best),
        None => request.clone(),
    };
    let request_of_plans = (&explained, request.objective);
    let report =
        ExplainReport::new(request_of_plans, &explanation, compared.as_ref(), &result.report)
            .with_step_cost(step_cost(&request, &result, &explanation, price_per_device_hour));
    errors::all([
        written,
        report::print(&report, output.format, detail, output.plan_on_stdout()),
        write_documents(&report, || report.figures(), &documents),
    ])?;
    match result.best {
        Some(_) => Ok(()),
        None => Err(InfeasibleReport::new(&request, &result.report, &cache).into_failure()),
    }
}

/// The cost of a step of the chosen plan, if it was minimised.
fn step_cost(
    request: &Request,
    result: &SearchResult,
    explanation: &Explanation,
    price: Option<f64>,
) -> Option<StepCost> {
    let best = result.best.as_ref().filter(|_| request.objective == Objective::Cost)?;
    let prediction = explanation.chosen.as_ref()?.prediction.as_ref()?;
    Some(StepCost::new(request, best.plan.mesh, prediction.step_time_s, price))
}
