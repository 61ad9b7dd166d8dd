//! More plans with passes of two microbatches.
//!
//! Cost tables of such passes count each collective as if computation hid it, which a lower bound must. How much computation
//! there is beside it depends on all other decisions. The tables therefore favour decisions with too many collectives, or with
//! two in a row. Other decisions are tried here: those that are best where a share of each collective is exposed, those that are
//! best for passes of one microbatch, with and without overlap of their own, and those of the published baselines, which spread
//! their collectives. All are simulated.

use narrows_plan::Context;
use narrows_plan::strategy::{Baseline, Rules};

use super::progress::FitProgress;
use super::solver::ContextSolver;
use crate::request::Request;

/// Shares of the collectives that count as exposed, in the order in which they are tried.
pub(super) const EXPOSED_SHARES: [f64; 3] = [0.5, 0.25, 0.1];

/// Distance from the bound, relative to the step, from which on these decisions are tried.
const GAP_MIN: f64 = 0.005;

impl ContextSolver<'_> {
    /// Tries these decisions in a context with pairs of microbatches.
    pub(super) fn try_pairs(&self, context: &Context, progress: &mut FitProgress) {
        for (share, segments) in EXPOSED_SHARES.iter().zip(&self.with_exposed_shares) {
            let segments = segments.get_or_init(|| self.segments.with_exposed_share(*share));
            let solver = ContextSolver::new(self.request, segments);
            self.try_fastest(&solver, *context, context, progress);
        }
        let in_order = Context { overlap_microbatch_pairs: false, ..*context };
        let with_gemms = Context { overlap_tensor_collectives: true, ..in_order };
        self.try_fastest(self, with_gemms, context, progress);
        self.try_fastest(self, in_order, context, progress);
        for request in baselines(self.request) {
            let segments = self.segments.for_request(&request);
            let solver = ContextSolver::new(&request, &segments);
            self.try_fastest(&solver, *context, context, progress);
            self.try_fastest(&solver, in_order, context, progress);
        }
    }

    /// Tries the decisions that are the fastest for another solver or in another context.
    fn try_fastest(
        &self,
        solver: &ContextSolver,
        solved: Context,
        context: &Context,
        progress: &mut FitProgress,
    ) {
        if 1.0 - progress.bound / progress.incumbent < GAP_MIN || self.segments.out_of_time() {
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

/// The request under the rules of each baseline that may be the fastest: BTP, or those of dense models.
fn baselines(request: &Request) -> Vec<Request> {
    let of_model: Vec<Baseline> = match request.model.is_low_rank() {
        _ if request.rules.baseline != Baseline::Auto => vec![],
        true => vec![Baseline::Btp],
        false => Baseline::of_dense_models().collect(),
    };
    let with = |baseline| Request { rules: Rules { baseline, ..request.rules }, ..request.clone() };
    of_model.into_iter().map(with).collect()
}
