//! Combines bounds and limits into the status of a search.

use std::collections::BTreeMap;

use narrows_plan::Seconds;

use crate::context::flops_bound;
use crate::report::{ContextOutcome, ContextReport, SearchReport, SearchStatus};
use crate::request::Request;

/// Times with a smaller relative difference are equal.
const ROUNDING: f64 = 1e-9;

/// Bounds and limits at the end of a search.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProofState {
    /// Lower bound: no plan is faster. Infinite where no context could beat the warm start.
    pub bound: f64,
    /// Whether the deadline kept a context from being searched.
    pub is_out_of_time: bool,
    /// Whether a solver ended by a limit instead of a proof.
    pub has_unproven: bool,
}

impl ProofState {
    /// The report of a search with a plan of `time` seconds, or without a plan. Counts and wall time are zero.
    pub(crate) fn report(
        self,
        request: &Request,
        time: Option<f64>,
        contexts: Vec<ContextReport>,
    ) -> SearchReport {
        let refuted = time.is_some_and(|time| self.is_refuted(time));
        debug_assert!(!refuted, "a plan of {time:?} beats the bound {}", self.bound);
        // A bound independent of all solvers: the model's FLOPs at the devices' peak.
        let peak_bound = || {
            let bounds = contexts.iter().filter_map(|c| flops_bound(request, &c.context).ok());
            bounds.map(|bound| bound.0).fold(f64::INFINITY, f64::min)
        };
        let all_infeasible = contexts.iter().all(ContextReport::is_proven_infeasible);
        let (status, bound) = self.conclude(time, all_infeasible, peak_bound);
        let gap = time.map_or(0.0, |time| (time - bound) / time);
        let excluded = |context: &&ContextReport| {
            matches!(context.outcome, ContextOutcome::Pruned | ContextOutcome::Infeasible(_))
        };
        SearchReport {
            status,
            gap: if gap <= ROUNDING { 0.0 } else { gap },
            bound: Seconds(bound),
            candidates_priced: 0,
            candidates_pruned: contexts.iter().filter(excluded).count() as u64,
            segment_solves: 0,
            table_solves: BTreeMap::new(),
            failed_solves: 0,
            wall_time: Default::default(),
            contexts,
        }
    }

    /// Whether a plan of this time beats the bound, which is then wrong.
    fn is_refuted(&self, time: f64) -> bool {
        self.bound.is_finite() && self.bound * (1.0 - ROUNDING) > time
    }

    /// Status and lower bound. `peak_bound` replaces a refuted bound.
    fn conclude(
        self,
        time: Option<f64>,
        all_infeasible: bool,
        peak_bound: impl Fn() -> f64,
    ) -> (SearchStatus, f64) {
        let Some(time) = time else {
            let status = match self.is_out_of_time {
                true => SearchStatus::TimeLimit,
                false if all_infeasible && !self.has_unproven => SearchStatus::Infeasible,
                false => SearchStatus::GapLimit,
            };
            return (status, self.bound);
        };
        if self.is_refuted(time) {
            return (SearchStatus::GapLimit, peak_bound().min(time));
        }
        let bound = self.bound.min(time);
        let is_closed = time - bound <= ROUNDING * time;
        let status = match self.is_out_of_time {
            _ if is_closed && !self.has_unproven => SearchStatus::Optimal,
            true => SearchStatus::TimeLimit,
            false => SearchStatus::GapLimit,
        };
        (status, bound)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conclude(bound: f64, is_out_of_time: bool, time: Option<f64>) -> (SearchStatus, f64) {
        ProofState { bound, is_out_of_time, has_unproven: false }.conclude(time, true, || 0.5)
    }

    #[test]
    fn a_refuted_bound_is_discarded() {
        assert_eq!(conclude(2.0, false, Some(2.0)), (SearchStatus::Optimal, 2.0));
        assert_eq!(conclude(f64::INFINITY, false, Some(2.0)), (SearchStatus::Optimal, 2.0));
        assert_eq!(conclude(2.0, false, Some(1.9)), (SearchStatus::GapLimit, 0.5));
        assert_eq!(conclude(1.9, false, Some(2.0)), (SearchStatus::GapLimit, 1.9));
        assert_eq!(conclude(1.9, true, Some(2.0)), (SearchStatus::TimeLimit, 1.9));
    }

    #[test]
    fn infeasible_requires_a_proof_for_every_context() {
        let infinite = f64::INFINITY;
        assert_eq!(conclude(infinite, false, None).0, SearchStatus::Infeasible);
        assert_eq!(conclude(infinite, true, None).0, SearchStatus::TimeLimit);
        let unproven = ProofState { bound: infinite, is_out_of_time: false, has_unproven: true };
        assert_eq!(unproven.conclude(None, true, || 0.5).0, SearchStatus::GapLimit);
    }
}
