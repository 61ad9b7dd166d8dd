//! The result of a search.

use std::time::Instant;

use narrows_plan::PlanSource;

use crate::feasible_plan::FeasiblePlan;
use crate::report::SearchReport;
use crate::request::Request;

/// Result of a search.
#[derive(Clone, Debug)]
pub struct SearchResult {
    /// The best plan, if any was found.
    pub best: Option<FeasiblePlan>,
    /// Status, bound and statistics of the search.
    pub report: SearchReport,
}

impl SearchResult {
    /// The result for another request with the same [`SearchKey`](crate::SearchKey), found since `begin`. The counts of
    /// the report are not changed.
    pub(crate) fn for_request(&self, request: &Request, begin: Instant) -> SearchResult {
        let mut result = self.clone();
        if let Some(best) = &mut result.best {
            best.plan.hardware = PlanSource {
                name: request.profile.name().into(),
                fingerprint: request.profile.fingerprint().into(),
            };
        }
        result.report.wall_time = begin.elapsed();
        result
    }
}
