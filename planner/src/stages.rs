//! Gives each pipeline stage its blocks, and each block a point of its front.
//!
//! With tₛ the forward and backward time of a microbatch on stage s of P, uₛ its step phase and
//! wₛ = P − s, a 1F1B pipeline of m microbatches takes at least
//!
//! ```text
//! maxₛ u₀ + Σ_{j<s} tⱼ + m·tₛ
//! maxₛ u₀ + Σ_{j<s} tⱼ + 2·Σ_{j>s} tⱼ + (m − wₛ + 1)·tₛ      where m > wₛ
//! ```
//! The first, because stage s can begin only when the stages before it have passed the first
//! microbatch forward, and they have its last gradient still to pass back. The second, because it
//! also waits for the stages behind it twice: its first backward pass comes wₛ forward passes into
//! the schedule and after the first microbatch's way to the end and back, and its last one comes
//! after the last microbatch's. The first stage ends last of all, and has its step phase still to
//! run. Both are attained by equal stages.
//!
//! Blocks are decided by their least m·t + u. Another decision could have a smaller t and spend more
//! once a step, so the bound takes the least t that the stage's bytes allow, the least u₀ there is,
//! and the least m·t + u where these are one stage's.
//!
//! Partitions are enumerated by this bound, exactly, with labels (Σt, bound so far) of which only
//! the undominated are kept; the best are then simulated.

use std::ops::Range;
use std::sync::Arc;

use narrows_plan::{Bytes, Seconds};

use crate::extras::StageOverhead;
use crate::segments::SolvedSegment;

/// Points chosen for a run of blocks, with what they cost together.
#[derive(Clone, Debug, Default)]
pub struct StageAssignment {
    /// For each block in order, its point.
    pub blocks: Vec<Arc<SolvedSegment>>,
    /// Forward pass of a microbatch.
    pub forward: Seconds,
    /// Backward pass of a microbatch.
    pub backward: Seconds,
    /// Once a step.
    pub step: Seconds,
    /// Of that, what waits for the norm of all stages' gradients.
    pub update: Seconds,
    /// Bytes with the stage's microbatches in flight.
    pub bytes: Bytes,
    /// How much faster, over a step, a perfect division of the same bytes could be.
    pub slack: Seconds,
    /// The least forward and backward time of a microbatch within the same bytes, whatever is spent
    /// once a step.
    pub turn_least: Seconds,
}

impl StageAssignment {
    /// Of these blocks.
    pub fn new(blocks: Vec<Arc<SolvedSegment>>, in_flight: u64) -> StageAssignment {
        let mut made = StageAssignment::default();
        for block in &blocks {
            made.forward += block.time.forward;
            made.backward += block.time.backward;
            made.step += block.time.step;
            made.update += block.time.update;
            made.bytes += block.bytes.total(in_flight);
        }
        made.turn_least = made.forward + made.backward;
        StageAssignment { blocks, ..made }
    }
}

/// The fastest allotment of points of the blocks' hulls within a budget; `None` when even the
/// smallest points exceed it.
///
/// Walking from the smallest points, the step up a hull that saves the most time a byte is taken
/// first. The first step that no longer fits could be taken in part by a perfect division: what
/// that would save is the allotment's slack, and no choice of points is faster by more.
pub fn allot(
    hulls: &[Vec<Arc<SolvedSegment>>],
    in_flight: u64,
    microbatches: u64,
    budget: Bytes,
) -> Option<StageAssignment> {
    let bytes = |solved: &SolvedSegment| solved.bytes.total(in_flight);
    let time = |solved: &SolvedSegment| solved.time.total(microbatches).0;
    let mut level: Vec<usize> = vec![];
    let mut used = Bytes(0);
    // (seconds saved a byte, block, the point stepped up to)
    let mut steps: Vec<(f64, usize, usize)> = vec![];
    for (block, hull) in hulls.iter().enumerate() {
        let smallest = hull.len().checked_sub(1)?;
        level.push(smallest);
        used += bytes(&hull[smallest]);
        for to in 0..smallest {
            let (faster, slower) = (&hull[to], &hull[to + 1]);
            let more = (bytes(faster) - bytes(slower)).as_f64();
            steps.push(((time(slower) - time(faster)) / more, block, to));
        }
    }
    if used > budget {
        return None;
    }
    steps.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)).then(b.2.cmp(&a.2)));
    let mut slack = None;
    for (rate, block, to) in steps {
        let more = bytes(&hulls[block][to]) - bytes(&hulls[block][to + 1]);
        if level[block] == to + 1 && used + more <= budget {
            level[block] = to;
            used += more;
        } else {
            slack.get_or_insert(rate * (budget - used).as_f64());
        }
    }
    let blocks = hulls.iter().zip(&level).map(|(hull, level)| hull[*level].clone()).collect();
    let slack = Seconds(slack.unwrap_or(0.0));
    Some(StageAssignment { slack, ..StageAssignment::new(blocks, in_flight) })
}

/// A division of the blocks among the stages.
#[derive(Clone, Debug)]
pub struct Partition {
    /// No step with this partition is shorter.
    pub bound: Seconds,
    /// How many blocks each stage has.
    pub counts: Vec<usize>,
    /// The blocks of each stage.
    pub stages: Vec<Arc<StageAssignment>>,
}

/// The fastest allotment for `count` blocks from block `first` on a stage, if one fits:
/// `choice(stage, first, count)`.
pub type StageChoice<'a> = &'a dyn Fn(usize, usize, usize) -> Option<Arc<StageAssignment>>;

/// Which stage of how many, and how many microbatches pass it.
struct StagePosition {
    stage: usize,
    stages: usize,
    microbatches: u64,
}

/// The least time of a step because of one stage, without the first one's step phase: `before` and
/// `after` are the turns of the other stages, `turn` its own.
fn stage_bound(place: &StagePosition, before: f64, turn: f64, after: f64) -> f64 {
    let microbatches = place.microbatches as f64;
    let busy = before + microbatches * turn;
    match place.late() {
        Some(late) => busy.max(before + 2.0 * after + late * turn),
        None => busy,
    }
}

impl StagePosition {
    /// Turns that are left when the first microbatch has come back: m − w + 1, where m > w.
    fn late(&self) -> Option<f64> {
        let warm_up = (self.stages - self.stage) as u64;
        (self.microbatches > warm_up).then(|| (self.microbatches - warm_up + 1) as f64)
    }
}

/// What stages and blocks take at least, summed up.
struct PrefixBounds {
    /// Turns of the transfers and ends of the stages before s.
    extras: Vec<f64>,
    /// Turns of the blocks before b.
    turns: Vec<f64>,
    /// What they spend once a step.
    steps: Vec<f64>,
    microbatches: u64,
}

impl PrefixBounds {
    fn new(extras: &[StageOverhead], microbatches: u64, cutoff: &PruningCutoff) -> PrefixBounds {
        let sums = |times: &mut dyn Iterator<Item = f64>| {
            let mut sum = 0.0;
            let next = times.map(|time| {
                sum += time;
                sum
            });
            std::iter::once(0.0).chain(next).collect::<Vec<f64>>()
        };
        PrefixBounds {
            extras: sums(&mut extras.iter().map(|extra| (extra.forward + extra.backward).0)),
            turns: sums(&mut cutoff.turns.iter().copied()),
            steps: sums(&mut cutoff.steps.iter().copied()),
            microbatches,
        }
    }

    /// The least step phase of a stage with these blocks.
    fn step(&self, extra: &StageOverhead, run: &Range<usize>) -> f64 {
        extra.step_least.0 + self.steps[run.end] - self.steps[run.start]
    }

    /// The least time of a step because stage `stage` has the blocks of `run`; `first` is the least
    /// step phase of the first stage.
    fn of_stage(
        &self,
        stage: usize,
        run: Range<usize>,
        allotment: &StageAssignment,
        extra: &StageOverhead,
        first: f64,
    ) -> f64 {
        let stages = self.extras.len() - 1;
        let microbatches = self.microbatches as f64;
        let before = self.extras[stage] + self.turns[run.start];
        let to = self.extras[stage + 1] + self.turns[run.end];
        let after = self.extras[stages] + self.turns[self.turns.len() - 1] - to;
        let turn = (extra.forward + extra.backward + allotment.turn_least).0.max(to - before);
        let place = StagePosition { stage, stages, microbatches: self.microbatches };
        let bound = stage_bound(&place, before, turn, after) + first;
        // All of its turns and its step phase are least together.
        let all = microbatches * allotment.turn(extra) + (allotment.step + extra.step).0;
        let mut bound = bound.max(all - allotment.slack.0);
        if let Some(late) = place.late()
            && stage == 0
        {
            // m·t + u is at least all; so is what remains of it when some turns are past.
            let share = late / microbatches;
            let rest = share * (all - allotment.slack.0) + (1.0 - share) * first;
            bound = bound.max(2.0 * after + rest);
        }
        bound
    }
}

/// The least time of a step with these counts, however the blocks are decided within their bytes:
/// what [`partitions`] finds the best of. `None` when a stage does not fit.
pub fn division_bound(
    counts: &[usize],
    extras: &[StageOverhead],
    microbatches: u64,
    cutoff: &PruningCutoff,
    choice: StageChoice,
) -> Option<f64> {
    let least = PrefixBounds::new(extras, microbatches, cutoff);
    let first = least.step(&extras[0], &(0..counts[0]));
    let (mut begin, mut bound) = (0, 0.0_f64);
    for (stage, (count, extra)) in counts.iter().zip(extras).enumerate() {
        let allotment = choice(stage, begin, *count)?;
        let run = begin..begin + count;
        bound = bound.max(least.of_stage(stage, run, &allotment, extra, first));
        begin += count;
    }
    Some(bound)
}

/// A division of the first blocks among the first stages.
#[derive(Clone, Debug)]
struct Label {
    /// Σt of the stages so far, as allotted: of two labels the one with less leads to shorter steps
    /// than the bound tells.
    turns: f64,
    /// The bound so far.
    bound: f64,
    /// The first stage's least step phase.
    step: f64,
    counts: Vec<usize>,
}

/// What partitions must beat to be worth pricing.
#[derive(Clone, Debug)]
pub struct PruningCutoff {
    /// The least forward and backward time of each block, whatever the memory.
    pub turns: Vec<f64>,
    /// The least that each block may spend once a step.
    pub steps: Vec<f64>,
    /// The step time to beat.
    pub time: f64,
}

impl PruningCutoff {
    /// The most blocks from `first` on that a stage can have and beat the time.
    fn most(&self, first: usize, extra: &StageOverhead, microbatches: u64) -> usize {
        let mut turn = (extra.forward + extra.backward).0;
        let fits = |block: &&f64| {
            turn += **block;
            microbatches as f64 * turn < self.time
        };
        self.turns[first..].iter().take_while(fits).count()
    }
}

/// The undominated partitions of the blocks into `extras.len()` stages, best bound first; none that
/// cannot beat the cutoff. Every stage has at least one block. Also returns how many partial
/// partitions were priced.
pub fn partitions(
    extras: &[StageOverhead],
    microbatches: u64,
    cutoff: &PruningCutoff,
    choice: StageChoice,
) -> (Vec<Partition>, u64) {
    let (blocks, stages) = (cutoff.turns.len(), extras.len());
    // The most blocks that the stages from s on can have, were all blocks the quickest.
    let quickest = cutoff.turns.iter().copied().fold(f64::INFINITY, f64::min);
    let ideal = PruningCutoff { turns: vec![quickest; blocks], steps: vec![], time: cutoff.time };
    let mut most_later = vec![0; stages + 1];
    for stage in (0..stages).rev() {
        most_later[stage] = most_later[stage + 1] + ideal.most(0, &extras[stage], microbatches);
    }
    let sums = PrefixBounds::new(extras, microbatches, cutoff);
    let mut priced = 0;
    let mut labels: Vec<Vec<Label>> = vec![vec![]; blocks + 1];
    labels[0].push(Label { turns: 0.0, bound: 0.0, step: 0.0, counts: vec![] });
    for (stage, extra) in extras.iter().enumerate() {
        let later = stages - stage - 1;
        let mut next: Vec<Vec<Label>> = vec![vec![]; blocks + 1];
        for (used, list) in labels.iter().enumerate().filter(|(_, list)| !list.is_empty()) {
            let left = blocks - used;
            let most = cutoff.most(used, extra, microbatches).min(left.saturating_sub(later));
            let least = left.saturating_sub(most_later[stage + 1]).max(1);
            for count in least..=most {
                let Some(allotment) = choice(stage, used, count) else { break };
                let run = used..used + count;
                for label in list {
                    priced += 1;
                    let step = if stage == 0 { sums.step(extra, &run) } else { label.step };
                    let here = sums.of_stage(stage, run.clone(), &allotment, extra, step);
                    let bound = label.bound.max(here);
                    if bound < cutoff.time {
                        let counts = label.counts.iter().copied().chain([count]).collect();
                        let turns = label.turns + allotment.turn(extra);
                        next[used + count].push(Label { turns, bound, step, counts });
                    }
                }
            }
        }
        next.iter_mut().for_each(keep_undominated);
        labels = next;
    }
    let made = labels[blocks].iter().filter_map(|label| {
        Partition::of(label.counts.clone(), choice)
            .map(|partition| Partition { bound: Seconds(label.bound), ..partition })
    });
    (made.collect(), priced)
}

impl Partition {
    /// The partition with these counts, its bound left open; `None` when a stage does not fit.
    pub fn of(counts: Vec<usize>, choice: StageChoice) -> Option<Partition> {
        let mut first = 0;
        let mut stages = vec![];
        for (stage, count) in counts.iter().enumerate() {
            stages.push(choice(stage, first, *count)?);
            first += count;
        }
        Some(Partition { bound: Seconds(0.0), counts, stages })
    }

    /// Which solutions the blocks of each stage are: equal for two partitions of one search that lead
    /// to the same program.
    pub fn blocks(&self) -> Vec<Vec<*const SolvedSegment>> {
        let of_stage =
            |stage: &Arc<StageAssignment>| stage.blocks.iter().map(Arc::as_ptr).collect();
        self.stages.iter().map(of_stage).collect()
    }

    /// No step of these very blocks is shorter.
    pub fn bound_of(&self, extras: &[StageOverhead], microbatches: u64) -> f64 {
        let turns: Vec<f64> =
            self.stages.iter().zip(extras).map(|(stage, extra)| stage.turn(extra)).collect();
        let all: f64 = turns.iter().sum();
        // The first stage ends its passes last of all, and has its step phase still to run.
        let first = (self.stages[0].step + extras[0].step).0;
        let (mut before, mut bound) = (0.0, 0.0_f64);
        for (stage, turn) in turns.iter().enumerate() {
            let place = StagePosition { stage, stages: turns.len(), microbatches };
            bound = bound.max(stage_bound(&place, before, *turn, all - before - turn));
            before += turn;
        }
        bound + first
    }

    /// Moves single blocks between stages while that makes `time` smaller: the bound's best
    /// partition is rarely the simulation's. What cannot get below `least` is not tried.
    pub fn improve(
        mut self,
        choice: StageChoice,
        least: f64,
        bound: impl Fn(&Partition) -> f64,
        time: impl Fn(&Partition) -> f64,
    ) -> (Partition, f64, u64) {
        let (mut best, mut priced) = (time(&self), 1);
        loop {
            let mut better: Option<(Partition, f64)> = None;
            for from in 0..self.counts.len() {
                for to in (0..self.counts.len()).filter(|to| *to != from && self.counts[from] > 1) {
                    let mut counts = self.counts.clone();
                    counts[from] -= 1;
                    counts[to] += 1;
                    let to_beat = better.as_ref().map_or(best, |(_, t)| *t);
                    let Some(moved) = Partition::of(counts, choice) else { continue };
                    priced += 1;
                    if bound(&moved) >= to_beat.min(least) {
                        continue;
                    }
                    let moved_time = time(&moved);
                    if moved_time < to_beat {
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

/// A label that is no better than another in anything can never lead to a better end.
fn keep_undominated(list: &mut Vec<Label>) {
    list.sort_by(|a, b| a.bound.total_cmp(&b.bound).then(a.turns.total_cmp(&b.turns)));
    let mut kept: Vec<Label> = vec![];
    for label in list.drain(..) {
        let dominated = kept.iter().any(|other| {
            other.bound <= label.bound && other.turns <= label.turns && other.step <= label.step
        });
        if !dominated {
            kept.push(label);
        }
    }
    *list = kept;
}

impl StageAssignment {
    /// Forward and backward of a microbatch.
    fn turn(&self, extra: &StageOverhead) -> f64 {
        (self.forward + extra.forward + self.backward + extra.backward).0
    }
}
