//! Checks of bounds on one stage against plans.

use narrows_plan::{Bytes, Context};

use super::partition_bounds::RelaxedLayout;
use super::solver::ContextSolver;
use crate::context_space::contexts;
use crate::deadline::Deadline;
use crate::feasible_plan::FeasiblePlan;
use crate::pipeline::EmbeddingAndHead;
use crate::request::{MemoryLimit, Request};
use crate::segment::SegmentSolver;
use crate::slower_links;

/// Contexts of one stage for which a bound holds.
pub(super) type HasBound = fn(&Context) -> bool;

/// Calls `check` with plans of every `interval`-th context, under the rules of the request and with sharded weights. The solver and
/// the layout are those of the request itself.
pub(super) fn for_each_plan(
    request: Request,
    (has_bound, interval): (HasBound, usize),
    mut check: impl FnMut(&ContextSolver, &Context, &RelaxedLayout, &FeasiblePlan),
) {
    let requests = slower_links::with_sharded_weights(request);
    let all = requests.each_ref().map(|request| SegmentSolver::new(request, Deadline::none()));
    let first = ContextSolver::new(&requests[0], &all[0]);
    let of_one_stage = |context: &Context| context.mesh.pipeline == 1 && has_bound(context);
    for context in contexts(&requests[0]).into_iter().filter(of_one_stage).step_by(interval) {
        for (request, segments) in requests.iter().zip(&all) {
            let solver = ContextSolver::new(request, segments);
            let Some((_, _, ends, partition)) = solver.even_partition(context, f64::INFINITY)
            else {
                continue;
            };
            let relaxed = first.relaxed_layout(&context, &ends);
            let sized = solver.size(&context, &ends, partition);
            let plan = solver.complete_within_limit(sized).expect("no limit");
            check(&first, &context, &relaxed, &plan);
        }
    }
}

/// Checks that no plan within a memory limit is faster than a bound. `bounds` returns that of a layout without and with the limit,
/// from the solvers of both. Returns the numbers of plans and of raised bounds, and the least ratio of a plan to a raised bound.
pub(super) fn check_within_memory(
    has_bound: HasBound,
    bounds: impl Fn([&ContextSolver; 2], &Context, &EmbeddingAndHead) -> [f64; 2],
) -> (usize, usize, f64) {
    let (mut checked, mut raised, mut tightest) = (0, 0, f64::INFINITY);
    for (name, slower, limit_gib) in [("llama-350m", 1.0, 3), ("cola-350m", 8.0, 2)] {
        let unlimited = slower_links::request(name, [1.0, slower], [16, 64, 1024]);
        let memory_limit = MemoryLimit::Bytes(Bytes(limit_gib << 30));
        let request = Request { memory_limit, ..unlimited.clone() };
        let [free_segments, segments] =
            [&unlimited, &request].map(|request| SegmentSolver::new(request, Deadline::none()));
        let free_solver = ContextSolver::new(&unlimited, &free_segments);
        let solver = ContextSolver::new(&request, &segments);
        let of_one_stage = |context: &Context| context.mesh.pipeline == 1 && has_bound(context);
        for context in contexts(&request).into_iter().filter(of_one_stage).step_by(9) {
            let divided = solver.bounds(&context, [0.0, f64::INFINITY]);
            let Ok(Some(plan)) = solver.solve(&context, &divided, f64::INFINITY).best else {
                continue;
            };
            let of_layouts = divided.layouts.iter();
            let of_layouts =
                of_layouts.map(|(ends, _)| bounds([&free_solver, &solver], &context, ends));
            let least = |[a, b]: [f64; 2], [c, d]: [f64; 2]| [a.min(c), b.min(d)];
            let [free, limited] = of_layouts.reduce(least).expect("a plan has a layout");
            assert!(limited <= plan.time.0 * (1.0 + 1e-9), "{name}, {context:?}: {limited}");
            checked += 1;
            if limited > free * 1.005 {
                raised += 1;
                tightest = tightest.min(plan.time.0 / limited);
            }
        }
    }
    (checked, raised, tightest)
}
