//! Outcome and effort of a search.

use narrows_plan::Seconds;
use narrows_planner::{Objective, SearchReport, SearchStatus};
use schemars::JsonSchema;
use serde::{Serialize, Serializer};

use crate::text::{percent, plural, thousands};

/// The outcome and the effort of a search.
#[derive(Serialize, JsonSchema)]
pub struct SearchSummary {
    #[serde(skip)]
    objective: Objective,
    /// `optimal`, `gap_limit`, `time_limit` or `infeasible`.
    #[serde(serialize_with = "status_name")]
    #[schemars(with = "String")]
    status: SearchStatus,
    /// Whether a signal ended the search, with the status `time_limit`; absent otherwise.
    #[serde(rename = "interrupted", skip_serializing_if = "std::ops::Not::not")]
    is_interrupted: bool,
    /// Relative distance of the plan to the bound on the objective; `null` without a plan.
    gap: Option<f64>,
    /// Lower bound on the step time of all plans; `null` if unknown, and with another objective.
    bound_s: Option<f64>,
    /// Lower bound on the memory of the fullest device under all plans; absent with another objective.
    #[serde(skip_serializing_if = "Option::is_none")]
    bound_bytes: Option<u64>,
    /// Lower bound on the cost of a step under all plans; absent with another objective.
    #[serde(skip_serializing_if = "Option::is_none")]
    bound_device_seconds: Option<f64>,
    candidates_priced: u64,
    candidates_pruned: u64,
    segment_solves: u64,
    /// Integer programs that the library failed to solve; absent when there are none.
    #[serde(skip_serializing_if = "is_zero")]
    failed_solves: u64,
    wall_time_s: f64,
}

/// Number of plans of several searches that are proven the best, and largest gaps of the others, in words; `None` where all
/// are proven.
pub fn gap_phrase(searches: &[&SearchSummary]) -> Option<String> {
    let is_proven = |search: &SearchSummary| search.is_proven_best();
    let proven = searches.iter().filter(|search| is_proven(search)).count();
    let best = match searches.iter().all(|search| search.objective == Objective::StepTime) {
        true => "the fastest",
        false => "optimal",
    };
    let gap_of = |objective: Objective| {
        let others = searches.iter().filter(|search| !is_proven(search));
        let others = others.filter(|search| search.objective == objective);
        others.filter_map(|search| search.gap).reduce(f64::max)
    };
    let gaps = Objective::ALL.into_iter();
    let gaps = gaps.filter_map(|objective| Some(none_better(objective, gap_of(objective)?)));
    let gaps = gaps.collect::<Vec<_>>().join(", ");
    let plans = plural(searches.len() as u64, "plan");
    let are = if proven == 1 { "is" } else { "are" };
    match (searches.len(), proven) {
        _ if gaps.is_empty() => None,
        (1, _) => Some(format!("The plan is not proven {best}: {gaps}.")),
        (_, 0) => Some(format!("None of the plans is proven {best}: {gaps}.")),
        _ => Some(format!("{proven} of {plans} {are} proven {best}; at the other points, {gaps}.")),
    }
}

/// The proven statement about all other plans for a gap without a proof that it is 0, rounded up to a tenth of a percent.
fn none_better(objective: Objective, gap: f64) -> String {
    let gap = percent((gap * 1e3).ceil().max(1.0) / 1e3);
    match objective {
        Objective::StepTime => format!("no plan takes more than {gap} less time"),
        Objective::Memory => format!("no plan saves more than {gap} of the memory"),
        Objective::Cost => format!("no plan is more than {gap} cheaper"),
    }
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

fn status_name<S: Serializer>(status: &SearchStatus, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(status.name())
}

impl SearchSummary {
    /// The summary of a search that found a plan.
    pub fn new(report: &SearchReport) -> SearchSummary {
        let bound = Some(report.objective_bound).filter(|bound| bound.is_finite());
        let (bound_s, bound_bytes, bound_device_seconds) = match report.objective {
            Objective::StepTime => (bound, None, None),
            Objective::Memory => (None, bound.map(|bytes| bytes as u64), None),
            Objective::Cost => (None, None, bound),
        };
        SearchSummary {
            objective: report.objective,
            status: report.status,
            is_interrupted: report.is_interrupted,
            gap: Some(report.gap),
            bound_s,
            bound_bytes,
            bound_device_seconds,
            candidates_priced: report.candidates_priced,
            candidates_pruned: report.candidates_pruned,
            segment_solves: report.segment_solves,
            failed_solves: report.failed_solves,
            wall_time_s: report.wall_time.as_secs_f64(),
        }
    }

    /// The summary of a search that found no plan.
    pub fn without_plan(report: &SearchReport) -> SearchSummary {
        SearchSummary {
            gap: None,
            bound_s: None,
            bound_bytes: None,
            bound_device_seconds: None,
            ..SearchSummary::new(report)
        }
    }

    /// Name of the status in JSON.
    pub fn status(&self) -> &'static str {
        self.status.name()
    }

    /// Whether the plan is proven the best of the space.
    fn is_proven_best(&self) -> bool {
        self.status == SearchStatus::Optimal && self.gap == Some(0.0)
    }

    /// Relative distance of the plan to the bound; `None` without a plan.
    pub fn gap(&self) -> Option<f64> {
        self.gap
    }

    /// Status and proven statement.
    pub fn verdict(&self) -> String {
        format!("{}: {}", self.status.name(), self.outcome())
    }

    /// The proven statement.
    pub fn outcome(&self) -> String {
        let best = match self.objective {
            Objective::StepTime => "the fastest plan",
            Objective::Memory => "the plan with the least memory",
            Objective::Cost => "the cheapest plan",
        };
        let ended = if self.is_interrupted { "interrupted" } else { "out of time" };
        let none_better = |gap: f64| none_better(self.objective, gap);
        match (self.status, self.gap) {
            _ if self.is_proven_best() => format!("proven {best} of the search space"),
            (SearchStatus::Infeasible, _) => "no plan exists".into(),
            (SearchStatus::Optimal | SearchStatus::GapLimit, Some(gap)) => none_better(gap),
            (SearchStatus::TimeLimit, Some(gap)) => format!("{ended}; {}", none_better(gap)),
            (SearchStatus::Optimal | SearchStatus::GapLimit, None) => {
                "no plan that fits was found".into()
            }
            (SearchStatus::TimeLimit, None) => format!("{ended}; no plan was found"),
        }
    }

    /// Numbers of candidates, and the wall-clock time.
    pub fn effort(&self) -> String {
        format!(
            "{} candidates priced, {} pruned, in {}",
            thousands(self.candidates_priced),
            thousands(self.candidates_pruned),
            Seconds(self.wall_time_s)
        )
    }
}
