//! Partitions from a mix of decisions: those of a bound that counts all paths of a pipeline.
//!
//! The [assignments](super::partitioner) of stages minimise m·t + u, for several numbers m. In a [mean of paths](super::path_mean),
//! stages have weights of their own for forward passes, backward passes, weight gradients, reductions, gathers and updates, and the
//! blocks of one stage may have different decisions: a stage that ends its passes early can afford long reductions for some blocks.

use std::sync::Arc;

use narrows_plan::{Bytes, Seconds};

use super::assignment::{BlockInFlight, StageAssignment};
use super::partition::{Partition, StageBlocks};
use super::partitioner::StagePartitioner;
use super::step_phase_weights::IMPROVEMENT_MIN;
use crate::segment::SolvedSegment;

/// Sweeps over all stages for a faster partition.
const SWEEPS_MAX: usize = 8;
/// Decisions of blocks on a stage.
#[derive(Clone)]
pub(crate) struct MixedDecisions {
    /// The shape of the blocks.
    pub shape: usize,
    pub solved: Arc<SolvedSegment>,
    /// The number of blocks with these decisions in the mix.
    pub number: f64,
}

/// A division of the blocks with a mix of decisions for each stage.
pub(crate) struct MixedDivision {
    /// The number of blocks of each stage.
    pub counts: Vec<usize>,
    /// The decisions that are known, by stage.
    pub decisions: Vec<Vec<MixedDecisions>>,
    /// Lower bound on the divisions near it, in seconds.
    pub bound: f64,
}

/// Bytes beyond the memory of the stages of a partition, and its time in seconds: fewer bytes come first.
type Score = (Bytes, f64);

impl StagePartitioner<'_> {
    /// The fastest of the partitions that are found near a mix, with its time in seconds, which `time` gives. `bound` gives a lower
    /// bound on it. `None` where none fits.
    pub(crate) fn fastest_near(
        &self,
        mixed: &MixedDivision,
        bound: &dyn Fn(&Partition) -> f64,
        time: &dyn Fn(&Partition) -> f64,
    ) -> Option<(Partition, f64)> {
        let counts = || mixed.counts.clone();
        let near = Partition::with_counts(counts(), &|run| {
            self.near_mix(run, &mixed.decisions[run.stage])
        });
        // The assignments that minimise m·t + u, and those for other m.
        let assigned = Partition::with_counts(counts(), &|run| self.best_assignment(run));
        let assigned = assigned.map(|assigned| {
            let (searched, _, _) = self.local_search(assigned, f64::INFINITY, bound, time);
            searched
        });
        let improved = [near, assigned].into_iter().flatten().map(|partition| {
            let partition = Partition { bound: Seconds(mixed.bound), ..partition };
            self.with_mixed_decisions(partition, mixed, time)
        });
        let fitting = improved.filter(|(_, (excess, _))| *excess == Bytes(0));
        let fastest = fitting.min_by(|(_, (_, a)), (_, (_, b))| a.total_cmp(b));
        fastest.map(|(partition, (_, time))| (partition, time))
    }

    /// Replaces the decisions of single blocks by those of the mix while that makes a partition better.
    fn with_mixed_decisions(
        &self,
        mut best: Partition,
        mixed: &MixedDivision,
        time: &dyn Fn(&Partition) -> f64,
    ) -> (Partition, Score) {
        let score = |partition: &Partition| -> Score {
            let stages = partition.stages.iter().zip(&self.stages);
            let excess = stages.map(|(stage, memory)| stage.bytes.saturating_sub(memory.budget));
            (excess.sum(), time(partition))
        };
        let is_better = |(bytes, time): Score, (than_bytes, than_time): Score| {
            let is_faster = time < than_time * (1.0 - IMPROVEMENT_MIN);
            bytes < than_bytes || bytes == than_bytes && is_faster
        };
        let mut best_score = score(&best);
        let counts = best.counts.clone();
        for _ in 0..SWEEPS_MAX {
            let before = best_score;
            for run in StageBlocks::of_counts(&counts) {
                let blocks: Vec<BlockInFlight> = self.blocks(run).collect();
                for (decisions, block) in mixed.decisions[run.stage]
                    .iter()
                    .flat_map(|of| (0..run.count).map(move |block| (of, block)))
                {
                    let stage = &best.stages[run.stage].blocks;
                    let is_equal = |other: &Arc<SolvedSegment>| Arc::ptr_eq(other, &stage[block]);
                    // Of equal blocks that follow each other, the first one stands for all.
                    let is_tried = block > 0 && is_equal(&stage[block - 1]);
                    let has_shape = blocks[block].spec.shape == decisions.shape;
                    if !has_shape || is_equal(&decisions.solved) || is_tried {
                        continue;
                    }
                    if self.interrupt_if_out_of_time() {
                        return (best, best_score);
                    }
                    let mut solutions = stage.clone();
                    solutions[block] = decisions.solved.clone();
                    let assignment =
                        StageAssignment::of_blocks(&blocks, in_order(&blocks, solutions));
                    let mut other = best.clone();
                    other.stages[run.stage] = Arc::new(assignment);
                    let other_score = score(&other);
                    if is_better(other_score, best_score) {
                        (best, best_score) = (other, other_score);
                    }
                }
            }
            if !is_better(best_score, before) {
                break;
            }
        }
        (best, best_score)
    }

    /// An assignment of a run of blocks with integer numbers near those of the mix; `None` where a block has no legal decisions.
    fn near_mix(
        &self,
        run: StageBlocks,
        decisions: &[MixedDecisions],
    ) -> Option<Arc<StageAssignment>> {
        let blocks: Vec<BlockInFlight> = self.blocks(run).collect();
        let mut solutions: Vec<Option<Arc<SolvedSegment>>> = vec![None; blocks.len()];
        for shape in 0..self.segments.shape_count() {
            let of_shape: Vec<usize> =
                (0..blocks.len()).filter(|block| blocks[*block].spec.shape == shape).collect();
            let mixed: Vec<&MixedDecisions> =
                decisions.iter().filter(|of| of.shape == shape && of.number > 0.0).collect();
            let numbers: Vec<f64> = mixed.iter().map(|of| of.number).collect();
            let counts = apportioned(of_shape.len(), &numbers);
            let all = mixed.iter().zip(counts);
            let mut all = all.flat_map(|(of, count)| std::iter::repeat_n(&of.solved, count));
            for block in of_shape {
                solutions[block] = match all.next() {
                    Some(solved) => Some(solved.clone()),
                    None => self.segments.fastest(blocks[block].spec, self.context),
                };
            }
        }
        let solutions = solutions.into_iter().collect::<Option<Vec<_>>>()?;
        Some(Arc::new(StageAssignment::of_blocks(&blocks, in_order(&blocks, solutions))))
    }
}

/// The solutions with those of short reductions and gathers first, as far as equal blocks can be exchanged: nothing hides the
/// reductions and gathers of the first block of a stage.
fn in_order(
    blocks: &[BlockInFlight],
    mut solutions: Vec<Arc<SolvedSegment>>,
) -> Vec<Arc<SolvedSegment>> {
    if blocks.windows(2).all(|pair| pair[0] == pair[1]) {
        let collectives =
            |solved: &SolvedSegment| (solved.time.overlapped + solved.time.gathered).0;
        solutions.sort_by(|a, b| collectives(a).total_cmp(&collectives(b)));
    }
    solutions
}

/// This many in proportion to the weights, by largest remainders; all zero without weights.
pub(super) fn apportioned(all: usize, weights: &[f64]) -> Vec<usize> {
    let sum: f64 = weights.iter().sum();
    if sum <= 0.0 {
        return vec![0; weights.len()];
    }
    let quotas: Vec<f64> = weights.iter().map(|weight| all as f64 * weight / sum).collect();
    let mut counts: Vec<usize> = quotas.iter().map(|quota| *quota as usize).collect();
    let mut by_remainder: Vec<usize> = (0..quotas.len()).collect();
    by_remainder.sort_by(|a, b| quotas[*b].fract().total_cmp(&quotas[*a].fract()));
    let missing = all.saturating_sub(counts.iter().sum());
    for index in by_remainder.into_iter().take(missing) {
        counts[index] += 1;
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::apportioned;

    #[test]
    fn largest_remainders_are_rounded_up() {
        assert_eq!(apportioned(5, &[1.0, 1.0, 2.0]), [1, 1, 3]);
        assert_eq!(apportioned(3, &[0.9, 0.0, 2.1]), [1, 0, 2]);
        assert_eq!(apportioned(3, &[]), [0; 0]);
        assert_eq!(apportioned(3, &[0.0, 0.0]), [0, 0]);
    }
}
