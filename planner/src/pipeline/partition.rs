//! Blocks divided among the pipeline stages.

use std::ops::Range;
use std::sync::Arc;

use narrows_cost_model::PassTimesMin;
use narrows_plan::{Seconds, StagePlan};

use super::assignment::StageAssignment;
use super::joint_times::JointMinima;
use super::overhead::StageOverhead;
use crate::segment::SolvedSegment;

/// A division of the blocks among the stages.
#[derive(Clone, Debug)]
pub struct Partition {
    /// Lower bound on the step time.
    pub bound: Seconds,
    /// Number of blocks of each stage; the first and the last of several may have none.
    pub counts: Vec<usize>,
    /// The assignment of each stage.
    pub stages: Vec<Arc<StageAssignment>>,
}

/// A run of blocks on a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StageBlocks {
    /// The stage.
    pub stage: usize,
    /// First block.
    pub first: usize,
    /// Number of blocks.
    pub count: usize,
}

impl StageBlocks {
    /// The runs of stages with these numbers of blocks.
    pub(super) fn of_counts(counts: &[usize]) -> impl Iterator<Item = StageBlocks> {
        let mut first = 0;
        counts.iter().enumerate().map(move |(stage, count)| {
            first += count;
            StageBlocks { stage, first: first - count, count: *count }
        })
    }

    /// The blocks.
    pub(super) fn run(&self) -> Range<usize> {
        self.first..self.first + self.count
    }
}

/// The fastest assignment for a run of blocks on a stage; `None` when none fits.
pub(super) type StageChoice<'a> = &'a dyn Fn(StageBlocks) -> Option<Arc<StageAssignment>>;

/// Number of weights of the passes of a first stage.
pub(super) const FIRST_STAGE_WEIGHTS: usize = 2;

/// Lower bounds on single blocks, and the step time that a partition must beat.
#[derive(Clone, Debug)]
pub struct PruningCutoff {
    /// Lower bound on each block's microbatch time without a memory limit.
    pub microbatch_times_min: Vec<f64>,
    /// Lower bounds on each block's passes without a memory limit.
    pub passes_min: Vec<PassTimesMin>,
    /// Lower bound on the time of each block's gradient reductions that the step phase does not count.
    pub uncounted_reductions_min: Vec<f64>,
    /// Lower bound on each block's step phase.
    pub step_phase_times_min: Vec<f64>,
    /// Lower bound on each block's microbatch time plus its step phase, without a memory limit.
    pub single_microbatch_steps_min: Vec<f64>,
    /// Numbers of microbatches that weigh the passes of a first stage less than a step does; 0 for none.
    pub first_stage_weights: [u64; FIRST_STAGE_WEIGHTS],
    /// Lower bound on each block's time in a step of each of these numbers of microbatches, without a memory limit.
    pub weighted_steps_min: Vec<[f64; FIRST_STAGE_WEIGHTS]>,
    /// Least times of passes, reductions and updates together, where they are known.
    pub joint: Option<JointMinima>,
    /// Step time to beat.
    pub step_time: f64,
}

impl PruningCutoff {
    /// Largest number of blocks from `first` on that a stage can have and still beat the step time.
    pub(super) fn blocks_max(
        &self,
        first: usize,
        overhead: &StageOverhead,
        microbatches: u64,
    ) -> usize {
        let mut microbatch_time = (overhead.forward + overhead.backward).0;
        let fits = |block: &&f64| {
            microbatch_time += **block;
            microbatches as f64 * microbatch_time < self.step_time
        };
        self.microbatch_times_min[first..].iter().take_while(fits).count()
    }
}

impl Partition {
    /// The partition with these counts and an open bound; `None` when a stage does not fit.
    pub(crate) fn with_counts(counts: Vec<usize>, choice: StageChoice) -> Option<Partition> {
        let stages = StageBlocks::of_counts(&counts).map(choice).collect::<Option<Vec<_>>>()?;
        Some(Partition { bound: Seconds(0.0), counts, stages })
    }

    /// Whether a stage has no block.
    pub(crate) fn has_empty_stages(&self) -> bool {
        self.counts.contains(&0)
    }

    /// The blocks of each virtual stage: with several chunks per stage, these have equal numbers of blocks.
    pub(crate) fn virtual_stages(&self, chunks: usize) -> Vec<Vec<Arc<SolvedSegment>>> {
        let of_stages: Vec<Vec<_>> =
            self.stages.iter().map(|stage| stage.chunks(chunks).collect()).collect();
        let of_chunk = |chunk: usize| of_stages.iter().map(move |stage| stage[chunk].to_vec());
        (0..chunks).flat_map(of_chunk).collect()
    }

    /// Identities of the blocks' solutions by stage. Partitions of one search with equal identities
    /// lead to the same program.
    pub(crate) fn solution_ids(&self) -> Vec<Vec<*const SolvedSegment>> {
        let of_stage =
            |stage: &Arc<StageAssignment>| stage.blocks.iter().map(Arc::as_ptr).collect();
        self.stages.iter().map(of_stage).collect()
    }

    /// Moves single blocks between stages while this reduces `time`: the partition with the best bound
    /// rarely has the shortest simulated step. Moves whose `bound` is no better than `cutoff` are not
    /// simulated. Returns the partition, its time, and the number of partitions priced.
    pub(crate) fn local_search(
        mut self,
        choice: StageChoice,
        cutoff: f64,
        bound: &impl Fn(&Partition) -> f64,
        time: &impl Fn(&Partition) -> f64,
    ) -> (Partition, f64, u64) {
        let (mut best, mut priced) = (time(&self), 1);
        loop {
            let mut better: Option<(Partition, f64)> = None;
            for from in 0..self.counts.len() {
                let stages = self.counts.len();
                let least = StagePlan::blocks_min(from, stages);
                for to in (0..stages).filter(|to| *to != from && self.counts[from] > least) {
                    let mut counts = self.counts.clone();
                    counts[from] -= 1;
                    counts[to] += 1;
                    let best_so_far = better.as_ref().map_or(best, |(_, t)| *t);
                    let Some(moved) = Partition::with_counts(counts, choice) else { continue };
                    priced += 1;
                    if bound(&moved) >= best_so_far.min(cutoff) {
                        continue;
                    }
                    let moved_time = time(&moved);
                    if moved_time < best_so_far {
                        better = Some((moved, moved_time));
                    }
                }
            }
            let Some((moved, moved_time)) = better else { return (self, best, priced) };
            self = Partition { bound: self.bound, ..moved };
            best = moved_time;
        }
    }
}
