//! Assignments that weigh the step phase of a stage less, or more, than its passes.
//!
//! The best assignment of a stage minimises m·t + u, as if all its passes and its step phase delayed the step. However,
//! step phases of different stages run at the same time, and the step phase of a stage that ends its passes early is
//! hidden in part: a second of one stage's step phase delays the step by λ ≤ 1 seconds, and the λ of all stages add up to
//! about 1. With few microbatches, all passes of all stages delay the step. An assignment that minimises M·t + u may
//! therefore give a shorter step, at M = m/λ, or at M < m where the stage's passes wait for passes of other stages: the first
//! stage's step phase follows all passes, but its passes delay the step less where another stage has more work. Stages
//! choose among assignments at several M, one stage at a time, while the simulated step becomes shorter.

use std::sync::Arc;

use narrows_plan::Context;

use super::assignment::{AssignmentMethod, StageAssignment};
use super::partition::{Partition, StageBlocks};
use super::partitioner::StagePartitioner;
use crate::segment::ASYMPTOTIC_MICROBATCHES;

impl StagePartitioner<'_> {
    /// Improves a partition as [`Partition::local_search`] does, and by other weights of the stages' step phases.
    /// Returns the partition, its time, and the number of partitions priced.
    pub(crate) fn local_search(
        &self,
        partition: Partition,
        cutoff: f64,
        bound: impl Fn(&Partition) -> f64,
        time: impl Fn(&Partition) -> f64,
    ) -> (Partition, f64, u64) {
        // Chunks of an interleaved pipeline have equal numbers of blocks.
        let may_move_blocks = self.context().chunks == 1;
        let own = |blocks| self.best_assignment(blocks);
        let (mut best, mut best_time, mut priced) = match may_move_blocks {
            true => partition.local_search(&own, cutoff, &bound, &time),
            false => {
                let partition_time = time(&partition);
                (partition, partition_time, 1)
            }
        };
        let weights = step_phase_weights(self.context(), &best);
        if best.counts.len() == 1 {
            return (best, best_time, priced);
        }
        // The microbatches that the assignment of each stage counts.
        let microbatches = self.context().workload.microbatches(&self.context().mesh);
        let stages = best.counts.len();
        let mut chosen = vec![microbatches; stages];
        loop {
            let mut is_improved = false;
            let all_stages = weights.iter().map(|weight| vec![*weight; stages]).collect::<Vec<_>>();
            let one_stage = (0..stages).flat_map(|stage| weights.iter().map(move |w| (stage, *w)));
            let mut attempt = |candidate: Vec<u64>, best: &mut Partition, chosen: &mut Vec<u64>| {
                let choice =
                    |blocks: StageBlocks| self.assignment_at(blocks, candidate[blocks.stage]);
                let Some(other) = Partition::with_counts(best.counts.clone(), &choice) else {
                    return;
                };
                if other.solution_ids() == best.solution_ids() {
                    return;
                }
                priced += 1;
                let other_time = time(&other);
                if other_time < best_time * (1.0 - IMPROVEMENT_MIN) {
                    best_time = other_time;
                    *best = Partition { bound: best.bound, ..other };
                    *chosen = candidate;
                    is_improved = true;
                }
            };
            for candidate in all_stages {
                attempt(candidate, &mut best, &mut chosen);
            }
            for (stage, weight) in one_stage {
                let mut candidate = chosen.clone();
                candidate[stage] = weight;
                attempt(candidate, &mut best, &mut chosen);
            }
            if !is_improved {
                return (best, best_time, priced);
            }
            if !may_move_blocks {
                continue;
            }
            let choice = |blocks: StageBlocks| self.assignment_at(blocks, chosen[blocks.stage]);
            let (moved, moved_time, more) = best.local_search(&choice, best_time, &bound, &time);
            (best, best_time) = (moved, moved_time);
            priced += more;
        }
    }

    /// The assignment of a run of blocks on a stage that is best with this many microbatches.
    fn assignment_at(
        &self,
        blocks: StageBlocks,
        microbatches: u64,
    ) -> Option<Arc<StageAssignment>> {
        let context = self.context();
        if microbatches == context.workload.microbatches(&context.mesh) {
            return self.best_assignment(blocks);
        }
        self.weighted_assignment(blocks, microbatches)
    }
}

/// Smallest relative improvement.
pub(super) const IMPROVEMENT_MIN: f64 = 1e-9;

/// The numbers of microbatches M that weigh the step phase: one, parts of the microbatches of a step, all of them, the M at
/// which all stages have equal shares of the step phase, some values around it, and one so large that the step phase has no
/// weight. Where memory binds, each number takes hulls of its own, and parts are left out.
fn step_phase_weights(context: &Context, partition: &Partition) -> Vec<u64> {
    let microbatches = context.workload.microbatches(&context.mesh);
    let stages = context.mesh.pipeline;
    let shared = microbatches * stages;
    let few = (microbatches as f64 * (stages as f64).sqrt()).ceil() as u64;
    let mut weights = vec![1, microbatches, few, shared, 4 * shared];
    let is_unbound = |stage: &Arc<StageAssignment>| stage.method == AssignmentMethod::Elimination;
    if partition.stages.iter().all(is_unbound) {
        weights.extend([2, 4, 8].map(|part| microbatches / part));
    }
    weights.retain(|weight| (1..ASYMPTOTIC_MICROBATCHES).contains(weight));
    weights.push(ASYMPTOTIC_MICROBATCHES);
    weights.sort_unstable();
    weights.dedup();
    weights
}
