//! `narrows plan`: finds the fastest plan.

use std::path::Path;

use narrows_cost_model::{Prices, Profile, simulate};
use narrows_plan::{CheckedProgram, Kernel, Plan};
use narrows_planner::{Objective, Request, SearchCache, SearchResult};

use super::ineffective::warn_of_ineffective_flags;
use super::search::search_until_signal;
use crate::args::{OutputFormat, PlanArgs, PlanReportSettings, PlanSettings};
use crate::errors::{self, CommandResult};
use crate::output;
use crate::priced_plan::PricedPlan;
use crate::report::{
    self, InfeasibleReport, PlanReport, TraceExtent, TraceText, add_simulated_step, write_documents,
};
use crate::step_cost::StepCost;

/// Searches, writes the plan, reports.
pub fn run(args: &PlanArgs) -> CommandResult<()> {
    let PlanSettings { request, report } = args.resolve()?;
    let cache = SearchCache::default();
    let result = search_until_signal(&request, &cache, report.output.format);
    report_search(&request, result, &cache, &report)
}

/// Writes and reports the plan of a search with this cache, with the training run if one is to be estimated.
pub fn report_search(
    request: &Request,
    result: SearchResult,
    cache: &SearchCache,
    settings: &PlanReportSettings,
) -> CommandResult<()> {
    let Some(best) = result.best else {
        let report = InfeasibleReport::new(request, &result.report, cache);
        if settings.output.format == OutputFormat::Json {
            output::print_json(&report)?;
        }
        return Err(report.into_failure());
    };
    let priced = PricedPlan::of_search(request, best)?;
    warn_of_ineffective_flags(request, priced.plan.mesh);
    let report = PlanReport::new(&request.model, &priced, request.arena_limit());
    let step_cost = (request.objective == Objective::Cost).then(|| {
        let (mesh, step_time_s) = (priced.plan.mesh, priced.prediction.step_time_s);
        StepCost::new(request, mesh, step_time_s, settings.price_per_device_hour)
    });
    let report = report.with_search(&result.report).with_step_cost(step_cost);
    match priced.training_run(settings.training_run.as_ref()) {
        Ok(run) => report_plan(report.with_training_run(run), &request.profile, settings),
        Err(failure) => {
            // The plan of a long search is not lost with the estimate.
            let file = settings.output.plan_file.as_ref();
            file.map_or(Ok(()), |file| output::write_plan(file, report.plan()))?;
            Err(failure)
        }
    }
}

/// Writes the plan if requested, and reports it. A file that cannot be written costs no other output.
pub fn report_plan(
    report: PlanReport,
    profile: &Profile,
    settings: &PlanReportSettings,
) -> CommandResult<()> {
    let PlanReportSettings { output, documents, trace, detail, .. } = settings;
    let file = output.plan_file.as_deref();
    let written = file.map_or(Ok(()), |file| output::write_plan(file, report.plan()));
    let report = report.with_file(file.filter(|_| written.is_ok()));
    errors::all([
        written,
        report::print(&report, output.format, *detail, output.plan_on_stdout()),
        write_documents(&report, || report.figures(profile), documents),
        trace
            .as_ref()
            .map_or(Ok(()), |file| write_trace(file, report.program(), report.plan(), profile)),
    ])
}

/// Writes the simulated step of a plan as a trace.
fn write_trace(
    file: &Path,
    program: &CheckedProgram,
    plan: &Plan,
    profile: &Profile,
) -> CommandResult<()> {
    let prices = Prices::new(profile, plan.executor, &plan.mesh);
    let price = |kernel: &Kernel| prices.kernel_time(kernel);
    let timeline = simulate(program, prices.streams(&price));
    let program = program.program();
    let extent = TraceExtent::of(program);
    let mut trace = TraceText::new();
    add_simulated_step(&mut trace, program, &extent, &timeline, prices.streams(&price));
    let (name, extent) = (file.display().to_string(), extent.phrase(program));
    output::write_file(file, &trace.finish(&name, extent.as_deref())?)?;
    if let Some(extent) = extent {
        output::warn(&format!("{name} has {extent}: with all, viewers would be slow"));
    }
    Ok(())
}
