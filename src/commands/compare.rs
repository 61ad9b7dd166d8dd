//! `narrows compare`: what differs between plans of one model.

use narrows_planner::SearchCache;

use super::cost::{price, warn_of_exceeded_memory};
use super::search::search;
use crate::args::{CompareArgs, CompareSettings};
use crate::compare::ComparedPlan;
use crate::errors::{self, CommandResult, Failure};
use crate::priced_plan::PricedPlan;
use crate::report::{self, CompareReport, InfeasibleReport, write_documents};
use crate::step_cost::priced_terms;

/// Prices the plans, searches if requested, compares.
pub fn run(args: &CompareArgs) -> CommandResult<()> {
    let CompareSettings { files, memory, search: request, format, detail, documents, training_run } =
        args.resolve()?;
    let mut plans = vec![];
    for file in files {
        let priced = price(&file)?;
        let memory_limit = memory.bytes(&file.profile);
        warn_of_exceeded_memory(&file.name, &priced.prediction, memory_limit);
        let terms = training_run.map(|terms| priced_terms(terms, &file.profile));
        let training_run = priced.training_run(terms.as_ref())?;
        let name = file.name;
        plans.push(ComparedPlan { name, priced, memory_limit, search: None, training_run });
    }
    if let Some(request) = request {
        let cache = SearchCache::default();
        let result = search(&request, &cache, format);
        let Some(best) = result.best else {
            return Err(InfeasibleReport::new(&request, &result.report, &cache).into_failure());
        };
        let priced = PricedPlan::of_search(&request, best)?;
        let terms = training_run.map(|terms| priced_terms(terms, &request.profile));
        plans.push(ComparedPlan {
            name: "search".into(),
            training_run: priced.training_run(terms.as_ref())?,
            priced,
            memory_limit: request.arena_limit(),
            search: Some(result.report),
        });
    }
    let report = CompareReport::new(&plans).map_err(|error| Failure::execution(&error))?;
    errors::all([
        report::print(&report, format, detail, false),
        write_documents(&report, || report.figures(), &documents),
    ])
}
