//! Combines bounds and limits into the status of a search.

use std::collections::BTreeMap;

use narrows_plan::Context;

use crate::context::{flops_bound, resident_bytes_min};
use crate::objective::Objective;
use crate::report::{ContextOutcome, ContextReport, SearchReport, SearchStatus};
use crate::request::Request;

/// Values with a smaller relative difference are equal.
const ROUNDING: f64 = 1e-9;
/// The relative gap up to which a plan counts as optimal, and below which no better bounds and plans are sought.
pub(crate) const OPTIMAL_GAP: f64 = 0.01;

/// Bounds and limits at the end of a search.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProofState {
    /// Lower bound on the objective: no plan is better. Infinite where no context could beat the warm start.
    pub bound: f64,
    /// Whether the deadline kept a context from being searched.
    pub is_out_of_time: bool,
    /// Whether a solver ended by a limit instead of a proof.
    pub has_unproven: bool,
}

impl ProofState {
    /// The report of a search whose plan has this value of the objective, or without a plan. Counts and wall time are
    /// summed over the contexts.
    pub(crate) fn report(
        self,
        request: &Request,
        value: Option<f64>,
        contexts: Vec<ContextReport>,
    ) -> SearchReport {
        let refuted = value.is_some_and(|value| self.is_refuted(value));
        debug_assert!(!refuted, "a plan of {value:?} beats the bound {}", self.bound);
        let objective = request.objective;
        let simple_bound = || {
            let bounds = contexts.iter().filter_map(|c| simple_bound(request, &c.context));
            bounds.fold(f64::INFINITY, f64::min)
        };
        let all_infeasible = contexts.iter().all(ContextReport::is_proven_infeasible);
        let (status, bound) = self.conclude(value, all_infeasible, simple_bound);
        let gap = value.map_or(0.0, |value| (value - bound) / value);
        let excluded = |context: &&ContextReport| {
            matches!(context.outcome, ContextOutcome::Pruned | ContextOutcome::Infeasible(_))
        };
        SearchReport {
            objective,
            status,
            is_interrupted: false,
            has_refuted_bound: refuted,
            gap: if gap <= ROUNDING { 0.0 } else { gap },
            bound: objective.step_time_bound(bound),
            objective_bound: bound,
            candidates_priced: contexts.len() as u64,
            candidates_pruned: contexts.iter().filter(excluded).count() as u64,
            segment_solves: 0,
            table_solves: BTreeMap::new(),
            failed_solves: 0,
            wall_time: Default::default(),
            contexts,
        }
    }

    /// Whether a plan of this value beats the bound, which is then wrong.
    fn is_refuted(&self, value: f64) -> bool {
        self.bound.is_finite() && self.bound * (1.0 - ROUNDING) > value
    }

    /// Status and lower bound. `simple_bound` replaces a refuted bound.
    fn conclude(
        self,
        value: Option<f64>,
        all_infeasible: bool,
        simple_bound: impl Fn() -> f64,
    ) -> (SearchStatus, f64) {
        let Some(value) = value else {
            let status = match self.is_out_of_time {
                true => SearchStatus::TimeLimit,
                false if all_infeasible && !self.has_unproven => SearchStatus::Infeasible,
                false => SearchStatus::GapLimit,
            };
            return (status, self.bound);
        };
        if self.is_refuted(value) {
            return (SearchStatus::GapLimit, simple_bound().min(value));
        }
        let bound = self.bound.min(value);
        let has_small_gap = value - bound <= OPTIMAL_GAP * value;
        let status = match self.is_out_of_time {
            _ if has_small_gap && !self.has_unproven => SearchStatus::Optimal,
            true => SearchStatus::TimeLimit,
            false => SearchStatus::GapLimit,
        };
        (status, bound)
    }
}

/// A bound on the objective in one context that is independent of all solvers: the model's FLOPs at the devices' peak, or
/// its weights and optimizer states.
fn simple_bound(request: &Request, context: &Context) -> Option<f64> {
    match request.objective {
        Objective::Memory => Some(resident_bytes_min(request.model.parameters(), context).as_f64()),
        objective => {
            let seconds = flops_bound(request, context).ok()?.0;
            Some(objective.weight(context) * seconds)
        }
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
    fn a_plan_within_one_percent_of_the_bound_is_optimal() {
        for is_out_of_time in [false, true] {
            assert_eq!(conclude(1.985, is_out_of_time, Some(2.0)).0, SearchStatus::Optimal);
            assert_ne!(conclude(1.975, is_out_of_time, Some(2.0)).0, SearchStatus::Optimal);
        }
        let unproven = ProofState { bound: 1.985, is_out_of_time: false, has_unproven: true };
        assert_eq!(unproven.conclude(Some(2.0), true, || 0.5).0, SearchStatus::GapLimit);
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
