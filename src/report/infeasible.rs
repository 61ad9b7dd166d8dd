//! The report of a search that found no plan.

use narrows_planner::{Diagnosis, Objective, Request, SearchCache, SearchReport, SearchStatus};
use serde::Serialize;

use super::search::SearchSummary;
use crate::diagnosis::diagnosis;
use crate::errors::{ExitStatus, Failure, Problem};
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
    #[serde(skip)]
    status: ExitStatus,
}

impl InfeasibleReport {
    /// The report of a search without a plan, with the cache that the search used.
    pub fn new(request: &Request, report: &SearchReport, cache: &SearchCache) -> InfeasibleReport {
        InfeasibleReport::diagnosed(request, report, diagnosis(request, report, cache))
    }

    /// The report of a search whose diagnosis is known.
    pub fn diagnosed(
        request: &Request,
        report: &SearchReport,
        diagnosis: Diagnosis,
    ) -> InfeasibleReport {
        let Request { model, devices, profile, .. } = request;
        let devices = plural(*devices, "device");
        let devices = match request.objective {
            Objective::Cost => format!("up to {devices}"),
            _ => devices,
        };
        let subject = format!("for {} on {devices} of {}", model.name, profile.name());
        let headline = match report.status {
            _ if report.is_interrupted => {
                format!("the search was interrupted before it found a plan {subject}")
            }
            SearchStatus::TimeLimit => format!("no plan was found in time {subject}"),
            SearchStatus::Infeasible => format!("no plan exists {subject}"),
            _ => format!("no plan that fits was found {subject}"),
        };
        let status = match report.is_interrupted {
            true => ExitStatus::Stopped,
            false => ExitStatus::Failed,
        };
        let search = SearchSummary::without_plan(report);
        InfeasibleReport { decisions: None, prediction: None, search, diagnosis, headline, status }
    }

    /// The failure of the command, which is the text for people.
    pub fn into_failure(self) -> Failure {
        // The headline has the conclusion.
        let Diagnosis { causes, conclusion: _, caveat, hints } = self.diagnosis;
        let problem = Problem { hints, ..Problem::new("", self.headline) };
        Failure { status: self.status, problems: vec![problem.because(causes).because(caveat)] }
    }
}
