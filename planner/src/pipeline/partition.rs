//! Divides the blocks among the pipeline stages.
//!
//! With tₛ the microbatch time of stage s of P, uₛ its step phase and wₛ = P − s, a 1F1B step of m
//! microbatches takes at least
//!
//! ```text
//! maxₛ u₀ + Σ_{j<s} tⱼ + m·tₛ
//! maxₛ u₀ + Σ_{j<s} tⱼ + 2·Σ_{j>s} tⱼ + (m − wₛ + 1)·tₛ      where m > wₛ
//! ```
//! First bound: stage s begins after the forward passes of the first microbatch on all earlier stages, and
//! after its last backward pass these run theirs. Second bound: stage s also waits twice for the later
//! stages. Its first backward pass follows wₛ forward passes and the round trip of the first microbatch to
//! the last stage; its last backward pass follows the round trip of the last microbatch. The first stage
//! ends last and then runs its step phase. Equal stages attain both bounds.
//!
//! Blocks are assigned to minimise m·t + u. Another assignment may have a smaller t and a larger u,
//! so the bound uses the smallest t that the stage's bytes allow, the smallest u₀, and the smallest
//! m·t + u where both are of one stage. For later stages, t₀ + u₀ is minimised together.
//!
//! Partitions are enumerated exactly by this bound, with labels (Σt, bound so far) of which only the
//! undominated are kept; the best are then simulated.

use std::ops::Range;
use std::sync::Arc;

use narrows_plan::Seconds;

use super::assignment::StageAssignment;
use super::overhead::StageOverhead;
use crate::segment::SolvedSegment;

/// A division of the blocks among the stages.
#[derive(Clone, Debug)]
pub struct Partition {
    /// Lower bound on the step time.
    pub bound: Seconds,
    /// Number of blocks of each stage.
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

/// The fastest assignment for a run of blocks on a stage; `None` when none fits.
pub(super) type StageChoice<'a> = &'a dyn Fn(StageBlocks) -> Option<Arc<StageAssignment>>;

/// A stage, the number of stages, and the microbatches of a step.
struct StagePosition {
    stage: usize,
    stages: usize,
    microbatches: u64,
}

impl StagePosition {
    /// Passes of the stage after the first microbatch has come back: m − w + 1, where m > w.
    fn passes_after_warm_up(&self) -> Option<f64> {
        let warm_up = (self.stages - self.stage) as u64;
        (self.microbatches > warm_up).then(|| (self.microbatches - warm_up + 1) as f64)
    }
}

/// Lower bound on a step because of one stage, without the step phase of the first one: `before` and
/// `after` are the microbatch times of the stages around it, `own` its own.
fn stage_bound(position: &StagePosition, before: f64, own: f64, after: f64) -> f64 {
    let microbatches = position.microbatches as f64;
    let busy = before + microbatches * own;
    match position.passes_after_warm_up() {
        Some(passes) => busy.max(before + 2.0 * after + passes * own),
        None => busy,
    }
}

/// Prefix sums of lower bounds over stages and blocks.
struct PrefixBounds {
    /// Microbatch time of the overheads of the stages before s.
    overheads: Vec<f64>,
    /// Microbatch time of the blocks before b.
    microbatch_times: Vec<f64>,
    /// Step phase of the blocks before b.
    step_phase_times: Vec<f64>,
    microbatches: u64,
}

impl PrefixBounds {
    fn new(overheads: &[StageOverhead], microbatches: u64, cutoff: &PruningCutoff) -> PrefixBounds {
        let sums = |times: &mut dyn Iterator<Item = f64>| {
            let mut sum = 0.0;
            let next = times.map(|time| {
                sum += time;
                sum
            });
            std::iter::once(0.0).chain(next).collect::<Vec<f64>>()
        };
        let overhead_time = |overhead: &StageOverhead| (overhead.forward + overhead.backward).0;
        PrefixBounds {
            overheads: sums(&mut overheads.iter().map(overhead_time)),
            microbatch_times: sums(&mut cutoff.microbatch_times_min.iter().copied()),
            step_phase_times: sums(&mut cutoff.step_phase_times_min.iter().copied()),
            microbatches,
        }
    }

    /// Lower bound on the step phase of a stage with the blocks of `run`.
    fn step_phase_bound(&self, overhead: &StageOverhead, run: &Range<usize>) -> f64 {
        overhead.step_phase_min.0 + self.step_phase_times[run.end]
            - self.step_phase_times[run.start]
    }

    /// Lower bound on the time by which the first stage with the blocks of `run` delays a step beyond its microbatch time
    /// without a memory limit: its step phase, or both minimised together.
    fn first_stage_bound(
        &self,
        overhead: &StageOverhead,
        run: &Range<usize>,
        assignment: &StageAssignment,
    ) -> f64 {
        let together = (overhead.step_phase_min + assignment.single_microbatch_step_min).0
            - (self.microbatch_times[run.end] - self.microbatch_times[run.start]);
        self.step_phase_bound(overhead, run).max(together)
    }

    /// Lower bound on a step because stage `stage` has the blocks of `run`; `first_step_phase` is the lower
    /// bound on the first stage's step phase.
    fn of_stage(
        &self,
        stage: usize,
        run: Range<usize>,
        assignment: &StageAssignment,
        overhead: &StageOverhead,
        first_step_phase: f64,
    ) -> f64 {
        let stages = self.overheads.len() - 1;
        let microbatches = self.microbatches as f64;
        let before = self.overheads[stage] + self.microbatch_times[run.start];
        let to = self.overheads[stage + 1] + self.microbatch_times[run.end];
        let after =
            self.overheads[stages] + self.microbatch_times[self.microbatch_times.len() - 1] - to;
        let own = (overhead.forward + overhead.backward + assignment.microbatch_time_min)
            .0
            .max(to - before);
        let position = StagePosition { stage, stages, microbatches: self.microbatches };
        let bound = stage_bound(&position, before, own, after) + first_step_phase;
        // Its passes and its step phase, minimised together.
        let all = microbatches * assignment.microbatch_time(overhead)
            + (assignment.step_phase + overhead.step_phase).0;
        let mut bound = bound.max(all - assignment.integrality_slack.0);
        if let Some(passes) = position.passes_after_warm_up()
            && stage == 0
        {
            // m·t + u is at least `all`, and the remainder after some passes is at least its share.
            let share = passes / microbatches;
            let rest =
                share * (all - assignment.integrality_slack.0) + (1.0 - share) * first_step_phase;
            bound = bound.max(2.0 * after + rest);
        }
        bound
    }
}

/// Lower bound on a step with these block counts over all assignments within the stages' bytes: the value
/// that [`undominated_partitions`] minimises. `None` when a stage does not fit.
#[cfg(test)]
pub(super) fn division_bound(
    counts: &[usize],
    overheads: &[StageOverhead],
    microbatches: u64,
    cutoff: &PruningCutoff,
    choice: StageChoice,
) -> Option<f64> {
    let prefix = PrefixBounds::new(overheads, microbatches, cutoff);
    let mut first_step_phase = prefix.step_phase_bound(&overheads[0], &(0..counts[0]));
    let (mut begin, mut bound) = (0, 0.0_f64);
    for (stage, (count, overhead)) in counts.iter().zip(overheads).enumerate() {
        let assignment = choice(StageBlocks { stage, first: begin, count: *count })?;
        let run = begin..begin + count;
        let here = prefix.of_stage(stage, run.clone(), &assignment, overhead, first_step_phase);
        bound = bound.max(here);
        if stage == 0 {
            first_step_phase = prefix.first_stage_bound(overhead, &run, &assignment);
        }
        begin += count;
    }
    Some(bound)
}

/// A division of the first blocks among the first stages.
#[derive(Clone, Debug)]
struct Label {
    /// Σt of the stages so far, as assigned: of two labels with equal bounds, less time leads to
    /// shorter steps.
    microbatch_times: f64,
    /// Bound so far.
    bound: f64,
    /// Lower bound on the first stage's step phase, or on what it adds to the stage's least microbatch time.
    first_step_phase: f64,
    counts: Vec<usize>,
}

/// Lower bounds on single blocks, and the step time that a partition must beat.
#[derive(Clone, Debug)]
pub struct PruningCutoff {
    /// Lower bound on each block's microbatch time without a memory limit.
    pub microbatch_times_min: Vec<f64>,
    /// Lower bound on each block's step phase.
    pub step_phase_times_min: Vec<f64>,
    /// Step time to beat.
    pub step_time: f64,
}

impl PruningCutoff {
    /// Largest number of blocks from `first` on that a stage can have and still beat the step time.
    fn blocks_max(&self, first: usize, overhead: &StageOverhead, microbatches: u64) -> usize {
        let mut microbatch_time = (overhead.forward + overhead.backward).0;
        let fits = |block: &&f64| {
            microbatch_time += **block;
            microbatches as f64 * microbatch_time < self.step_time
        };
        self.microbatch_times_min[first..].iter().take_while(fits).count()
    }
}

/// The undominated partitions of the blocks into `overheads.len()` stages that can beat the cutoff, best
/// bound first. Every stage has at least one block. Blocks that cannot beat the cutoff with their `relaxed`
/// assignment are not assigned. Also returns the number of partial partitions priced.
pub fn undominated_partitions(
    overheads: &[StageOverhead],
    microbatches: u64,
    cutoff: &PruningCutoff,
    choice: StageChoice,
    relaxed: Option<StageChoice>,
) -> (Vec<Partition>, u64) {
    let (labels, priced) = undominated_labels(overheads, microbatches, cutoff, choice, relaxed);
    let partitions = labels.iter().filter_map(|label| {
        Partition::with_counts(label.counts.clone(), choice)
            .map(|partition| Partition { bound: Seconds(label.bound), ..partition })
    });
    (partitions.collect(), priced)
}

/// Whether no partition can beat the cutoff by its `relaxed` assignments, and the number of partial partitions
/// priced.
pub(super) fn is_excluded(
    overheads: &[StageOverhead],
    microbatches: u64,
    cutoff: &PruningCutoff,
    relaxed: StageChoice,
) -> (bool, u64) {
    let (labels, priced) = undominated_labels(overheads, microbatches, cutoff, relaxed, None);
    (labels.is_empty(), priced)
}

/// The undominated labels of all blocks, best bound first, and the number of labels priced.
fn undominated_labels(
    overheads: &[StageOverhead],
    microbatches: u64,
    cutoff: &PruningCutoff,
    choice: StageChoice,
    relaxed: Option<StageChoice>,
) -> (Vec<Label>, u64) {
    let (blocks, stages) = (cutoff.microbatch_times_min.len(), overheads.len());
    // Largest number of blocks of the stages from s on, if all blocks were as fast as the fastest one.
    let fastest = cutoff.microbatch_times_min.iter().copied().fold(f64::INFINITY, f64::min);
    let of_fastest = PruningCutoff {
        microbatch_times_min: vec![fastest; blocks],
        step_phase_times_min: vec![],
        step_time: cutoff.step_time,
    };
    let mut later_max = vec![0; stages + 1];
    for stage in (0..stages).rev() {
        later_max[stage] =
            later_max[stage + 1] + of_fastest.blocks_max(0, &overheads[stage], microbatches);
    }
    let prefix = PrefixBounds::new(overheads, microbatches, cutoff);
    let mut priced = 0;
    let mut labels: Vec<Vec<Label>> = vec![vec![]; blocks + 1];
    labels[0].push(Label {
        microbatch_times: 0.0,
        bound: 0.0,
        first_step_phase: 0.0,
        counts: vec![],
    });
    for (stage, overhead) in overheads.iter().enumerate() {
        let later = stages - stage - 1;
        let mut next: Vec<Vec<Label>> = vec![vec![]; blocks + 1];
        for (used, list) in labels.iter().enumerate().filter(|(_, list)| !list.is_empty()) {
            let remaining = blocks - used;
            let count_max = cutoff
                .blocks_max(used, overhead, microbatches)
                .min(remaining.saturating_sub(later));
            let count_min = remaining.saturating_sub(later_max[stage + 1]).max(1);
            for count in count_min..=count_max {
                let (blocks, run) = (StageBlocks { stage, first: used, count }, used..used + count);
                let extend = |label: &Label, assignment: &StageAssignment| {
                    let (own, later) = if stage == 0 {
                        let own = prefix.step_phase_bound(overhead, &run);
                        (own, prefix.first_stage_bound(overhead, &run, assignment))
                    } else {
                        (label.first_step_phase, label.first_step_phase)
                    };
                    let here = prefix.of_stage(stage, run.clone(), assignment, overhead, own);
                    (later, label.bound.max(here))
                };
                if let Some(relaxed) = relaxed {
                    let Some(assignment) = relaxed(blocks) else { break };
                    let is_open = |label| extend(label, &assignment).1 < cutoff.step_time;
                    if !list.iter().any(is_open) {
                        continue;
                    }
                }
                let Some(assignment) = choice(blocks) else { break };
                for label in list {
                    priced += 1;
                    let (first_step_phase, bound) = extend(label, &assignment);
                    if bound < cutoff.step_time {
                        let counts = label.counts.iter().copied().chain([count]).collect();
                        let microbatch_times =
                            label.microbatch_times + assignment.microbatch_time(overhead);
                        let label = Label { microbatch_times, bound, first_step_phase, counts };
                        next[used + count].push(label);
                    }
                }
            }
        }
        next.iter_mut().for_each(keep_undominated);
        labels = next;
    }
    (std::mem::take(&mut labels[blocks]), priced)
}

impl Partition {
    /// The partition with these counts and an open bound; `None` when a stage does not fit.
    pub(crate) fn with_counts(counts: Vec<usize>, choice: StageChoice) -> Option<Partition> {
        let mut first = 0;
        let mut stages = vec![];
        for (stage, count) in counts.iter().enumerate() {
            stages.push(choice(StageBlocks { stage, first, count: *count })?);
            first += count;
        }
        Some(Partition { bound: Seconds(0.0), counts, stages })
    }

    /// Identities of the blocks' solutions by stage. Partitions of one search with equal identities
    /// lead to the same program.
    pub(crate) fn solution_ids(&self) -> Vec<Vec<*const SolvedSegment>> {
        let of_stage =
            |stage: &Arc<StageAssignment>| stage.blocks.iter().map(Arc::as_ptr).collect();
        self.stages.iter().map(of_stage).collect()
    }

    /// Lower bound on a step with these assignments, in seconds.
    pub(crate) fn step_bound(&self, overheads: &[StageOverhead], microbatches: u64) -> f64 {
        let times: Vec<f64> = self
            .stages
            .iter()
            .zip(overheads)
            .map(|(stage, overhead)| stage.microbatch_time(overhead))
            .collect();
        let all: f64 = times.iter().sum();
        // The first stage ends its passes last, and then runs its step phase.
        let first_step_phase = (self.stages[0].step_phase + overheads[0].step_phase).0;
        let (mut before, mut bound) = (0.0, 0.0_f64);
        for (stage, own) in times.iter().enumerate() {
            let position = StagePosition { stage, stages: times.len(), microbatches };
            bound = bound.max(stage_bound(&position, before, *own, all - before - own));
            before += own;
        }
        bound + first_step_phase
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
                for to in (0..self.counts.len()).filter(|to| *to != from && self.counts[from] > 1) {
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

/// Removes dominated labels: another label is at least as good in all three values.
fn keep_undominated(list: &mut Vec<Label>) {
    list.sort_by(|a, b| {
        a.bound.total_cmp(&b.bound).then(a.microbatch_times.total_cmp(&b.microbatch_times))
    });
    let mut kept: Vec<Label> = vec![];
    for label in list.drain(..) {
        let dominated = kept.iter().any(|other| {
            other.bound <= label.bound
                && other.microbatch_times <= label.microbatch_times
                && other.first_step_phase <= label.first_step_phase
        });
        if !dominated {
            kept.push(label);
        }
    }
    *list = kept;
}
