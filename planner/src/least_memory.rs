//! The search for the plan with the least memory.
//!
//! 1. Contexts are bounded from below: first by their weights and optimizer states, then by the fewest bytes of every
//!    block. The most promising are lowered, with every segment near its fewest bytes, until no bound is below the smallest
//!    arena or enough were lowered.
//! 2. In the contexts of the smallest arenas, smaller plans are searched under restricted rules, and within limits that are
//!    bisected between the bound and the smallest arena.
//! 3. The fastest plan within the least memory found is searched in all contexts.
//!
//! The bound is that of step 1, with what one block or the head holds during its passes. It leaves out the rest of the memory that
//! lives only within a pass, so that it rarely meets a plan; the gap says how much that leaves open.

use std::time::Instant;

use narrows_plan::{Bytes, Context};
use rayon::prelude::*;

use crate::context::{ContextSolver, resident_bytes_min};
use crate::context_solvers::ContextSolvers;
use crate::context_space::{contexts, may_need_least_memory};
use crate::deadline::Deadline;
use crate::feasible_plan::FeasiblePlan;
use crate::least_time::search_least_time;
use crate::objective::Objective;
use crate::proof::ProofState;
use crate::report::{SearchReport, SearchStatus};
use crate::request::{MemoryLimit, Request};
use crate::search_cache::SearchCache;
use crate::search_result::SearchResult;
use crate::segment::SegmentSolver;

/// Contexts that are bounded or lowered in parallel.
const CHUNK: usize = 4;

/// Contexts that are lowered at most.
const LOWERED_MAX: usize = 24;

/// Contexts in which smaller plans than that of the fewest bytes are searched.
const SHRUNK_MAX: usize = 3;

/// Limits tried in such a context.
const LIMITS_MAX: usize = 7;

/// Searches under restricted rules for plans that are smaller than the smallest one.
const RESTRICTED_MAX: usize = 3;

/// A context with a lower bound on the memory of its plans.
struct SmallContext {
    context: Context,
    bound: Bytes,
    /// Whether the bound is that of the fewest bytes of every block.
    is_refined: bool,
    /// Arena of the fullest stage with the fewest bytes, once lowered.
    arena: Option<Bytes>,
}

/// Searches the plan of a request with the least memory, and among these the fastest, until a deadline.
pub(crate) fn search_least_memory(
    request: &Request,
    deadline: &Deadline,
    cache: &SearchCache,
) -> SearchResult {
    let begin = Instant::now();
    let requests = [request.on_devices(request.devices)];
    let segments = requests
        .each_ref()
        .map(|request| SegmentSolver::with_cache(request, deadline.clone(), cache.segments()));
    let solvers = ContextSolvers::new(&requests, &segments);
    let small = small_contexts(&requests[0], &solvers, deadline);
    let is_interrupted = deadline.is_half_over();
    let smallest = smallest_plan(&requests[0], &segments[0], &small, (deadline, Bytes(0)));
    let bound = small.iter().map(|small| small.bound.as_f64()).fold(f64::INFINITY, f64::min);
    let arena_limit = request.arena_limit();
    let known = smallest.filter(|plan| plan.peak_arena() <= arena_limit);
    let limit = known.as_ref().map_or(arena_limit, FeasiblePlan::peak_arena);
    let within = Request { memory_limit: MemoryLimit::Bytes(limit), ..requests[0].clone() };
    let SearchResult { best, report } = search_least_time(&within, deadline, cache, known);
    let mut report = match &best {
        None => SearchReport { objective: request.objective, objective_bound: bound, ..report },
        Some(plan) => {
            let is_out_of_time = is_interrupted || report.status == SearchStatus::TimeLimit;
            let proof = ProofState { bound, is_out_of_time, has_unproven: false };
            let value = Objective::Memory.value(plan);
            let proven = proof.report(request, Some(value), report.contexts.clone());
            let SearchReport { objective, status, gap, bound, objective_bound, .. } = proven;
            let has_refuted_bound = proven.has_refuted_bound || report.has_refuted_bound;
            SearchReport {
                objective,
                status,
                has_refuted_bound,
                gap,
                bound,
                objective_bound,
                ..report
            }
        }
    };
    solvers.add_effort(&mut report);
    report.wall_time = begin.elapsed();
    SearchResult { best, report }
}

/// A plan within the memory limit of a request, from the smallest plans that are found; `None` where they are larger. The search ends
/// with a plan within `enough` memory.
pub(crate) fn small_plan(
    request: &Request,
    deadline: &Deadline,
    cache: &SearchCache,
    enough: Bytes,
) -> Option<FeasiblePlan> {
    let requests = [request.on_devices(request.devices)];
    let segments = requests
        .each_ref()
        .map(|request| SegmentSolver::with_cache(request, deadline.clone(), cache.segments()));
    let small = small_contexts(&requests[0], &ContextSolvers::new(&requests, &segments), deadline);
    smallest_plan(&requests[0], &segments[0], &small, (deadline, enough))
        .filter(|plan| plan.peak_arena() <= request.arena_limit())
}

/// The contexts that may have the plan with the least memory, the most promising of them lowered.
fn small_contexts(
    request: &Request,
    solvers: &ContextSolvers,
    deadline: &Deadline,
) -> Vec<SmallContext> {
    let contexts = contexts(request).into_iter();
    let parameters = request.model.parameters();
    let mut open: Vec<SmallContext> = contexts
        .filter(|context| may_need_least_memory(request, context))
        .map(|context| {
            let bound = resident_bytes_min(parameters, &context);
            SmallContext { context, bound, is_refined: false, arena: None }
        })
        .collect();
    loop {
        open.sort_by_key(|small| (small.bound, small.arena));
        let smallest = open.iter().filter_map(|small| small.arena).min();
        let lowered = open.iter().filter(|small| small.arena.is_some()).count();
        let is_open = |small: &&mut SmallContext| {
            small.arena.is_none() && smallest.is_none_or(|smallest| small.bound < smallest)
        };
        let chunk: Vec<&mut SmallContext> = open.iter_mut().filter(is_open).take(CHUNK).collect();
        if chunk.is_empty() || lowered >= LOWERED_MAX || deadline.is_half_over() {
            return open;
        }
        let are_refined = chunk.iter().all(|small| small.is_refined);
        chunk.into_par_iter().filter(|small| are_refined || !small.is_refined).for_each(|small| {
            let solver = solvers.of(&small.context);
            match are_refined {
                false => small.refine(solver),
                true => small.arena = Some(solver.min_memory(&small.context).unwrap_or(NO_PLAN)),
            }
        });
        open.retain(|small| small.bound < NO_PLAN);
    }
}

/// Memory of a context without a plan.
const NO_PLAN: Bytes = Bytes(u64::MAX);

impl SmallContext {
    /// Refines the bound by the fewest bytes of every block.
    fn refine(&mut self, solver: &ContextSolver) {
        self.bound = solver.least_memory_bound(&self.context).unwrap_or(NO_PLAN).max(self.bound);
        self.is_refined = true;
    }
}

/// The smallest plan that is found in the contexts of the smallest arenas, or the first within `enough` memory.
fn smallest_plan(
    request: &Request,
    segments: &SegmentSolver,
    small: &[SmallContext],
    (deadline, enough): (&Deadline, Bytes),
) -> Option<FeasiblePlan> {
    let is_enough =
        |best: &Option<FeasiblePlan>| best.as_ref().is_some_and(|plan| plan.peak_arena() <= enough);
    let mut lowered: Vec<(Bytes, &SmallContext)> =
        small.iter().filter_map(|small| Some((small.arena?, small))).collect();
    lowered.sort_by_key(|(arena, _)| *arena);
    let mut best: Option<FeasiblePlan> = None;
    for (_, small) in lowered.into_iter().take(SHRUNK_MAX) {
        let smallest = best.as_ref().map_or(NO_PLAN, FeasiblePlan::peak_arena);
        if small.bound >= smallest
            || smallest <= enough
            || (best.is_some() && deadline.is_half_over())
        {
            continue;
        }
        let solver = ContextSolver::new(request, segments);
        let Some(plan) = solver.smallest_plan(&small.context) else { continue };
        // The plan's collectives may run one after the other, which needs less memory than overlap with GEMMs.
        let context = plan.decisions.context.with_whole_buckets();
        best = Objective::Memory.better(best, Some(plan));
        let mut low = small.bound;
        // The first limit is the least memory so far, within which there may be a faster plan.
        let mut limit = best.as_ref().map_or(NO_PLAN, FeasiblePlan::peak_arena);
        for _ in 0..LIMITS_MAX {
            if deadline.is_half_over() || is_enough(&best) {
                break;
            }
            let plan = plan_within(request, segments, &context, limit);
            if plan.is_none() {
                low = limit;
            }
            best = Objective::Memory.better(best, plan);
            let high = best.as_ref().map_or(NO_PLAN, FeasiblePlan::peak_arena);
            if low >= high {
                break;
            }
            limit = low.midpoint(high);
        }
    }
    for _ in 0..RESTRICTED_MAX {
        let Some(smallest) = &best else { break };
        if deadline.is_half_over() || smallest.peak_arena() <= enough {
            break;
        }
        // Within less memory than any plan so far.
        let context = smallest.decisions.context.with_whole_buckets();
        let limit = smallest.peak_arena() - Bytes(1);
        let smaller = solve_within(request, segments, limit, |solver| {
            solver.faster_plan_restricted(&context, f64::INFINITY, false)
        });
        if smaller.is_none() {
            break;
        }
        best = smaller;
    }
    best
}

/// A plan of one context within a memory limit.
fn plan_within(
    request: &Request,
    segments: &SegmentSolver,
    context: &Context,
    limit: Bytes,
) -> Option<FeasiblePlan> {
    solve_within(request, segments, limit, |solver| {
        let bounds = solver.bounds(context, [0.0, f64::INFINITY]);
        solver.solve(context, &bounds, f64::INFINITY).best.ok().flatten()
    })
}

/// A plan that a solver finds within a memory limit.
fn solve_within(
    request: &Request,
    segments: &SegmentSolver,
    limit: Bytes,
    solve: impl Fn(&ContextSolver) -> Option<FeasiblePlan>,
) -> Option<FeasiblePlan> {
    let request = Request { memory_limit: MemoryLimit::Bytes(limit), ..request.clone() };
    let segments = segments.for_request(&request);
    solve(&ContextSolver::new(&request, &segments))
}
