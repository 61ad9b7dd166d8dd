//! Answers for programs. Keys carry their units and stay what they are.

use narrows_plan::Plan;
use narrows_planner::{Explanation, Prediction, Request, SearchReport};
use serde::Serialize;

use crate::commands::GivenPlan;

use super::{PlanReport, infeasible, limited};

/// What `plan` and `cost` print.
#[derive(Serialize)]
pub struct PlanOutput<'a> {
    decisions: &'a Plan,
    prediction: PredictionOutput<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    search: Option<SearchOutput>,
}

/// A prediction with what it is compared to.
#[derive(Serialize)]
struct PredictionOutput<'a> {
    #[serde(flatten)]
    prediction: &'a Prediction,
    /// `null` without a limit.
    memory_limit_bytes: Option<u64>,
}

/// How a search went.
#[derive(Serialize)]
pub struct SearchOutput {
    status: &'static str,
    /// `null` when there is no plan to be at a distance from it.
    gap: Option<f64>,
    /// No plan is faster; `null` when none was found.
    bound_s: Option<f64>,
    candidates_priced: u64,
    candidates_pruned: u64,
    segment_solves: u64,
    wall_time_s: f64,
}

/// What `plan` and `cost` print when there is no plan.
#[derive(Serialize)]
pub struct InfeasibleOutput {
    decisions: Option<()>,
    prediction: Option<()>,
    search: SearchOutput,
    /// Each is explained by the next.
    causes: Vec<String>,
    hints: Vec<String>,
}

impl SearchOutput {
    /// The report's numbers.
    pub fn new(report: &SearchReport) -> SearchOutput {
        SearchOutput {
            status: report.status.name(),
            gap: Some(report.gap),
            bound_s: Some(report.bound.0).filter(|bound| bound.is_finite()),
            candidates_priced: report.candidates_priced,
            candidates_pruned: report.candidates_pruned,
            segment_solves: report.segment_solves,
            wall_time_s: report.wall_time.as_secs_f64(),
        }
    }

    /// The numbers of a report on a search that found no plan.
    fn without_plan(report: &SearchReport) -> SearchOutput {
        SearchOutput { gap: None, bound_s: None, ..SearchOutput::new(report) }
    }
}

/// What `explain` prints.
#[derive(Serialize)]
pub struct ExplainOutput<'a> {
    #[serde(flatten)]
    explanation: &'a Explanation,
    /// The plan file that was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    given: Option<ComparisonOutput<'a>>,
    search: SearchOutput,
}

/// A plan file beside the plan found.
#[derive(Serialize)]
struct ComparisonOutput<'a> {
    name: &'a str,
    prediction: &'a Prediction,
    ratio: Option<f64>,
}

/// An explanation.
pub fn explained<'a>(
    explanation: &'a Explanation,
    given: Option<&'a GivenPlan>,
    report: &SearchReport,
) -> ExplainOutput<'a> {
    let best = explanation.chosen.as_ref().and_then(|chosen| chosen.prediction.as_ref());
    let given = given.map(|given| ComparisonOutput {
        name: &given.name,
        prediction: &given.prediction,
        ratio: best.map(|best| given.prediction.step_time_s / best.step_time_s),
    });
    let search = match explanation.chosen {
        Some(_) => SearchOutput::new(report),
        None => SearchOutput::without_plan(report),
    };
    ExplainOutput { explanation, given, search }
}

/// A priced plan.
pub fn found<'a>(findings: &PlanReport<'a>) -> PlanOutput<'a> {
    PlanOutput {
        decisions: findings.plan,
        prediction: PredictionOutput {
            prediction: findings.prediction,
            memory_limit_bytes: limited(findings.memory_limit).map(|bytes| bytes.0),
        },
        search: findings.search.map(SearchOutput::new),
    }
}

/// A search without a plan.
pub fn nothing_found(request: &Request, report: &SearchReport) -> InfeasibleOutput {
    let (causes, hints) = infeasible::causes(request, report);
    InfeasibleOutput {
        decisions: None,
        prediction: None,
        search: SearchOutput::without_plan(report),
        causes,
        hints,
    }
}
