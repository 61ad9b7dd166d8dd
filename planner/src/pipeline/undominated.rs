//! Divides the blocks among the pipeline stages.
//!
//! Partitions are enumerated exactly by the bound of `step_bound`, with labels (Σt, bound so far) of which only the
//! undominated are kept; the best are then simulated.

use narrows_plan::Seconds;

use super::assignment::StageAssignment;
use super::overhead::StageOverhead;
use super::partition::{FIRST_STAGE_WEIGHTS, Partition, PruningCutoff, StageBlocks, StageChoice};
use super::stage_position::StepSchedule;
use super::step_bound::{PrefixBounds, StepEndCost};

/// Lower bound on a step with these block counts over all assignments within the stages' bytes: the value
/// that [`DivisionSearch::undominated_partitions`] minimises. `None` when a stage does not fit.
#[cfg(test)]
pub(super) fn division_bound(
    counts: &[usize],
    overheads: &[StageOverhead],
    step: StepSchedule,
    cutoff: &PruningCutoff,
    choice: StageChoice,
) -> Option<f64> {
    let prefix = PrefixBounds::new(overheads, step, cutoff);
    let step_phase = prefix.step_phase_bound(&overheads[0], &(0..counts[0]));
    let mut step_end = StepEndCost::of_step_phase(step_phase);
    let mut bound = 0.0_f64;
    for (blocks, overhead) in StageBlocks::of_counts(counts).zip(overheads) {
        let assignment = choice(blocks)?;
        let (stage, run) = (blocks.stage, blocks.run());
        let here = prefix.of_stage(stage, run.clone(), &assignment, overhead, &step_end);
        bound = bound.max(here);
        step_end = prefix.step_end_cost_after(stage, &run, &assignment, overhead, step_end);
    }
    Some(bound)
}

/// A division of the first blocks among the first stages.
#[derive(Clone, Copy, Debug)]
struct Label {
    /// Σt of the stages so far, as assigned: of two labels with equal bounds, less time leads to
    /// shorter steps.
    microbatch_times: f64,
    /// Bound so far.
    bound: f64,
    /// Terms of the stages at which a step may end in bounds of later stages.
    step_end: StepEndCost,
    /// Number of blocks of the last stage.
    count: usize,
    /// Index of the label without the last stage in [`Labels::counts`]; `None` for the first stage.
    before: Option<usize>,
}

/// The undominated labels of all blocks.
struct Labels {
    /// The labels, best bound first.
    complete: Vec<Label>,
    /// The number of blocks of the last stage of each label that was extended, with the index of the label without that stage.
    counts: Vec<(usize, Option<usize>)>,
    /// Number of labels priced.
    priced: u64,
}

impl Labels {
    /// The number of blocks of each stage.
    fn counts_of(&self, label: &Label) -> Vec<usize> {
        let mut counts = vec![label.count];
        let mut before = label.before;
        while let Some((count, earlier)) = before.map(|index| self.counts[index]) {
            counts.push(count);
            before = earlier;
        }
        counts.reverse();
        counts
    }
}

/// An enumeration of the divisions of the blocks into `overheads.len()` stages. Every stage has blocks unless its overhead is that
/// of an empty stage. The work grows with the square of the blocks, so that `is_interrupted` is asked again and again.
pub struct DivisionSearch<'a> {
    /// Overhead of each stage.
    pub overheads: &'a [StageOverhead],
    /// The schedule and the number of microbatches.
    pub step: StepSchedule,
    /// The step to beat, with the least times of each block.
    pub cutoff: &'a PruningCutoff,
    /// Whether to end without a result.
    pub is_interrupted: &'a dyn Fn() -> bool,
}

impl DivisionSearch<'_> {
    /// The undominated partitions that can beat the cutoff, best bound first. Blocks that cannot beat the cutoff with their
    /// `relaxed` assignment are not assigned. Also returns the number of partial partitions priced. No partition is returned
    /// once `is_interrupted` returns true.
    pub fn undominated_partitions(
        &self,
        choice: StageChoice,
        relaxed: Option<StageChoice>,
    ) -> (Vec<Partition>, u64) {
        let labels = self.labels(choice, relaxed, true);
        let partitions = labels.complete.iter().filter_map(|label| {
            Partition::with_counts(labels.counts_of(label), choice)
                .map(|partition| Partition { bound: Seconds(label.bound), ..partition })
        });
        (partitions.collect(), labels.priced)
    }

    /// Whether no partition can beat the cutoff by its `relaxed` assignments, and the number of partial partitions
    /// priced. Nothing is excluded once `is_interrupted` returns true.
    pub(super) fn is_excluded(&self, relaxed: StageChoice) -> (bool, u64) {
        let labels = self.labels(relaxed, None, false);
        (labels.complete.is_empty() && !(self.is_interrupted)(), labels.priced)
    }

    /// The undominated labels; none when `is_interrupted` returns true. Bounds do not depend on the times of microbatches, so
    /// that fewer labels are undominated where these do not count.
    fn labels(
        &self,
        choice: StageChoice,
        relaxed: Option<StageChoice>,
        times_count: bool,
    ) -> Labels {
        let DivisionSearch { overheads, step, cutoff, is_interrupted } = *self;
        let mut found = Labels { complete: vec![], counts: vec![], priced: 0 };
        let (blocks, stages) = (cutoff.microbatch_times_min.len(), overheads.len());
        let microbatches = step.microbatches;
        // Largest number of blocks of the stages from s on, if all blocks were as fast as the fastest one.
        let fastest = cutoff.microbatch_times_min.iter().copied().fold(f64::INFINITY, f64::min);
        let of_fastest = PruningCutoff {
            microbatch_times_min: vec![fastest; blocks],
            passes_min: vec![],
            uncounted_reductions_min: vec![],
            step_phase_times_min: vec![],
            single_microbatch_steps_min: vec![],
            first_stage_weights: [0; FIRST_STAGE_WEIGHTS],
            weighted_steps_min: vec![],
            joint: None,
            step_time: cutoff.step_time,
        };
        let mut later_max = vec![0; stages + 1];
        for stage in (0..stages).rev() {
            let own_max = match overheads[stage].is_empty {
                true => 0,
                false => of_fastest.blocks_max(0, &overheads[stage], microbatches),
            };
            later_max[stage] = later_max[stage + 1] + own_max;
        }
        let prefix = PrefixBounds::new(overheads, step, cutoff);
        let mut labels: Vec<Vec<Label>> = vec![vec![]; blocks + 1];
        labels[0].push(Label {
            microbatch_times: 0.0,
            bound: 0.0,
            step_end: StepEndCost::of_step_phase(0.0),
            count: 0,
            before: None,
        });
        for (stage, overhead) in overheads.iter().enumerate() {
            // Stages after this one with at least one block each.
            let later = overheads[stage + 1..].iter().filter(|later| !later.is_empty).count();
            let mut next: Vec<Vec<Label>> = vec![vec![]; blocks + 1];
            for (used, list) in labels.iter().enumerate().filter(|(_, list)| !list.is_empty()) {
                if is_interrupted() {
                    return found;
                }
                let remaining = blocks - used;
                let first_index = found.counts.len();
                if stage > 0 {
                    found.counts.extend(list.iter().map(|label| (label.count, label.before)));
                }
                let before = |at: usize| (stage > 0).then_some(first_index + at);
                let [least, most] = match overhead.is_empty {
                    true => [0, 0],
                    false => [1, cutoff.blocks_max(used, overhead, microbatches)],
                };
                let count_max = most.min(remaining.saturating_sub(later));
                let count_min = remaining.saturating_sub(later_max[stage + 1]).max(least);
                for count in count_min..=count_max {
                    let (blocks, run) =
                        (StageBlocks { stage, first: used, count }, used..used + count);
                    let extend = |label: &Label, assignment: &StageAssignment| {
                        let own = match stage {
                            0 => {
                                StepEndCost::of_step_phase(prefix.step_phase_bound(overhead, &run))
                            }
                            _ => label.step_end,
                        };
                        let here = prefix.of_stage(stage, run.clone(), assignment, overhead, &own);
                        let later =
                            prefix.step_end_cost_after(stage, &run, assignment, overhead, own);
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
                    for (at, label) in list.iter().enumerate() {
                        found.priced += 1;
                        let (step_end, bound) = extend(label, &assignment);
                        if bound < cutoff.step_time {
                            let own_time = match times_count {
                                true => assignment.microbatch_time(overhead),
                                false => 0.0,
                            };
                            next[used + count].push(Label {
                                microbatch_times: label.microbatch_times + own_time,
                                bound,
                                step_end,
                                count,
                                before: before(at),
                            });
                        }
                    }
                }
            }
            for list in next.iter_mut().filter(|list| list.len() > 1) {
                if is_interrupted() {
                    return found;
                }
                keep_undominated(list);
            }
            labels = next;
        }
        found.complete = std::mem::take(&mut labels[blocks]);
        found
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
                && other.step_end.is_no_more_than(&label.step_end)
        });
        if !dominated {
            kept.push(label);
        }
    }
    *list = kept;
}
