//! The contexts that a search has not excluded or solved, the most promising first.
//!
//! A context begins with a bound from the ops of the model, for which no cost table is needed. Only where that bound is among
//! the best is it replaced, first by bounds that many contexts share, and many searches where the bandwidth between nodes is swept,
//! and then by the context's own, so that most contexts of large clusters are excluded without a solve of their own, and many
//! microbatches and tensor axes without a table.

use std::collections::VecDeque;

use narrows_plan::{Context, Seconds};
use rayon::prelude::*;
use rustc_hash::FxHashMap;

use crate::bounded_context::{BoundedContext, PassNumbers};
use crate::context::{ContextSolver, PassLinks};
use crate::context_solvers::ContextSolvers;
use crate::deadline::Deadline;
use crate::feasible_plan::FeasiblePlan;
use crate::infeasible::Infeasible;
use crate::objective::Objective;
use crate::segment::PassKey;

/// The first bound of a context on its step time. The ops of the model may add up to less than their FLOPs need: a sum within a GEMM
/// may be shorter than the addition that it replaces.
fn first_bound(
    solver: &ContextSolver,
    context: &Context,
    deadline: &Deadline,
) -> Result<Seconds, Infeasible> {
    let of_flops = solver.flops_bound(context)?;
    if deadline.is_half_over() {
        return Ok(of_flops);
    }
    Ok(Seconds(solver.ops_bound(context)?.0.max(of_flops.0)))
}

/// Passes that are priced in parallel.
const PASSES: usize = 4;

/// Contexts with their bounds.
pub(crate) struct ContextQueue<'a> {
    solvers: &'a ContextSolvers<'a>,
    deadline: &'a Deadline,
    /// Taken from the front, of up to hundreds of thousands.
    contexts: VecDeque<BoundedContext>,
}

impl<'a> ContextQueue<'a> {
    /// All contexts, with their first bounds. Once half of the time has passed, bounds need no solver.
    pub(crate) fn new(
        objective: Objective,
        contexts: Vec<Context>,
        solvers: &'a ContextSolvers<'a>,
        deadline: &'a Deadline,
    ) -> ContextQueue<'a> {
        let mut numbers: FxHashMap<PassKey, usize> = FxHashMap::default();
        let mut number = |context: &Context, links: PassLinks| {
            let count = numbers.len();
            let key = solvers.of(context).pass_key(context, links);
            *numbers.entry(key).or_insert(count)
        };
        let mut with_numbers = |context: Context| {
            let fast_inter_node = number(&context, PassLinks::FastInterNode);
            let own = number(&context, PassLinks::Own);
            (context, PassNumbers { fast_inter_node, own })
        };
        let contexts: Vec<(Context, PassNumbers)> =
            contexts.into_iter().map(&mut with_numbers).collect();
        let bounded = |(index, (context, passes)): (usize, (Context, PassNumbers))| {
            let solver = solvers.of(&context);
            let bound = first_bound(solver, &context, deadline);
            let beyond_kernels = solver.beyond_kernels_min(&context);
            BoundedContext::new(objective, (index, context), passes, bound, beyond_kernels)
        };
        let contexts: Vec<_> = contexts.into_par_iter().enumerate().map(bounded).collect();
        let mut open = ContextQueue { solvers, deadline, contexts: contexts.into() };
        open.sort();
        open
    }

    /// Whether none is left.
    pub(crate) fn is_empty(&self) -> bool {
        self.contexts.is_empty()
    }

    /// Number of contexts left.
    pub(crate) fn len(&self) -> usize {
        self.contexts.len()
    }

    /// The least bound.
    pub(crate) fn least_bound(&self) -> f64 {
        self.contexts.front().map_or(f64::INFINITY, BoundedContext::lower_bound)
    }

    /// The first `count` contexts that satisfy a condition, sorted by their own bounds. Those after the last one that
    /// `is_relevant` may have their first bounds.
    pub(crate) fn most_promising(
        &mut self,
        count: usize,
        condition: impl Fn(&Context) -> bool,
        is_relevant: impl Fn(&BoundedContext) -> bool,
    ) -> Vec<&BoundedContext> {
        let ContextQueue { solvers, deadline, .. } = *self;
        loop {
            let mut first_bounds: Vec<&mut BoundedContext> = self
                .contexts
                .iter_mut()
                .filter(|open| condition(&open.context))
                .take(count)
                .take_while(|open| is_relevant(open))
                .filter(|open| open.has_first_bound() && !deadline.is_half_over())
                .collect();
            if first_bounds.is_empty() {
                break;
            }
            if first_bounds.iter().any(|open| open.next_passes().is_some()) {
                self.price_passes(&condition, &is_relevant);
            } else {
                first_bounds
                    .par_iter_mut()
                    .for_each(|open| open.tighten(solvers.of(&open.context)));
            }
            self.sort();
        }
        self.contexts.iter().filter(|open| condition(&open.context)).take(count).collect()
    }

    /// Prices the most promising [`PASSES`] passes that are not priced yet, and tightens the bounds of all contexts with them.
    fn price_passes(
        &mut self,
        condition: impl Fn(&Context) -> bool,
        is_relevant: impl Fn(&BoundedContext) -> bool,
    ) {
        let solvers = self.solvers;
        let relevant = self.contexts.iter().filter(|open| condition(&open.context));
        let mut first: Vec<((usize, PassLinks), Context)> = vec![];
        for open in relevant.take_while(|open| is_relevant(open)) {
            let Some(passes) = open.next_passes() else { continue };
            if first.iter().all(|(other, _)| *other != passes) {
                first.push((passes, open.context));
            }
            if first.len() == PASSES {
                break;
            }
        }
        // One context for each: others would wait for its tables.
        first.par_iter().for_each(|((_, links), context)| {
            solvers.of(context).price_passes(context, *links);
        });
        let is_priced = |open: &&mut BoundedContext| {
            let passes = open.next_passes();
            first.iter().any(|(priced, _)| passes == Some(*priced))
        };
        let mut priced: Vec<&mut BoundedContext> =
            self.contexts.iter_mut().filter(is_priced).collect();
        priced.par_iter_mut().for_each(|open| open.tighten(solvers.of(&open.context)));
    }

    /// Refines the bounds of the first `count` contexts that may be better than `incumbent` by the memory limit. Returns
    /// whether one was refined: then others may have come first.
    pub(crate) fn refine(&mut self, count: usize, incumbent: f64) -> bool {
        let solvers = self.solvers;
        let mut unrefined: Vec<&mut BoundedContext> = self
            .contexts
            .iter_mut()
            .take(count)
            .filter(|open| open.needs_refinement() && open.lower_bound() < incumbent)
            .collect();
        unrefined.par_iter_mut().for_each(|open| open.refine(solvers.of(&open.context), incumbent));
        let has_refined = !unrefined.is_empty();
        if has_refined {
            self.sort();
        }
        has_refined
    }

    /// A first plan on the number of devices with the best bound on which one is found.
    pub(crate) fn warm_start(&mut self) -> Option<FeasiblePlan> {
        let solvers = self.solvers;
        let mut tried = vec![];
        loop {
            let is_untried = |context: &Context| !tried.contains(&context.mesh.devices());
            let next = self.most_promising(1, is_untried, |_| true);
            let context = next.first().filter(|open| open.bound.is_ok())?.context;
            let devices = context.mesh.devices();
            let warm_start = solvers.of(&context).warm_start(self);
            if warm_start.is_some() {
                return warm_start;
            }
            tried.push(devices);
        }
    }

    /// Removes the first `count` contexts.
    pub(crate) fn take(&mut self, count: usize) -> Vec<BoundedContext> {
        self.contexts.drain(..count).collect()
    }

    /// Sorts by bound, the lowest first. Equal bounds keep the order of enumeration, whichever was found first.
    fn sort(&mut self) {
        self.contexts.make_contiguous().sort_by(|a, b| {
            a.lower_bound().total_cmp(&b.lower_bound()).then(a.index().cmp(&b.index()))
        });
    }
}

#[cfg(test)]
mod tests {
    use narrows_cost_model::profile;
    use narrows_plan::model::presets;

    use crate::context_space::contexts;
    use crate::request::Request;
    use crate::segment::SegmentSolver;

    use super::*;

    /// On a tensor axis of 512, sums within GEMMs save more than the additions take at least.
    #[test]
    fn no_first_bound_is_less_than_that_of_the_flops() {
        let model = presets::find("cola-30b").expect("a preset");
        let profile = profile::preset("a100-80gb").expect("a preset");
        let request =
            Request { tensor: Some(512), ..Request::new(model, profile, 512, 4096, 4096) };
        let segments = SegmentSolver::new(&request, Deadline::none());
        let solver = ContextSolver::new(&request, &segments);
        let mut negative = 0;
        for context in contexts(&request) {
            let of_flops = solver.flops_bound(&context).expect("a bound");
            let first = first_bound(&solver, &context, &Deadline::none()).expect("a bound");
            assert!(first >= of_flops, "{context:?}: {first} and {of_flops}");
            negative += usize::from(solver.ops_bound(&context).expect("a bound").0 < 0.0);
        }
        assert!(negative > 0, "no bound of the ops is negative");
    }
}
