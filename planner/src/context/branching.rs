//! Bounds and plans of pipelines from branching on the numbers of blocks of their stages.

use narrows_plan::{Bytes, Context};

use super::bounds::{ContextBounds, LayoutBound};
use super::partition_bounds::RelaxedLayout;
use super::solver::ContextSolver;
use crate::feasible_plan::FeasiblePlan;
use crate::pipeline::{
    EmbeddingAndHead, MixedDivision, Partition, StepSchedule, simulate_partition,
};

/// Times that a division is sought again with more memory kept free.
const RESERVES_MAX: usize = 4;

/// A bound on the plans of a context, and a plan that was found meanwhile.
pub(crate) struct BranchedContext {
    /// In seconds.
    pub bound: f64,
    pub plan: Option<FeasiblePlan>,
}

/// Times that a search by branching compares with, in seconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BranchingTimes {
    /// A bound that is enough.
    pub enough: f64,
    /// The bound below which plans are sought.
    pub target: f64,
    /// The step to beat.
    pub incumbent: f64,
}

impl ContextSolver<'_> {
    /// A larger bound than these of a context, with a plan that is faster than the incumbent, if one is found. One stage, interleaved
    /// chunks, and passes of several microbatches keep their bounds.
    pub(crate) fn branch(
        &self,
        context: &Context,
        bounds: &ContextBounds,
        mut times: BranchingTimes,
    ) -> BranchedContext {
        let mut branched = BranchedContext { bound: times.enough, plan: None };
        let has_branches =
            context.mesh.pipeline > 1 && context.chunks == 1 && context.pass_microbatches() == 1;
        for (fastest, layout) in &bounds.layouts {
            let LayoutBound::Bound { time, .. } = layout else { continue };
            if time.0 >= times.target {
                continue;
            }
            let bound = match has_branches && !self.out_of_time() {
                true => self.branch_layout(context, fastest, times, &mut branched.plan),
                false => 0.0,
            };
            branched.bound = branched.bound.min(bound.max(time.0));
            times.enough = branched.bound;
            if let Some(plan) = &branched.plan {
                times.incumbent = times.incumbent.min(plan.time.0);
            }
        }
        branched
    }

    /// The bound of the layout of the fastest embedding and head; `best` becomes a plan that is faster than the incumbent.
    fn branch_layout(
        &self,
        context: &Context,
        fastest: &EmbeddingAndHead,
        BranchingTimes { enough, target, mut incumbent }: BranchingTimes,
        best: &mut Option<FeasiblePlan>,
    ) -> f64 {
        let no_reserve = vec![Bytes(0); context.mesh.pipeline as usize];
        let RelaxedLayout { embedding_and_head, overheads } = self.relaxed_layout(context, fastest);
        let partitioner = self.partitioner(context, &embedding_and_head, &no_reserve);
        let Some(partitioner) = partitioner else { return 0.0 };
        let (bound, divisions) = partitioner.branched(&overheads, (enough, target));
        for division in divisions.iter().filter(|division| division.bound < target) {
            if let Some(plan) = self.plan_near(context, fastest, division, incumbent) {
                incumbent = plan.time.0;
                *best = Some(plan);
            }
        }
        bound
    }

    /// A plan near a division that takes less than `incumbent` seconds, if one is found.
    fn plan_near(
        &self,
        context: &Context,
        embedding_and_head: &EmbeddingAndHead,
        division: &MixedDivision,
        incumbent: f64,
    ) -> Option<FeasiblePlan> {
        let overheads = self.overheads(context, embedding_and_head);
        let limit = self.request.arena_limit();
        let mut reserve = vec![Bytes(0); context.mesh.pipeline as usize];
        for _ in 0..RESERVES_MAX {
            let partitioner = self.partitioner(context, embedding_and_head, &reserve)?;
            let time = |partition: &Partition| simulate_partition(context, partition, &overheads).0;
            let bound = |partition: &Partition| {
                partition.step_bound(overheads.of(&partition.counts), StepSchedule::of(context))
            };
            let (partition, time) = partitioner.fastest_near(division, &bound, &time)?;
            if time >= incumbent || self.out_of_time() {
                return None;
            }
            let sized = self.size_within(context, embedding_and_head, partition, limit);
            match sized.arenas.iter().position(|arena| *arena > limit) {
                Some(stage) => {
                    reserve[stage] += sized.arenas[stage].saturating_sub(limit);
                }
                None => {
                    let plan = self.complete(sized);
                    return (plan.time.0 < incumbent).then_some(plan);
                }
            }
        }
        None
    }
}
