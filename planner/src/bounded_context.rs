//! A context on its way through a search: bounded, refined, solved.

use narrows_plan::{Context, Seconds};

use crate::context::{
    BranchedContext, BranchingTimes, ContextBounds, ContextSolution, ContextSolver, PassLinks,
};
use crate::feasible_plan::FeasiblePlan;
use crate::infeasible::Infeasible;
use crate::objective::Objective;
use crate::report::ContextOutcome;

/// A context with its lower bound. Incumbents and lower bounds are values of the objective.
pub(crate) struct BoundedContext {
    pub context: Context,
    /// Bound on the step time.
    pub bound: Result<Seconds, Infeasible>,
    /// Position in the enumeration of contexts.
    index: usize,
    /// Numbers of its passes among those of all contexts.
    passes: PassNumbers,
    level: BoundLevel,
    /// Weight of a second of step time in the objective: the number of devices for the cost, otherwise 1.
    weight: f64,
    /// Lower bound on the time of a step beyond its kernels.
    beyond_kernels: Seconds,
    /// Bounds within the memory limit, once computed.
    bounds: Option<ContextBounds>,
}

/// Numbers of a context's passes: contexts with equal numbers share the tables of their passes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PassNumbers {
    /// With [`PassLinks::FastInterNode`].
    pub fast_inter_node: usize,
    /// With [`PassLinks::Own`]; the same number where the links do not differ.
    pub own: usize,
}

/// Parts of a step that the bound of a context counts. Each level is no smaller than those before, and takes longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BoundLevel {
    /// The ops of the model.
    Ops,
    /// The passes of the model with fast links between nodes, which searches share.
    FastPasses,
    /// The passes of the model, which other contexts share.
    Passes,
    /// All of the context, before its blocks are divided.
    Own,
}

/// Outcome of a context, with its plan and its lower bound.
pub(crate) struct ContextResult {
    pub outcome: ContextOutcome,
    pub plan: Option<FeasiblePlan>,
    pub bound: f64,
    pub is_interrupted: bool,
}

impl ContextResult {
    fn without_plan(outcome: ContextOutcome, bound: f64) -> ContextResult {
        let is_interrupted = matches!(outcome, ContextOutcome::NotReached);
        ContextResult { outcome, plan: None, bound, is_interrupted }
    }
}

impl BoundedContext {
    /// A context, with its position in the enumeration, the numbers of its passes, and a first bound on its step time.
    pub(crate) fn new(
        objective: Objective,
        (index, context): (usize, Context),
        passes: PassNumbers,
        bound: Result<Seconds, Infeasible>,
        beyond_kernels: Seconds,
    ) -> BoundedContext {
        let (weight, level) = (objective.weight(&context), BoundLevel::Ops);
        BoundedContext {
            context,
            bound,
            index,
            passes,
            level,
            weight,
            beyond_kernels,
            bounds: None,
        }
    }

    /// Position in the enumeration of contexts.
    pub(crate) fn index(&self) -> usize {
        self.index
    }

    /// Whether the bound may become larger by [`tighten`](BoundedContext::tighten).
    pub(crate) fn has_first_bound(&self) -> bool {
        self.bound.is_ok() && self.level != BoundLevel::Own
    }

    /// The number of the passes that the bound counts next, and their links, where others share them.
    pub(crate) fn next_passes(&self) -> Option<(usize, PassLinks)> {
        let PassNumbers { fast_inter_node, own } = self.passes;
        match self.level {
            _ if self.bound.is_err() => None,
            BoundLevel::Ops if fast_inter_node != own => {
                Some((fast_inter_node, PassLinks::FastInterNode))
            }
            BoundLevel::Ops | BoundLevel::FastPasses => Some((own, PassLinks::Own)),
            BoundLevel::Passes | BoundLevel::Own => None,
        }
    }

    /// Raises the bound to that of the next level.
    pub(crate) fn tighten(&mut self, solver: &ContextSolver) {
        let known = self.step_time_bound();
        let (bound, level) = match self.next_passes() {
            Some((_, links)) => {
                let level = match links {
                    PassLinks::FastInterNode => BoundLevel::FastPasses,
                    PassLinks::Own => BoundLevel::Passes,
                };
                (solver.passes_bound(&self.context, links), level)
            }
            None => (solver.lower_bound(&self.context), BoundLevel::Own),
        };
        self.bound = bound.map(|bound| Seconds(bound.0.max(known)));
        self.level = level;
    }

    /// The lower bound; infinite for a context without a plan.
    pub(crate) fn lower_bound(&self) -> f64 {
        self.value_of(self.step_time_bound())
    }

    /// The value of the objective of a step whose kernels take this time.
    fn value_of(&self, step_time: f64) -> f64 {
        self.weight * (step_time + self.beyond_kernels.0)
    }

    /// The longest time of the kernels of a step whose value of the objective is at most this one.
    fn step_time_of(&self, value: f64) -> f64 {
        value / self.weight - self.beyond_kernels.0
    }

    /// The lower bound on the step time, in seconds; infinite for a context without a plan.
    pub(crate) fn step_time_bound(&self) -> f64 {
        self.bound.as_ref().map_or(f64::INFINITY, |bound| bound.0)
    }

    /// Whether the bound must be refined before the context is solved.
    pub(crate) fn needs_refinement(&self) -> bool {
        self.bound.is_ok() && self.bounds.is_none()
    }

    /// Refines the bound by the memory limit.
    pub(crate) fn refine(&mut self, solver: &ContextSolver, incumbent: f64) {
        let cutoff = self.step_time_of(incumbent);
        let before = self.step_time_bound();
        let bounds = solver.bounds(&self.context, [before, cutoff]);
        self.bound = bounds.bound(cutoff).map(|refined| Seconds(refined.0.max(before)));
        self.bounds = Some(bounds);
    }

    /// The bound on the step time after the context was solved with `outcome`, which proves that no plan of the context is
    /// better than `proven`. `None` for a context without a plan.
    pub(crate) fn proven_bound(&self, outcome: &ContextOutcome, proven: f64) -> Option<Seconds> {
        let first = self.step_time_bound();
        let bound = match outcome {
            ContextOutcome::Pruned if proven.is_finite() => first.max(self.step_time_of(proven)),
            _ => first,
        };
        bound.is_finite().then_some(Seconds(bound) + self.beyond_kernels)
    }

    /// Seeks a larger bound than that of a solved context, and a better plan than the incumbent. The times are values of the objective.
    pub(crate) fn branch(&self, solver: &ContextSolver, values: BranchingTimes) -> BranchedContext {
        let Some(bounds) = &self.bounds else {
            return BranchedContext { bound: self.lower_bound(), plan: None };
        };
        let times = BranchingTimes {
            enough: self.step_time_of(values.enough),
            target: self.step_time_of(values.target),
            incumbent: self.step_time_of(values.incumbent),
        };
        let branched = solver.branch(&self.context, bounds, times);
        BranchedContext { bound: self.value_of(branched.bound), ..branched }
    }

    /// Solves the context, unless its bound or the deadline excludes it.
    pub(crate) fn solve(&self, solver: &ContextSolver, incumbent: f64) -> ContextResult {
        let bound = match &self.bound {
            Err(infeasible) => {
                let outcome = ContextOutcome::Infeasible(infeasible.clone());
                return ContextResult::without_plan(outcome, f64::INFINITY);
            }
            Ok(_) => self.lower_bound(),
        };
        if bound >= incumbent {
            return ContextResult::without_plan(ContextOutcome::Pruned, f64::INFINITY);
        }
        let Some(bounds) = self.bounds.as_ref().filter(|_| !solver.out_of_time()) else {
            return ContextResult::without_plan(ContextOutcome::NotReached, bound);
        };
        let ContextSolution { best, bound: solved, is_interrupted } =
            solver.solve(&self.context, bounds, self.step_time_of(incumbent));
        // Another bound of the context may be larger than that of its divisions.
        let solved = self.value_of(solved.0).max(bound);
        match best {
            Ok(Some(plan)) => ContextResult {
                outcome: ContextOutcome::Solved(plan.average_time()),
                plan: Some(plan),
                bound: solved,
                is_interrupted,
            },
            // No plan was found, and not all were tried: this proves nothing.
            _ if is_interrupted => ContextResult::without_plan(ContextOutcome::NotReached, bound),
            Ok(None) => ContextResult::without_plan(ContextOutcome::NoImprovement, solved),
            Err(infeasible) => {
                ContextResult::without_plan(ContextOutcome::Infeasible(infeasible), solved)
            }
        }
    }
}
