//! What proofs and limits amount to.

use narrows_plan::Seconds;

use crate::bound::quick_bound;
use crate::request::Request;
use crate::search::{ContextOutcome, ContextReport, SearchReport, SearchStatus};

/// Two times closer than this, relatively, are the same.
const ROUNDING: f64 = 1e-9;

/// What is known at the end of a search.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProofState {
    /// No plan is faster; infinite where nothing could beat what the search opened with.
    pub proven: f64,
    /// Whether the deadline kept something from being tried.
    pub out_of_time: bool,
    /// Whether some solve ended by a limit instead of a proof.
    pub has_unproven: bool,
}

impl ProofState {
    /// How the search ended with a plan of `time`, or with none; what was counted is left open.
    pub fn report(
        self,
        request: &Request,
        time: Option<f64>,
        contexts: Vec<ContextReport>,
    ) -> SearchReport {
        let refuted = time.is_some_and(|time| self.is_refuted(time));
        debug_assert!(!refuted, "a plan beats the bound {}: {time:?}", self.proven);
        // What no solver had a part in: the model's FLOPs at the devices' peak.
        let peak = || {
            let bounds = contexts.iter().filter_map(|c| quick_bound(request, &c.context).ok());
            bounds.map(|bound| bound.0).fold(f64::INFINITY, f64::min)
        };
        let all_empty = contexts.iter().all(ContextReport::is_proved_empty);
        let (status, bound) = self.conclude(time, all_empty, peak);
        let gap = time.map_or(0.0, |time| (time - bound) / time);
        let excluded = |context: &&ContextReport| {
            matches!(context.fate, ContextOutcome::Pruned | ContextOutcome::Refused(_))
        };
        SearchReport {
            status,
            gap: if gap <= ROUNDING { 0.0 } else { gap },
            bound: Seconds(bound),
            candidates_priced: 0,
            candidates_pruned: contexts.iter().filter(excluded).count() as u64,
            segment_solves: 0,
            wall_time: Default::default(),
            contexts,
        }
    }

    /// Whether a plan of this time is faster than any plan was proved to be. Then a bound was none,
    /// and nothing that it excluded is.
    fn is_refuted(&self, time: f64) -> bool {
        self.proven.is_finite() && self.proven * (1.0 - ROUNDING) > time
    }

    /// The status, and what no plan is faster than. `peak` is asked for where the proof is refuted.
    fn conclude(
        self,
        time: Option<f64>,
        all_empty: bool,
        peak: impl Fn() -> f64,
    ) -> (SearchStatus, f64) {
        let Some(time) = time else {
            let status = match self.out_of_time {
                true => SearchStatus::TimeLimit,
                false if all_empty && !self.has_unproven => SearchStatus::Infeasible,
                false => SearchStatus::GapLimit,
            };
            return (status, self.proven);
        };
        if self.is_refuted(time) {
            return (SearchStatus::GapLimit, peak().min(time));
        }
        let bound = self.proven.min(time);
        let is_closed = time - bound <= ROUNDING * time;
        let status = match self.out_of_time {
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

    fn conclude(proven: f64, out_of_time: bool, time: Option<f64>) -> (SearchStatus, f64) {
        ProofState { proven, out_of_time, has_unproven: false }.conclude(time, true, || 0.5)
    }

    #[test]
    fn a_bound_that_a_plan_beats_proves_nothing() {
        assert_eq!(conclude(2.0, false, Some(2.0)), (SearchStatus::Optimal, 2.0));
        assert_eq!(conclude(f64::INFINITY, false, Some(2.0)), (SearchStatus::Optimal, 2.0));
        assert_eq!(conclude(2.0, false, Some(1.9)), (SearchStatus::GapLimit, 0.5));
        assert_eq!(conclude(1.9, false, Some(2.0)), (SearchStatus::GapLimit, 1.9));
        assert_eq!(conclude(1.9, true, Some(2.0)), (SearchStatus::TimeLimit, 1.9));
    }

    #[test]
    fn nothing_found_is_a_proof_only_where_all_was_proved() {
        let infinite = f64::INFINITY;
        assert_eq!(conclude(infinite, false, None).0, SearchStatus::Infeasible);
        assert_eq!(conclude(infinite, true, None).0, SearchStatus::TimeLimit);
        let unproven = ProofState { proven: infinite, out_of_time: false, has_unproven: true };
        assert_eq!(unproven.conclude(None, true, || 0.5).0, SearchStatus::GapLimit);
    }
}
