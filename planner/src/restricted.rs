//! Plans under restricted rules, which fit or are better where memory binds.

use narrows_plan::Bytes;

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
    let lowered = |report: &ContextReport| {
        let needed = needed_by_one_plan(&report.outcome)?;
        Some((needed, report.context))
    };
    let may_need_least = |report: &&ContextReport| may_need_least_memory(request, &report.context);
    let mut smallest: Vec<_> = reports.iter().filter(may_need_least).filter_map(lowered).collect();
    smallest.sort_by_key(|(needed, _)| *needed);
    let contexts = smallest.iter().take(RESTRICTED_MAX);
    let mut plans =
        contexts.filter_map(|(_, context)| solvers.of(context).feasible_plan_restricted(context));
    plans.next()
}

/// The memory of the smallest plan that was found in a context, where it is too large, but other plans may not be.
fn needed_by_one_plan(outcome: &ContextOutcome) -> Option<Bytes> {
    match outcome {
        ContextOutcome::Infeasible(Infeasible::Memory { needed, evidence, .. }) => {
            (*evidence == MemoryEvidence::OnePlan).then_some(*needed)
        }
        _ => None,
    }
}

/// Share of the memory limit from which on memory counts as binding.
const BINDING_SHARE: f64 = 0.8;

/// Whether memory binds a plan.
pub(crate) fn binds_memory(request: &Request, plan: &FeasiblePlan) -> bool {
    plan.peak_arena().as_f64() >= BINDING_SHARE * request.arena_limit().as_f64()
}

/// Gap from which on restricted rules are searched.
const RESTRICTED_GAP_MIN: f64 = 0.01;

/// Gap from which on the strategies of published baselines are searched too, and the smallest plans.
pub(crate) const LARGE_GAP_MIN: f64 = 0.05;

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
    let value = objective.value(&best);
    if !binds_memory(request, &best) || proven >= value * (1.0 - RESTRICTED_GAP_MIN) {
        return best;
    }
    let published = proven < value * (1.0 - LARGE_GAP_MIN);
    let is_open = |report: &&ContextReport| match &report.outcome {
        ContextOutcome::Solved(_) | ContextOutcome::NoImprovement => true,
        outcome => needed_by_one_plan(outcome).is_some(),
    };
    let bound = |report: &ContextReport| {
        let weight = objective.weight(&report.context);
        report.bound.map_or(f64::INFINITY, |bound| weight * bound.0)
    };
    let mut open: Vec<&ContextReport> = reports.iter().filter(is_open).collect();
    // First the context of the best plan, in which others fit too.
    let of_best = best.decisions.context;
    let is_other = |report: &ContextReport| !report.has_plans_of(&of_best);
    open.sort_by(|a, b| is_other(a).cmp(&is_other(b)).then(bound(a).total_cmp(&bound(b))));
    for report in open.into_iter().take(RESTRICTED_MAX) {
        let context = &report.context;
        let (value, weight) = (objective.value(&best), objective.weight(context));
        let solver = solvers.of(context);
        let cutoff = value / weight - solver.beyond_kernels_min(context).0;
        if bound(report) < value
            && let Some(faster) = solver.faster_plan_restricted(context, cutoff, published)
            && objective.value(&faster) < value
        {
            best = faster;
        }
    }
    best
}
