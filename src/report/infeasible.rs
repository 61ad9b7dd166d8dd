//! Why there is no plan.

use narrows_planner::Request;
use narrows_planner::fit::Refusal;
use narrows_planner::search::{Fate, SearchReport, SearchStatus};

use super::page::plural;
use crate::errors::{Failure, Problem};

/// The failure of a search that found nothing.
pub fn failure(request: &Request, report: &SearchReport) -> Failure {
    let Request { model, devices, profile, .. } = request;
    let devices = plural(*devices, "device");
    let subject = format!("for {} on {devices} of {}", model.name, profile.name());
    let problem = match report.status {
        SearchStatus::TimeLimit => format!("no plan was found in time {subject}"),
        _ => format!("no plan exists {subject}"),
    };
    let mut problem = Problem::new("", problem).because(causes(request, report));
    problem.hints = hints(request, report);
    Failure::failed(vec![problem])
}

/// The chain of reasons.
pub fn causes(request: &Request, report: &SearchReport) -> Vec<String> {
    if report.status == SearchStatus::TimeLimit {
        let limit = request.time_limit.unwrap_or_default().as_secs_f64();
        return vec![format!("the search was to end after {limit} s and had found nothing yet")];
    }
    if report.contexts.is_empty() {
        return vec![
            format!(
                "no mesh of {} divides a batch of {} as asked",
                plural(request.devices, "device"),
                plural(request.global_batch, "sequence"),
            ),
        ];
    }
    let mut causes = vec![format!(
        "none of {} of mesh, microbatch and ZeRO holds a plan",
        plural(report.contexts.len() as u64, "combination")
    )];
    let closest = report
        .contexts
        .iter()
        .filter_map(|context| match &context.fate {
            Fate::Refused(Refusal::Memory { stage, needed, limit }) => {
                Some((*needed, *limit, *stage, &context.context))
            }
            _ => None,
        })
        .min_by_key(|(needed, ..)| *needed);
    match closest {
        Some((needed, limit, stage, context)) => {
            let stage = stage.map_or(String::new(), |stage| format!("stage {stage} "));
            causes.push(format!(
                "the closest, {}, needs {needed} a device {stage}at least, and the limit is {limit}",
                context.mesh
            ));
        }
        None => causes.push("under these rules some op has no legal strategy".into()),
    }
    causes
}

/// What to try.
pub fn hints(request: &Request, report: &SearchReport) -> Vec<String> {
    if report.status == SearchStatus::TimeLimit {
        return vec!["a longer --time-limit, or fewer candidates: fix --tensor or --pipeline".into()];
    }
    let memory = report
        .contexts
        .iter()
        .any(|context| matches!(context.fate, Fate::Refused(Refusal::Memory { .. })));
    if memory {
        return vec!["more --devices, a smaller --micro-batch or a larger --memory-limit".into()];
    }
    if report.contexts.is_empty() {
        let batch = request.devices;
        return vec![format!("a --global-batch that the replicas divide, such as {batch}")];
    }
    vec!["a --tensor that divides heads, widths and ranks, or --weights any".into()]
}
