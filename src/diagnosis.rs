//! Reasons why a search found no plan.

use narrows_planner::{Diagnosis, Request, SearchCache, SearchReport, SearchStatus, diagnose};

/// The reason why no plan was found, and corrections to try, with the cache that the search used.
pub fn diagnosis(request: &Request, report: &SearchReport, cache: &SearchCache) -> Diagnosis {
    if report.status != SearchStatus::TimeLimit {
        return diagnose(request, report, cache);
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
