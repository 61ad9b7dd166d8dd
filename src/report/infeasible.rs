//! The report of a search that found no plan.

use narrows_planner::Request;
use narrows_planner::{SearchReport, SearchStatus};
use serde::Serialize;

use super::search::SearchSummary;
use crate::errors::{Failure, Problem};
use crate::text::plural;

/// What `plan` and `cost` print without a plan.
#[derive(Serialize)]
pub struct InfeasibleReport {
    decisions: Option<()>,
    prediction: Option<()>,
    search: SearchSummary,
    /// A chain of causes, each explained by the one before.
    causes: Vec<String>,
    hints: Vec<String>,
    #[serde(skip)]
    headline: String,
}

impl InfeasibleReport {
    /// The report of a search without a plan.
    pub fn new(request: &Request, report: &SearchReport) -> InfeasibleReport {
        let Request { model, devices, profile, .. } = request;
        let devices = plural(*devices, "device");
        let subject = format!("for {} on {devices} of {}", model.name, profile.name());
        let headline = match report.status {
            SearchStatus::TimeLimit => format!("no plan was found in time {subject}"),
            SearchStatus::Infeasible => format!("no plan exists {subject}"),
            _ => format!("no plan that fits was found {subject}"),
        };
        let (causes, hints) = causes(request, report);
        let search = SearchSummary::without_plan(report);
        InfeasibleReport { decisions: None, prediction: None, search, causes, hints, headline }
    }

    /// The failure of the command, which is the text for people.
    pub fn into_failure(self) -> Failure {
        let InfeasibleReport { mut causes, hints, headline, .. } = self;
        // The headline says what the last cause concludes.
        causes.retain(|cause| !cause.starts_with("no plan"));
        Failure::failed(vec![Problem { hints, ..Problem::new("", headline).because(causes) }])
    }
}

/// The chain of causes, and what to try.
fn causes(request: &Request, report: &SearchReport) -> (Vec<String>, Vec<String>) {
    if report.status != SearchStatus::TimeLimit {
        return narrows_planner::causes(request, report);
    }
    let limit = request.time_limit.unwrap_or_default().as_secs_f64();
    let cause = format!("because the search was to end after {limit} s");
    let hint = "a longer --time-limit, or fewer candidates: fix --tensor or --pipeline";
    (vec![cause, "no plan was found in time".into()], vec![hint.into()])
}
