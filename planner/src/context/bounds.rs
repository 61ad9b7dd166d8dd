//! Lower bounds of a context, by boundary layout.

use narrows_plan::Seconds;

use crate::infeasible::Infeasible;
use crate::pipeline::EmbeddingAndHead;

/// Lower bounds for each boundary layout of a context, the most promising first.
pub(crate) struct ContextBounds {
    /// The fastest embedding and head of a layout, and the bound on its plans.
    pub layouts: Vec<(EmbeddingAndHead, LayoutBound)>,
}

/// Bound on the plans of one boundary layout.
pub(crate) enum LayoutBound {
    /// No plan is faster.
    Bound {
        /// The bound.
        time: Seconds,
        /// The part of it that the bound of a division does not count: of working sets, and of collectives that pairs of
        /// microbatches cannot hide.
        beyond_division: Seconds,
    },
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
        for (_, layout) in &self.layouts {
            let bound = match layout {
                LayoutBound::Infeasible(infeasible) => {
                    reason = reason.nearer_to_feasible(infeasible.clone());
                    continue;
                }
                LayoutBound::NoImprovement => incumbent,
                LayoutBound::Bound { time, .. } => time.0,
            };
            lowest = Some(lowest.map_or(bound, |lowest| lowest.min(bound)));
        }
        lowest.map(Seconds).ok_or(reason)
    }
}

impl LayoutBound {
    /// The bound of a division.
    pub(crate) fn of_division(time: Seconds) -> LayoutBound {
        LayoutBound::Bound { time, beyond_division: Seconds(0.0) }
    }

    /// The bound, or this one of a division if it is larger.
    pub(crate) fn at_least(self, other: Seconds) -> LayoutBound {
        match self {
            LayoutBound::Bound { time, .. } if time < other => LayoutBound::of_division(other),
            LayoutBound::Bound { time, beyond_division } => {
                let beyond_division = Seconds(beyond_division.0.min((time - other).0));
                LayoutBound::Bound { time, beyond_division }
            }
            bound => bound,
        }
    }

    /// The bound, or this one, which no division counts, if it is larger.
    pub(crate) fn raised_to(self, seconds: f64) -> LayoutBound {
        match self {
            LayoutBound::Bound { time, beyond_division } if time.0 < seconds => {
                let beyond_division = beyond_division + (Seconds(seconds) - time);
                LayoutBound::Bound { time: Seconds(seconds), beyond_division }
            }
            bound => bound,
        }
    }

    /// The bound in seconds; infinite where there is none.
    pub(crate) fn seconds(&self) -> f64 {
        if let LayoutBound::Bound { time, .. } = self { time.0 } else { f64::INFINITY }
    }
}
