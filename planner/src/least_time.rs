//! The search for the least step time or cost: bounds every context from below and solves the promising ones.
//!
//! 1. Contexts (mesh, microbatch, ZeRO stage) that cannot hold the model are dropped.
//! 2. Each context gets a bound: with T the smallest microbatch time of the whole model, u the smallest
//!    step phase of an average stage, m microbatches and P stages, no 1F1B step is shorter than
//!    m·T/P + u, nor than T / (1 − (1 − 1/m)ᴾ), which stages of the best proportion would reach. First, T is the
//!    least time of every op; of the most promising contexts, T then leaves out what ZeRO adds to the passes, so that many
//!    contexts share it, and the most promising of these get their own. Where a tensor or context axis spans nodes, T first
//!    has links as fast as those inside a node, so that searches which differ in the bandwidth between nodes share it too.
//! 3. The most promising contexts get a better bound, from dividing the blocks among the stages within
//!    the memory limit. The contexts that remain most promising are solved (lowered, placed in memory,
//!    simulated) until no bound is better than the best plan.
//! 4. Where the gap is still large, the least bounds of pipelines are raised by branching on the numbers of blocks of stages,
//!    which also leads to better plans.

use std::time::Instant;

use narrows_plan::Context;
use rayon::prelude::*;

use crate::bounded_context::{BoundedContext, ContextResult};
use crate::context::BranchingTimes;
use crate::context_queue::ContextQueue;
use crate::context_solvers::ContextSolvers;
use crate::context_space::contexts;
use crate::deadline::Deadline;
use crate::feasible_plan::FeasiblePlan;
use crate::objective::Objective;
use crate::proof::{OPTIMAL_GAP, ProofState};
use crate::report::{ContextOutcome, ContextReport};
use crate::request::Request;
use crate::restricted::{feasible_plan_restricted, improve_restricted};
use crate::search_cache::SearchCache;
use crate::search_result::SearchResult;
use crate::segment::SegmentSolver;

/// Contexts that are solved in parallel.
const CHUNK: usize = 4;
/// Contexts whose bounds are raised by branching.
const BRANCHED_MAX: usize = 24;

/// Searches the whole space of a request for the least step time or cost until a deadline. `known` is a plan of the space,
/// if one is known.
pub(crate) fn search_least_time(
    request: &Request,
    deadline: &Deadline,
    cache: &SearchCache,
    known: Option<FeasiblePlan>,
) -> SearchResult {
    let begin = Instant::now();
    let objective = request.objective;
    let requests = request.by_devices();
    let segments: Vec<SegmentSolver> = requests
        .iter()
        .map(|request| SegmentSolver::with_cache(request, deadline.clone(), cache.segments()))
        .collect();
    let solvers = ContextSolvers::new(&requests, &segments);
    // Under a time limit, a first plan comes before any bound.
    let mut best = match known {
        None if deadline.exists() => solvers.first_feasible(),
        known => known,
    };
    // Bounds take at most half of the time, and the solution of contexts the rest.
    let contexts: Vec<Context> = requests.iter().flat_map(contexts).collect();
    let mut open = ContextQueue::new(objective, contexts, &solvers, deadline);
    if !deadline.is_half_over() {
        best = objective.better(best, open.warm_start());
    }
    let mut reports = vec![];
    let mut solved: Vec<(BoundedContext, f64)> = vec![];
    let mut is_out_of_time = false;
    // The contexts of a chunk are solved in parallel against one incumbent, so that the outcome does
    // not depend on the number of threads.
    while !open.is_empty() {
        let incumbent = best.as_ref().map_or(f64::INFINITY, |plan| objective.value(plan));
        let deadline_passed = deadline.is_over();
        if !deadline_passed {
            open.most_promising(CHUNK, |_| true, |open| open.lower_bound() < incumbent);
        }
        let is_decided = deadline_passed || open.least_bound() >= incumbent;
        let size = if is_decided { open.len() } else { CHUNK.min(open.len()) };
        if !deadline_passed && open.refine(size, incumbent) {
            continue;
        }
        let chunk = open.take(size);
        let results: Vec<ContextResult> =
            chunk.par_iter().map(|open| open.solve(solvers.of(&open.context), incumbent)).collect();
        for (bounded, result) in chunk.into_iter().zip(results) {
            is_out_of_time |= result.is_interrupted;
            best = objective.better(best, result.plan);
            // Solving proves more than the bound that ordered the contexts.
            let outcome = result.outcome;
            let bound = bounded.proven_bound(&outcome, result.bound.min(incumbent));
            reports.push(ContextReport { context: bounded.context, bound, outcome });
            if result.bound.is_finite() {
                solved.push((bounded, result.bound));
            }
        }
    }
    if !deadline.is_over() {
        best = best.or_else(|| feasible_plan_restricted(request, &solvers, &reports)).map(|best| {
            improve_restricted(request, &solvers, &reports, best, least_bound(&solved))
        });
    }
    best = best.map(|best| branch_least_bounds(&mut solved, best, objective, &solvers, deadline));
    let bound = least_bound(&solved);
    is_out_of_time |= deadline.is_over();
    if let Some(best) = &best {
        record_best(best, &mut reports);
    }
    let proof = ProofState { bound, is_out_of_time, has_unproven: solvers.have_unproven() };
    let value = best.as_ref().map(|plan| objective.value(plan));
    let mut report = proof.report(request, value, reports);
    solvers.add_effort(&mut report);
    report.wall_time = begin.elapsed();
    let step_factor = request.profile.launch_costs(request.executor).step_factor;
    SearchResult { best, report: report.scaled_to_steps(step_factor) }
}

/// The least bound of solved contexts.
fn least_bound(solved: &[(BoundedContext, f64)]) -> f64 {
    solved.iter().map(|(_, bound)| *bound).fold(f64::INFINITY, f64::min)
}

/// Raises the bounds of solved contexts to within [`OPTIMAL_GAP`] of the best plan, the least first; those after one that stays less only
/// need to be no less than it. Returns the best plan, which may be a better one.
fn branch_least_bounds(
    solved: &mut [(BoundedContext, f64)],
    mut best: FeasiblePlan,
    objective: Objective,
    solvers: &ContextSolvers,
    deadline: &Deadline,
) -> FeasiblePlan {
    let mut enough = f64::INFINITY;
    solved.sort_by(|(_, a), (_, b)| a.total_cmp(b));
    for (bounded, bound) in solved.iter_mut().take(BRANCHED_MAX) {
        let incumbent = objective.value(&best);
        let target = incumbent * (1.0 - OPTIMAL_GAP);
        enough = enough.min(target);
        if *bound >= enough || deadline.is_over() {
            break;
        }
        let values = BranchingTimes { enough, target, incumbent };
        let branched = bounded.branch(solvers.of(&bounded.context), values);
        *bound = bound.max(branched.bound);
        enough = enough.min(*bound);
        let is_better = |plan: &FeasiblePlan| objective.value(plan) < incumbent;
        best = branched.plan.filter(is_better).unwrap_or(best);
    }
    best
}

/// Records the best plan as the solution of its context: the warm start may be the best plan.
fn record_best(best: &FeasiblePlan, reports: &mut [ContextReport]) {
    let context = best.decisions.context;
    let equal = reports.iter().position(|report| report.context == context.with_whole_buckets());
    let report = match equal {
        Some(index) => reports.get_mut(index),
        None => reports.iter_mut().find(|report| report.has_plans_of(&context)),
    };
    if let Some(report) = report {
        report.outcome = ContextOutcome::Solved(best.average_time());
    }
}
