//! Why a context has no plan.

use std::fmt;

use narrows_plan::Bytes;

/// Why a context has no plan.
#[derive(Clone, Debug, PartialEq)]
pub enum Infeasible {
    /// Some op has no legal strategy whose layouts its neighbours accept.
    NoStrategy,
    /// Plans exceed the memory of a device.
    Memory {
        /// The stage that exceeds it, where one was lowered.
        stage: Option<usize>,
        /// The least memory that was found to be needed.
        needed: Bytes,
        /// Memory of a device.
        limit: Bytes,
        /// Which plans need that much.
        evidence: MemoryEvidence,
    },
}

/// Which plans need the memory of an [`Infeasible::Memory`].
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
    /// Of two reasons, the one that is nearer to a feasible plan: a plan that was tried is nearer than
    /// a proof, less memory is nearer than more.
    pub fn nearer_to_feasible(self, other: Infeasible) -> Infeasible {
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
                write!(f, "stage {stage} needs {needed}; the limit is {limit} per device")
            }
            Infeasible::Memory { evidence: MemoryEvidence::TriedPlans, limit, .. } => {
                write!(f, "no plan that was tried fits; the limit is {limit} per device")
            }
            Infeasible::Memory { stage: None, needed, limit, .. } => {
                write!(f, "needs at least {needed}; the limit is {limit} per device")
            }
        }
    }
}
