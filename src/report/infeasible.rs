//! Why there is no plan.

use narrows_planner::{Request, SearchReport, SearchStatus};

use super::page::plural;
use crate::errors::{Failure, Problem};

/// The failure of a search that found nothing.
pub fn failure(request: &Request, report: &SearchReport) -> Failure {
    let Request { model, devices, profile, .. } = request;
    let devices = plural(*devices, "device");
    let subject = format!("for {} on {devices} of {}", model.name, profile.name());
    let problem = match report.status {
        SearchStatus::TimeLimit => format!("no plan was found in time {subject}"),
        SearchStatus::Infeasible => format!("no plan exists {subject}"),
        _ => format!("no plan was found that fits, {subject}"),
    };
    let (mut causes, hints) = causes(request, report);
    // The headline is the conclusion.
    causes.retain(|cause| !cause.starts_with("no plan"));
    let problem = Problem { hints, ..Problem::new("", problem).because(causes) };
    Failure::failed(vec![problem])
}

/// The chain of reasons, and what to try.
pub fn causes(request: &Request, report: &SearchReport) -> (Vec<String>, Vec<String>) {
    if report.status != SearchStatus::TimeLimit {
        return narrows_planner::causes(request, report);
    }
    let limit = request.time_limit.unwrap_or_default().as_secs_f64();
    let cause = format!("because the search was to end after {limit} s");
    let hint = "a longer --time-limit, or fewer candidates: fix --tensor or --pipeline";
    (vec![cause, "no plan was found in time".into()], vec![hint.into()])
}
