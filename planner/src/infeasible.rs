//! Reasons why a context has no plan.

use std::fmt;

use narrows_plan::Bytes;

/// The reason why a context has no plan.
#[derive(Clone, Debug, PartialEq)]
pub enum Infeasible {
    /// Some op has no legal strategy whose layouts its neighbours accept.
    NoStrategy,
    /// Plans exceed the memory of a device.
    Memory {
        /// The stage that exceeds it, where one was lowered.
        stage: Option<usize>,
        /// The smallest known memory requirement.
        needed: Bytes,
        /// Memory of a device.
        limit: Bytes,
        /// The plans that need this memory.
        evidence: MemoryEvidence,
    },
}

/// The plans that need the memory of an [`Infeasible::Memory`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryEvidence {
    /// Every plan of the context: a proof that none exists.
    AllPlans,
    /// One plan that was lowered; another may fit.
    OnePlan,
    /// All plans that were tried; another may fit.
    TriedPlans,
}

impl Infeasible {
    /// The one of two reasons that is nearer to a feasible plan: a tried plan is nearer than a proof, less
    /// memory is nearer than more.
    pub(crate) fn nearer_to_feasible(self, other: Infeasible) -> Infeasible {
        match (&self, &other) {
            (Infeasible::NoStrategy, _) => other,
            (
                Infeasible::Memory { needed, evidence, .. },
                Infeasible::Memory { needed: other_needed, evidence: other_evidence, .. },
            ) => {
                let is_proof = |evidence| evidence == MemoryEvidence::AllPlans;
                if (is_proof(*other_evidence), other_needed) < (is_proof(*evidence), needed) {
                    other
                } else {
                    self
                }
            }
            _ => self,
        }
    }
}

impl fmt::Display for Infeasible {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Infeasible::NoStrategy => write!(f, "some op has no legal strategy"),
            Infeasible::Memory { stage: Some(stage), needed, limit, .. } => {
                let [needed, limit] = needed.distinct(*limit);
                write!(f, "stage {stage} needs {needed}; the limit is {limit} per device")
            }
            Infeasible::Memory { evidence: MemoryEvidence::TriedPlans, limit, .. } => {
                write!(f, "no plan that was tried fits; the limit is {limit} per device")
            }
            Infeasible::Memory { stage: None, needed, limit, .. } => {
                let [needed, limit] = needed.distinct(*limit);
                write!(f, "needs at least {needed}; the limit is {limit} per device")
            }
        }
    }
}
