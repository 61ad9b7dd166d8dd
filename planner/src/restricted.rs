//! Plans under restricted rules, which fit or are better where memory binds.

use crate::context_solvers::ContextSolvers;
use crate::context_space::may_need_least_memory;
use crate::feasible_plan::FeasiblePlan;
use crate::infeasible::{Infeasible, MemoryEvidence};
use crate::objective::Objective;
use crate::report::{ContextOutcome, ContextReport};
use crate::request::Request;

/// Contexts that are tried again under restricted rules.
const RESTRICTED_MAX: usize = 2;

/// A plan with the smallest memory under restricted rules, in contexts whose smallest plan was too large.
pub(crate) fn feasible_plan_restricted(
    request: &Request,
    solvers: &ContextSolvers,
    reports: &[ContextReport],
) -> Option<FeasiblePlan> {
    let lowered = |report: &ContextReport| match &report.outcome {
        ContextOutcome::Infeasible(Infeasible::Memory {
            needed,
            evidence: MemoryEvidence::OnePlan,
            ..
        }) => Some((*needed, report.context)),
        _ => None,
    };
    let may_need_least = |report: &&ContextReport| may_need_least_memory(request, &report.context);
    let mut smallest: Vec<_> = reports.iter().filter(may_need_least).filter_map(lowered).collect();
    smallest.sort_by_key(|(needed, _)| *needed);
    let contexts = smallest.iter().take(RESTRICTED_MAX);
    let mut plans =
        contexts.filter_map(|(_, context)| solvers.of(context).feasible_plan_restricted(context));
    plans.next()
}

/// Share of the memory limit from which on memory counts as binding.
const BINDING_SHARE: f64 = 0.8;

/// Gap from which on restricted rules are searched.
const RESTRICTED_GAP_MIN: f64 = 0.01;

/// The best plan, or a better one under restricted rules in the most promising contexts, where memory
/// binds and the gap is open. `proven` is the bound on the objective.
pub(crate) fn improve_restricted(
    request: &Request,
    solvers: &ContextSolvers,
    reports: &[ContextReport],
    mut best: FeasiblePlan,
    proven: f64,
) -> FeasiblePlan {
    let objective: Objective = request.objective;
    let filled = best.peak_arena().as_f64() / request.arena_limit().as_f64();
    let value = objective.value(&best);
    if filled < BINDING_SHARE || proven >= value * (1.0 - RESTRICTED_GAP_MIN) {
        return best;
    }
    let is_open = |report: &&ContextReport| {
        matches!(report.outcome, ContextOutcome::Solved(_) | ContextOutcome::NoImprovement)
    };
    let bound = |report: &ContextReport| {
        let weight = objective.weight(&report.context);
        report.bound.map_or(f64::INFINITY, |bound| weight * bound.0)
    };
    let mut open: Vec<&ContextReport> = reports.iter().filter(is_open).collect();
    open.sort_by(|a, b| bound(a).total_cmp(&bound(b)));
    for report in open.into_iter().take(RESTRICTED_MAX) {
        let context = &report.context;
        let (value, weight) = (objective.value(&best), objective.weight(context));
        let solver = solvers.of(context);
        let cutoff = value / weight - solver.beyond_kernels_min(context).0;
        if bound(report) < value
            && let Some(faster) = solver.faster_plan_restricted(context, cutoff)
            && objective.value(&faster) < value
        {
            best = faster;
        }
    }
    best
}
