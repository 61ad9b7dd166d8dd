//! The report of a search that found no plan.

use narrows_planner::{Diagnosis, Objective, Request, SearchReport, SearchStatus};
use serde::Serialize;

use super::search::SearchSummary;
use crate::errors::{Failure, Problem};
use crate::text::plural;

/// Output of `plan` and `cost` without a plan.
#[derive(Serialize)]
pub struct InfeasibleReport {
    decisions: Option<()>,
    prediction: Option<()>,
    search: SearchSummary,
    #[serde(flatten)]
    diagnosis: Diagnosis,
    #[serde(skip)]
    headline: String,
}

impl InfeasibleReport {
    /// The report of a search without a plan.
    pub fn new(request: &Request, report: &SearchReport) -> InfeasibleReport {
        let Request { model, devices, profile, .. } = request;
        let devices = plural(*devices, "device");
        let devices = match request.objective {
            Objective::Cost => format!("up to {devices}"),
            _ => devices,
        };
        let subject = format!("for {} on {devices} of {}", model.name, profile.name());
        let headline = match report.status {
            SearchStatus::TimeLimit => format!("no plan was found in time {subject}"),
            SearchStatus::Infeasible => format!("no plan exists {subject}"),
            _ => format!("no plan that fits was found {subject}"),
        };
        let diagnosis = diagnosis(request, report);
        let search = SearchSummary::without_plan(report);
        InfeasibleReport { decisions: None, prediction: None, search, diagnosis, headline }
    }

    /// The failure of the command, which is the text for people.
    pub fn into_failure(self) -> Failure {
        // The headline has the conclusion.
        let Diagnosis { causes, conclusion: _, caveat, hints } = self.diagnosis;
        let problem = Problem { hints, ..Problem::new("", self.headline) };
        Failure::failed(vec![problem.because(causes).because(caveat)])
    }
}

/// The reason why no plan was found, and corrections to try.
fn diagnosis(request: &Request, report: &SearchReport) -> Diagnosis {
    if report.status != SearchStatus::TimeLimit {
        return narrows_planner::diagnose(request, report);
    }
    let limit = request.time_limit.unwrap_or_default().as_secs_f64();
    let hint = "a longer --time-limit, or fewer candidates: fix --tensor or --pipeline";
    Diagnosis {
        causes: vec![format!("because the search was to end after {limit} s")],
        conclusion: Some("no plan was found in time"),
        caveat: None,
        hints: vec![hint.into()],
    }
}
