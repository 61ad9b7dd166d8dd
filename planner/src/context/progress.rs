//! Best plan and proof of a context so far.

use narrows_plan::{Bytes, Seconds};

use super::sized_plan::SizedPlan;
use crate::feasible_plan::FeasiblePlan;
use crate::infeasible::{Infeasible, MemoryEvidence};

/// Result of solving one context.
pub(crate) struct ContextSolution {
    /// The fastest plan; `Ok(None)` when no plan is known to be faster than the incumbent.
    pub best: Result<Option<FeasiblePlan>, Infeasible>,
    /// Lower bound on the plans of the context.
    pub bound: Seconds,
    /// Whether the deadline passed during the search, so that plans may be missing.
    pub is_interrupted: bool,
}

/// Best plan and proof of a context so far.
pub(super) struct FitProgress {
    /// The fastest plan, or the reason why there is none.
    pub best: Result<Option<FeasiblePlan>, Infeasible>,
    /// Lower bound on the plans of the context.
    pub bound: f64,
    /// Step time to beat.
    pub incumbent: f64,
    /// Whether plans may fit although every arena so far was too large.
    is_open: bool,
    is_interrupted: bool,
}

impl FitProgress {
    /// No plan yet; `incumbent` is the step time to beat.
    pub(super) fn new(incumbent: f64) -> FitProgress {
        let (best, bound) = (Err(Infeasible::NoStrategy), f64::INFINITY);
        FitProgress { best, bound, incumbent, is_open: false, is_interrupted: false }
    }

    /// Accepts a plan if it is faster than the incumbent: a plan may take longer than its partition let expect.
    pub(super) fn accept(&mut self, plan: FeasiblePlan) {
        if plan.time.0 >= self.incumbent {
            return self.record_no_improvement();
        }
        self.incumbent = plan.time.0;
        self.best = Ok(Some(plan));
    }

    /// Records that the remaining plans are no faster than the incumbent.
    pub(super) fn record_no_improvement(&mut self) {
        if self.best.is_err() {
            self.best = Ok(None);
        }
    }

    /// Records that one layout has no plan.
    pub(super) fn reject(&mut self, infeasible: Infeasible) {
        if let Err(known) = &mut self.best {
            let before = std::mem::replace(known, Infeasible::NoStrategy);
            *known = before.nearer_to_feasible(infeasible);
        }
    }

    /// Records that some solutions fit by their bytes, but all of their arenas exceed the limit.
    pub(super) fn record_oversized(&mut self, limit: Bytes) {
        if self.incumbent.is_finite() {
            return self.record_no_improvement();
        }
        self.is_open = true;
        let needed = Bytes(limit.0.saturating_add(1));
        let evidence = MemoryEvidence::TriedPlans;
        self.reject(Infeasible::Memory { stage: None, needed, limit, evidence });
    }

    /// Records that the deadline passed.
    pub(super) fn interrupt(&mut self) {
        self.is_interrupted = true;
    }

    /// The result.
    pub(super) fn finish(self) -> ContextSolution {
        let FitProgress { best, bound, is_interrupted, .. } = self;
        ContextSolution { best, bound: Seconds(bound), is_interrupted }
    }

    /// Whether the plan with the least memory decides if the context has a plan.
    pub(super) fn is_open(&self) -> bool {
        self.is_open && self.best.is_err()
    }

    /// Accepts the plan with the smallest memory if it fits; otherwise records its memory requirement.
    pub(super) fn try_min_memory(
        &mut self,
        smallest: Option<SizedPlan>,
        limit: Bytes,
        complete: impl FnOnce(SizedPlan) -> FeasiblePlan,
    ) {
        let Some(smallest) = smallest else { return };
        let needed = smallest.peak_arena();
        if needed <= limit {
            return self.accept(complete(smallest));
        }
        let arenas = smallest.arenas.iter().enumerate();
        let stage = arenas.max_by_key(|(_, arena)| **arena).map(|(stage, _)| stage);
        let evidence = MemoryEvidence::OnePlan;
        self.best = Err(Infeasible::Memory { stage, needed, limit, evidence });
    }
}
