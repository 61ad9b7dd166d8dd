//! Reports of searches.

use std::collections::BTreeMap;
use std::time::Duration;

use narrows_plan::{Context, Seconds};

use crate::infeasible::{Infeasible, MemoryEvidence};
use crate::objective::Objective;
use crate::solve::{SolveMethod, TableSolves};

/// Status, bound and statistics of a finished search.
#[derive(Clone, Debug)]
pub struct SearchReport {
    /// The objective of the search.
    pub objective: Objective,
    /// The reason why the search ended.
    pub status: SearchStatus,
    /// Whether the search was stopped from outside; its status is then [`SearchStatus::TimeLimit`].
    pub is_interrupted: bool,
    /// Whether the plan is better than the bound of the search, which is a defect. The reported bound is then a simple one,
    /// without any solver.
    pub has_refuted_bound: bool,
    /// Relative difference between the plan's value of the objective and the bound: `(value − bound) / value`.
    pub gap: f64,
    /// Lower bound on the step time: no plan is faster. Zero with another objective, which proves nothing about it.
    pub bound: Seconds,
    /// Lower bound on the objective, in seconds, bytes or device-seconds: no plan is better.
    pub objective_bound: f64,
    /// Number of contexts, segments and partial partitions that were priced. Racing threads may price a
    /// segment twice, so the count differs between runs.
    pub candidates_priced: u64,
    /// Number of contexts that a bound or the memory limit excluded before they were solved.
    pub candidates_pruned: u64,
    /// Number of segments solved to optimality; differs between runs like `candidates_priced`.
    pub segment_solves: u64,
    /// Cost tables solved by `solve_table`, by the method that ended each solve. All
    /// other segments are solved by variable elimination alone.
    pub table_solves: BTreeMap<SolveMethod, TableSolves>,
    /// Number of integer programs that the library failed to solve. Status and bound hold nevertheless; a faster
    /// plan may have been missed.
    pub failed_solves: u64,
    /// Wall time of the search.
    pub wall_time: Duration,
    /// Reports of all contexts, best bound first.
    pub contexts: Vec<ContextReport>,
}

impl SearchReport {
    /// Whether the plan is proven the best of the space.
    pub fn is_proven_best(&self) -> bool {
        self.status == SearchStatus::Optimal && self.gap == 0.0
    }
}

/// The reason why a search ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SearchStatus {
    /// No plan of the space is better by more than 1 %.
    Optimal,
    /// The bound and the plan's value of the objective differ by more; or no plan was found although one may exist.
    GapLimit,
    /// The time limit passed first, or the search was stopped.
    TimeLimit,
    /// No plan exists, by proof.
    Infeasible,
}

impl SearchStatus {
    /// Name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            SearchStatus::Optimal => "optimal",
            SearchStatus::GapLimit => "gap_limit",
            SearchStatus::TimeLimit => "time_limit",
            SearchStatus::Infeasible => "infeasible",
        }
    }
}

/// The end of the search of one context.
#[derive(Clone, Debug)]
pub struct ContextReport {
    /// Mesh, microbatch, ZeRO stage.
    pub context: Context,
    /// Lower bound on the plans of the context; `None` for a context without plans.
    pub bound: Option<Seconds>,
    /// Outcome of the search.
    pub outcome: ContextOutcome,
}

/// Outcome of the search of a context.
#[derive(Clone, Debug)]
pub enum ContextOutcome {
    /// Solved, with the step time of its best plan.
    Solved(Seconds),
    /// Not solved: its bound is no better than the plan of another context.
    Pruned,
    /// Searched, since its bound is better than the best plan; no faster plan was found.
    NoImprovement,
    /// The context has no legal plan, or none that fits.
    Infeasible(Infeasible),
    /// The time limit passed first.
    NotReached,
}

impl ContextReport {
    /// Whether plans of a context belong to this report. Buckets are decisions within a context, and plans without overlapped
    /// collectives are found under restricted rules only.
    pub(crate) fn has_plans_of(&self, context: &Context) -> bool {
        let overlap_tensor_collectives = self.context.overlap_tensor_collectives;
        self.context == Context { overlap_tensor_collectives, ..context.with_whole_buckets() }
    }

    /// Whether it is proven that the context has no plan.
    pub(crate) fn is_proven_infeasible(&self) -> bool {
        match self.outcome {
            ContextOutcome::Infeasible(Infeasible::Memory { evidence, .. }) => {
                evidence == MemoryEvidence::AllPlans
            }
            ContextOutcome::Infeasible(Infeasible::NoStrategy) => true,
            _ => false,
        }
    }
}

impl SearchReport {
    /// The report with all times multiplied by the executor's step factor: step times as in predictions, instead
    /// of sums of kernel times.
    pub(crate) fn scaled_to_steps(mut self, step_factor: f64) -> SearchReport {
        self.bound = self.bound * step_factor;
        if self.objective != Objective::Memory {
            self.objective_bound *= step_factor;
        }
        for context in &mut self.contexts {
            context.bound = context.bound.map(|bound| bound * step_factor);
            if let ContextOutcome::Solved(time) = &mut context.outcome {
                *time = *time * step_factor;
            }
        }
        self
    }
}
