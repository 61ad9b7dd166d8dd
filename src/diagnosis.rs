//! Reasons why a search found no plan.

use narrows_planner::{Diagnosis, Request, SearchCache, SearchReport, SearchStatus, diagnose};

/// The reason why no plan was found, and corrections to try, with the cache that the search used.
pub fn diagnosis(request: &Request, report: &SearchReport, cache: &SearchCache) -> Diagnosis {
    if report.status != SearchStatus::TimeLimit {
        return diagnose(request, report, cache);
    }
    let fewer = "fewer candidates: fix --tensor or --pipeline";
    if report.is_interrupted {
        return Diagnosis { hints: vec![fewer.into()], ..Diagnosis::default() };
    }
    let limit = request.time_limit.unwrap_or_default().as_secs_f64();
    Diagnosis {
        causes: vec![format!("because the search was to end after {limit} s")],
        conclusion: Some("no plan was found in time"),
        caveat: None,
        hints: vec![format!("a longer --time-limit, or {fewer}")],
    }
}
