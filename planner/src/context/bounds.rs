//! Lower bounds of a context, by boundary layout.

use narrows_plan::Seconds;

use crate::infeasible::Infeasible;
use crate::pipeline::EmbeddingAndHead;

/// Lower bounds for each boundary layout of a context, the most promising first.
pub(crate) struct ContextBounds {
    /// The layouts.
    pub layouts: Vec<LayoutBounds>,
}

/// Lower bounds of one boundary layout.
pub(crate) struct LayoutBounds {
    /// The fastest embedding and head.
    pub fastest: EmbeddingAndHead,
    /// The bound on the plans.
    pub bound: LayoutBound,
    /// The seconds of it that the working set of a backward pass adds.
    pub working_set_cost: f64,
}

/// Bound on the plans of one boundary layout.
pub(crate) enum LayoutBound {
    /// No plan is faster.
    Bound(Seconds),
    /// No plan is faster than the incumbent.
    NoImprovement,
    /// No plan exists.
    Infeasible(Infeasible),
}

impl ContextBounds {
    /// Lower bound on the plans of the context; `incumbent` where no layout can beat it.
    ///
    /// # Errors
    /// The reason why the context has no plan.
    pub(crate) fn bound(&self, incumbent: f64) -> Result<Seconds, Infeasible> {
        let mut reason = Infeasible::NoStrategy;
        let mut lowest: Option<f64> = None;
        for layout in &self.layouts {
            let bound = match &layout.bound {
                LayoutBound::Infeasible(infeasible) => {
                    reason = reason.nearer_to_feasible(infeasible.clone());
                    continue;
                }
                LayoutBound::NoImprovement => incumbent,
                LayoutBound::Bound(bound) => bound.0,
            };
            lowest = Some(lowest.map_or(bound, |lowest| lowest.min(bound)));
        }
        lowest.map(Seconds).ok_or(reason)
    }
}

impl LayoutBound {
    /// The bound, or this one if it is larger.
    pub(crate) fn at_least(self, other: Seconds) -> LayoutBound {
        match self {
            LayoutBound::Bound(bound) if bound < other => LayoutBound::Bound(other),
            bound => bound,
        }
    }

    /// The bound in seconds; infinite where there is none.
    pub(crate) fn seconds(&self) -> f64 {
        if let LayoutBound::Bound(bound) = self { bound.0 } else { f64::INFINITY }
    }
}
