//! Why no plan was found, as a chain of causes, and what to try.

use std::fmt;

use narrows_plan::strategy::{Baseline, Recompute, WeightRule, Zero};
use narrows_plan::{Bytes, Mesh};

use crate::deadline::Deadline;
use crate::fit::{ContextSolver, Infeasible, MemoryEvidence};
use crate::request::Request;
use crate::search::{ContextOutcome, ContextReport, SearchReport, SearchStatus};
use crate::segments::SegmentSolver;

/// Why no plan exists, as a chain of causes, and what to try.
pub fn causes(request: &Request, report: &SearchReport) -> (Vec<String>, Vec<String>) {
    let mut causes = vec![];
    let mut hints = vec![];
    if report.contexts.is_empty() {
        let devices = match request.devices {
            1 => "1 device".into(),
            devices => format!("{devices} devices"),
        };
        causes.push(format!(
            "because no mesh of {devices} with these axes divides {} sequences into microbatches",
            request.global_batch
        ));
        hints.push("another --global-batch or --micro-batch, or fewer fixed axes".into());
        return (causes, hints);
    }
    let smallest = report
        .contexts
        .iter()
        .filter_map(|context| match &context.fate {
            ContextOutcome::Refused(Infeasible::Memory { needed, of, .. }) => {
                Some((*needed, *of, context))
            }
            _ => None,
        })
        .min_by_key(|(needed, ..)| *needed);
    if let Some((needed, of, context)) = smallest {
        let limit = request.memory_bytes();
        let needs = match of {
            // Between what bytes allow and what an arena of some plan was, there may be others.
            MemoryEvidence::Lowered => {
                format!("the smallest plan that was found needs {needed} a device")
            }
            MemoryEvidence::Tried => {
                format!("every plan that was tried needs more than {limit} a device")
            }
            MemoryEvidence::Every if needed > limit => format!(
                "weights, optimizer states and kept activations need at least {needed} a device"
            ),
            MemoryEvidence::Every => format!("every plan needs more than {limit} a device"),
        };
        causes.push(format!(
            "because {needs} on the most economical mesh ({}, microbatch {})",
            context.context.mesh, context.context.workload.micro_batch
        ));
        causes.push(format!("and because a device may hold {limit}"));
        let proved = report.status == SearchStatus::Infeasible;
        causes.push(if proved { "no plan fits" } else { "no plan was found that fits" }.into());
        if let Some((enough, mesh)) = enough_memory(request, report) {
            let hint =
                format!("--memory-limit {} is enough, if the devices have it: {mesh}", enough.0);
            hints.push(hint);
        }
        hints.push(smaller(request));
    } else if report.contexts.iter().any(|c| matches!(c.fate, ContextOutcome::Refused(_))) {
        causes.extend(without_strategy(request, report));
        causes.push(format!(
            "because on every mesh some op has no legal strategy under `--strategy {}`{}",
            request.rules.baseline.name(),
            match request.rules.weights {
                WeightRule::Sharded => " with every weight sharded",
                WeightRule::Any => "",
            }
        ));
        let proved = report.status == SearchStatus::Infeasible;
        causes.push(if proved { "no plan exists" } else { "no plan was found" }.into());
        let mut hint = "a tensor axis that divides heads, ranks and widths".to_string();
        if request.rules.weights == WeightRule::Sharded {
            hint.push_str(", or --weights any");
        }
        if request.rules.baseline != Baseline::Auto {
            hint.push_str(", or --strategy auto");
        }
        hints.push(hint);
    }
    if report.contexts.iter().any(|context| matches!(context.fate, ContextOutcome::NotReached)) {
        causes.push("though some meshes were not reached in time".into());
        hints.push("a longer --time-limit".into());
    }
    (causes, hints)
}

/// What makes plans smaller, of what is not so yet.
fn smaller(request: &Request) -> String {
    let mut ways = vec!["more devices"];
    if request.micro_batch.is_some_and(|size| size > 1) {
        ways.push("a smaller --micro-batch");
    }
    if request.rules.recompute != Recompute::Auto {
        ways.push("--recompute auto");
    }
    if request.zero == Some(Zero::Off) {
        ways.push("--zero auto");
    }
    match ways.split_last() {
        Some((last, [])) => (*last).into(),
        Some((last, first)) => format!("{} or {last}", first.join(", ")),
        None => String::new(),
    }
}

/// How many ops are named that have no strategy.
const NAMED_MAX: usize = 4;

/// Which ops of the first mesh have no strategy.
fn without_strategy(request: &Request, report: &SearchReport) -> Option<String> {
    let refused = |report: &&ContextReport| {
        matches!(report.fate, ContextOutcome::Refused(Infeasible::NoStrategy))
    };
    let context = report.contexts.iter().find(refused)?.context;
    let names = SegmentSolver::new(request, Deadline::none()).without_strategy(&context);
    if names.is_empty() {
        return None;
    }
    let more = names.len().saturating_sub(NAMED_MAX);
    let named = names.into_iter().take(NAMED_MAX).collect::<Vec<_>>().join("`, `");
    let more = if more > 0 { format!(" and {more} others") } else { String::new() };
    let tensor = context.mesh.tensor;
    Some(format!("because `{named}`{more} cannot be split as asked over {tensor} devices"))
}

/// How many of the most economical meshes are lowered to learn what would be enough.
const LOWERED_MAX: usize = 6;

/// The memory that a plan needs which exists, and its mesh.
fn enough_memory(request: &Request, report: &SearchReport) -> Option<(Bytes, Mesh)> {
    let segments = SegmentSolver::new(request, Deadline::none());
    let fitter = ContextSolver::new(request, &segments);
    let mut refused: Vec<_> = report
        .contexts
        .iter()
        .filter_map(|context| match &context.fate {
            ContextOutcome::Refused(Infeasible::Memory { needed, .. }) => {
                Some((*needed, context.context))
            }
            _ => None,
        })
        .collect();
    refused.sort_by_key(|(needed, _)| *needed);
    let smallest = refused.iter().take(LOWERED_MAX).filter_map(|(_, context)| {
        let fitted = fitter.smallest(context)?;
        Some((fitted.peak(), *context))
    });
    let (peak, context) = smallest.min_by_key(|(peak, _)| *peak)?;
    let narrower = fitter.smallest_of_narrower(&context).map(|fitted| fitted.peak());
    Some((narrower.map_or(peak, |narrower| narrower.min(peak)), context.mesh))
}

impl fmt::Display for Infeasible {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Infeasible::NoStrategy => write!(f, "some op has no legal strategy"),
            Infeasible::Memory { stage: Some(stage), needed, limit, .. } => {
                write!(f, "stage {stage} needs {needed}, a device may hold {limit}")
            }
            Infeasible::Memory { of: MemoryEvidence::Tried, limit, .. } => {
                write!(f, "nothing that was tried fits, a device may hold {limit}")
            }
            Infeasible::Memory { stage: None, needed, limit, .. } => {
                write!(f, "needs {}, a device may hold {limit}", at_least(*needed))
            }
        }
    }
}

fn at_least(bytes: Bytes) -> String {
    format!("at least {bytes}")
}
