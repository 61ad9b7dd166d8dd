//! `narrows plan`: the fastest plan.

use narrows_plan::Mesh;
use narrows_plan::strategy::{Baseline, Zero};
use narrows_planner::{Request, SearchResult, predict_program};

use crate::args::low::{OutputFormat, PlanArgs};
use crate::args::resolve::{self, OutputSettings};
use crate::errors::{CommandResult, Failure};
use crate::output;
use crate::report::{PlanReport, infeasible, json, text};

/// Where defects of the planner's own plans are: a bug, but no reason to panic.
const OURS: &str = "the plan found";

/// Searches, writes the plan, reports.
pub fn run(args: &PlanArgs) -> CommandResult<()> {
    let answer = resolve::answer(&args.output)?;
    let request = resolve::request(&args.request)?;
    let searched = super::searched(&request, answer.format);
    present(&request, &searched, &answer)
}

/// Writes and reports what a search found.
pub fn present(
    request: &Request,
    searched: &SearchResult,
    answer: &OutputSettings,
) -> CommandResult<()> {
    let Some(fitted) = &searched.best else {
        if answer.format == OutputFormat::Json {
            output::print_json(&json::nothing_found(request, &searched.report))?;
        }
        return Err(infeasible::failure(request, &searched.report));
    };
    let Request { model, profile, executor, .. } = request;
    let resolved = fitted.plan.resolve(model).map_err(|found| Failure::file(OURS, found))?;
    warn_of_idle_strategy(request, fitted.plan.mesh);
    warn_of_idle_zero(request, fitted.plan.mesh);
    let prediction = predict_program(model, profile, *executor, &resolved, &fitted.program);
    let findings = PlanReport {
        model,
        profile,
        executor: *executor,
        memory_limit: request.arena_limit(),
        plan: &fitted.plan,
        resolved: &resolved,
        prediction: &prediction,
        search: Some(&searched.report),
    };
    deliver(&findings, answer)
}

/// A baseline says how to use a tensor axis. Where the fastest mesh has none, its plan is everybody's,
/// and must not be taken for what the baseline is worth.
fn warn_of_idle_strategy(request: &Request, mesh: Mesh) {
    let baseline = request.rules.baseline;
    if baseline != Baseline::Auto && mesh.tensor == 1 && request.tensor.is_none() {
        let name = baseline.name();
        output::warn(&format!(
            "`{name}` decides nothing in this plan: the fastest mesh has no tensor axis, and there all \
             strategies are one; --tensor fixes its size"
        ));
    }
}

/// ZeRO-1 shards over the replicas: with one, nothing is.
fn warn_of_idle_zero(request: &Request, mesh: Mesh) {
    if request.zero == Some(Zero::One) && mesh.data == 1 {
        output::warn(
            "`--zero 1` decides nothing in this plan: there is one replica, and optimizer states are \
             sharded over replicas; --data-parallel asks for more",
        );
    }
}

/// Writes the plan where it was asked for, then reports.
pub fn deliver(findings: &PlanReport, answer: &OutputSettings) -> CommandResult<()> {
    if let Some(file) = &answer.output {
        output::write_plan(file, findings.plan)?;
    }
    match answer.format {
        OutputFormat::Json => output::print_json(&json::found(findings)),
        OutputFormat::Text => {
            let report = text::found(findings, answer.output.as_deref());
            if answer.plan_on_stdout() {
                output::tell(&report);
                return Ok(());
            }
            output::print(&report)
        }
    }
}
