//! More plans with passes of two microbatches.
//!
//! Cost tables of such passes count each collective as if computation hid it. How much computation there is beside it depends on
//! all other decisions. The tables therefore favour decisions with too many collectives, or with
//! two in a row. Other decisions are tried here: those that are best where shares of the collectives are exposed, and those that
//! are best for passes of one microbatch, with and without overlap of their own. All are simulated. Contexts are also solved with
//! online norms alone: the collectives of other norms divide runs of computation into short ones.

use narrows_plan::Context;
use narrows_plan::strategy::{NormRule, Rules};

use super::progress::FitProgress;
use super::solver::ContextSolver;
use crate::request::Request;

/// Distance from the bound, relative to the step, from which on these decisions are tried.
const GAP_MIN: f64 = 0.001;

impl ContextSolver<'_> {
    /// Tries these decisions in a context with pairs of microbatches.
    pub(super) fn try_pairs(&self, context: &Context, progress: &mut FitProgress) {
        for segments in self.pair_segments.exposed(self.segments) {
            let solver = ContextSolver::new(self.request, segments);
            self.try_fastest(&solver, *context, context, progress);
        }
        self.try_online_norms(context, progress);
        for overlap_tensor_collectives in [true, false] {
            let single =
                Context { overlap_microbatch_pairs: false, overlap_tensor_collectives, ..*context };
            self.try_fastest(self, single, context, progress);
        }
    }

    /// Solves the context with online norms alone, where there are others.
    fn try_online_norms(&self, context: &Context, progress: &mut FitProgress) {
        if self.request.rules.norm != NormRule::Auto || !self.has_gap(progress) {
            return;
        }
        let rules = Rules { norm: NormRule::Online, ..self.request.rules };
        let request = Request { rules, ..self.request.clone() };
        let segments = self.segments.for_request(&request);
        let solver = ContextSolver::new(&request, &segments);
        let bounds = solver.bounds(context, [0.0, progress.incumbent]);
        if let Ok(Some(plan)) = solver.solve(context, &bounds, progress.incumbent).best {
            progress.accept(plan);
        }
    }

    /// Whether other plans may be much faster than the best.
    fn has_gap(&self, progress: &FitProgress) -> bool {
        1.0 - progress.bound / progress.incumbent >= GAP_MIN && !self.segments.out_of_time()
    }

    /// Tries the decisions that are the fastest for another solver or in another context.
    fn try_fastest(
        &self,
        solver: &ContextSolver,
        solved: Context,
        context: &Context,
        progress: &mut FitProgress,
    ) {
        if !self.has_gap(progress) {
            return;
        }
        let fastest = solver.even_partition(solved, f64::INFINITY);
        let fitting = fastest.and_then(|(_, _, embedding_and_head, partition)| {
            self.complete_within_limit(self.size(context, &embedding_and_head, partition))
        });
        if let Some(plan) = fitting {
            progress.accept(plan);
        }
    }
}
