//! What has come of fitting a context so far.

use narrows_plan::{Bytes, Seconds};

use crate::fit::{ContextSolution, FeasiblePlan, Infeasible, MemoryEvidence};

/// The best plan so far, and what is proved.
pub(crate) struct FitProgress {
    pub best: Result<Option<FeasiblePlan>, Infeasible>,
    /// No plan of the context is faster.
    pub proven: f64,
    /// What a plan must beat.
    pub incumbent: f64,
    /// Whether plans may exist that fit, and none was found.
    open: bool,
    /// Whether the deadline came before all was tried.
    is_interrupted: bool,
}

impl FitProgress {
    pub fn new(incumbent: f64) -> FitProgress {
        let (best, proven) = (Err(Infeasible::NoStrategy), f64::INFINITY);
        FitProgress { best, proven, incumbent, open: false, is_interrupted: false }
    }

    /// A plan that is faster than all before.
    pub fn take(&mut self, fitted: FeasiblePlan) {
        self.incumbent = self.incumbent.min(fitted.time.0);
        self.best = Ok(Some(fitted));
    }

    /// What remained could not beat the incumbent.
    pub fn nothing_faster(&mut self) {
        if self.best.is_err() {
            self.best = Ok(None);
        }
    }

    /// Nothing exists here.
    pub fn refuse(&mut self, refusal: Infeasible) {
        if let Err(known) = &mut self.best {
            let before = std::mem::replace(known, Infeasible::NoStrategy);
            *known = before.gentler(refusal);
        }
    }

    /// By their bytes some decisions fit, but every arena that was tried was too large.
    pub fn left_open(&mut self, limit: Bytes) {
        if self.incumbent.is_finite() {
            return self.nothing_faster();
        }
        self.open = true;
        let needed = Bytes(limit.0.saturating_add(1));
        self.refuse(Infeasible::Memory { stage: None, needed, limit, of: MemoryEvidence::Tried });
    }

    /// The deadline came: what was not found may exist.
    pub fn interrupt(&mut self) {
        self.is_interrupted = true;
    }

    /// What came of it all.
    pub fn end(self) -> ContextSolution {
        let FitProgress { best, proven, is_interrupted, .. } = self;
        ContextSolution { best, proven: Seconds(proven), is_interrupted }
    }

    /// Whether the smallest plan there is should decide.
    pub fn is_open(&self) -> bool {
        self.open && self.best.is_err()
    }

    /// The smallest plan: it fits, or it says what would be enough.
    pub fn last_resort(&mut self, smallest: Option<FeasiblePlan>, limit: Bytes) {
        let Some(smallest) = smallest else { return };
        let needed = smallest.peak();
        if needed <= limit {
            return self.take(smallest);
        }
        let fullest = smallest.program.program().stages.iter().map(|stage| stage.arena);
        let stage = fullest.enumerate().max_by_key(|(_, arena)| *arena).map(|(stage, _)| stage);
        self.best = Err(Infeasible::Memory { stage, needed, limit, of: MemoryEvidence::Lowered });
    }
}
