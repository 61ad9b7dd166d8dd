//! Gives each pipeline stage its blocks, and each block a point of its front.
//!
//! With tₛ the forward and backward time of a microbatch on stage s and uₛ its step phase, a 1F1B
//! pipeline of m microbatches takes at least
//!
//! ```text
//! maxₛ ( Σ_{j<s} tⱼ + m·tₛ + uₛ )
//! ```
//! because stage s can begin only when the stages before it have passed the first microbatch
//! forward, and they have its last gradient still to pass back. Partitions are enumerated by this
//! bound, exactly, with labels (Σt, bound so far) of which only the undominated are kept; the best
//! are then simulated.

use std::sync::Arc;

use narrows_plan::{Bytes, Seconds};

use crate::segments::Solved;

/// Points of a block's front chosen for a run of blocks, with what they cost together.
#[derive(Clone, Debug, Default)]
pub struct Allotment {
    /// For each block in order, its point.
    pub blocks: Vec<Arc<Solved>>,
    /// Forward and backward of a microbatch.
    pub turn: Seconds,
    /// Once a step.
    pub step: Seconds,
    /// Bytes with the stage's microbatches in flight.
    pub bytes: Bytes,
}

impl Allotment {
    /// The time of a step's share.
    pub fn total(&self, microbatches: u64) -> Seconds {
        self.turn * microbatches as f64 + self.step
    }

    fn with(&self, block: &Arc<Solved>, in_flight: u64) -> Allotment {
        let mut blocks = self.blocks.clone();
        blocks.push(block.clone());
        Allotment {
            blocks,
            turn: self.turn + block.time.forward + block.time.backward,
            step: self.step + block.time.step,
            bytes: self.bytes + block.bytes.total(in_flight),
        }
    }
}

/// The most undominated sums that are carried along. Past it, the front of a long run of blocks
/// is thinned evenly, and the search says that it is no longer a proof.
const FRONT_MAX: usize = 512;

/// For every n up to the number of blocks, the fronts (time against bytes) of the first n blocks.
///
/// `fronts[i]` is the front of block i. The result says whether it had to be thinned.
pub fn run_fronts(
    fronts: &[Arc<Vec<Arc<Solved>>>],
    in_flight: u64,
    microbatches: u64,
    limit: Bytes,
) -> (Vec<Vec<Allotment>>, bool) {
    let mut thinned = false;
    let mut made = vec![vec![Allotment::default()]];
    for front in fronts {
        let last = &made[made.len() - 1];
        let mut next: Vec<(Seconds, Bytes, usize, usize)> = vec![];
        for (a, allotment) in last.iter().enumerate() {
            for (b, block) in front.iter().enumerate() {
                let bytes = allotment.bytes + block.bytes.total(in_flight);
                if bytes <= limit {
                    let time = allotment.total(microbatches) + block.time.total(microbatches);
                    next.push((time, bytes, a, b));
                }
            }
        }
        next.sort_by(|x, y| x.0.0.total_cmp(&y.0.0).then(x.1.cmp(&y.1)));
        let mut least = Bytes(u64::MAX);
        next.retain(|(_, bytes, _, _)| {
            let keep = *bytes < least;
            least = least.min(*bytes);
            keep
        });
        if next.len() > FRONT_MAX {
            thinned = true;
            let (step, last) = (next.len().div_ceil(FRONT_MAX), next.len() - 1);
            let mut index = 0;
            next.retain(|_| {
                index += 1;
                (index - 1) % step == 0 || index - 1 == last
            });
        }
        let next: Vec<Allotment> =
            next.iter().map(|(_, _, a, b)| last[*a].with(&front[*b], in_flight)).collect();
        if next.is_empty() {
            break;
        }
        made.push(next);
    }
    (made, thinned)
}

/// What a stage has besides its blocks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Extra {
    /// Forward and backward of a microbatch: embedding, head, transfers.
    pub turn: Seconds,
    /// Once a step.
    pub step: Seconds,
}

/// A division of the blocks among the stages.
#[derive(Clone, Debug)]
pub struct Partition {
    /// No step with this partition is shorter.
    pub bound: Seconds,
    /// The blocks of each stage.
    pub stages: Vec<Allotment>,
}

/// The fastest allotment for blocks `first..first+count` on a stage, if one fits.
pub type StageChoice<'a> = &'a dyn Fn(usize, usize, usize) -> Option<Allotment>;

/// The most partitions that are returned, and labels carried for each number of blocks.
const LABELS_MAX: usize = 64;

#[derive(Clone, Debug)]
struct Label {
    turns: f64,
    bound: f64,
    counts: Vec<usize>,
}

/// The best partitions of `blocks` blocks into `extras.len()` stages, by their bound. Every stage
/// has at least one block. Also returns how many partial partitions were priced.
pub fn partitions(
    blocks: usize,
    extras: &[Extra],
    microbatches: u64,
    choice: StageChoice,
) -> (Vec<Partition>, u64) {
    let stages = extras.len();
    let mut priced = 0;
    let mut labels: Vec<Vec<Label>> = vec![vec![]; blocks + 1];
    labels[0].push(Label { turns: 0.0, bound: 0.0, counts: vec![] });
    for (stage, extra) in extras.iter().enumerate() {
        let mut next: Vec<Vec<Label>> = vec![vec![]; blocks + 1];
        let later = stages - stage - 1;
        for (used, list) in labels.iter().enumerate().filter(|(_, list)| !list.is_empty()) {
            for count in 1..=(blocks - used).saturating_sub(later) {
                if later == 0 && used + count != blocks {
                    continue;
                }
                let Some(allotment) = choice(stage, used, count) else { break };
                let turn = (allotment.turn + extra.turn).0;
                let step = (allotment.step + extra.step).0;
                for label in list {
                    priced += 1;
                    let own = label.turns + microbatches as f64 * turn + step;
                    let mut counts = label.counts.clone();
                    counts.push(count);
                    let bound = label.bound.max(own);
                    next[used + count].push(Label { turns: label.turns + turn, bound, counts });
                }
            }
        }
        for list in &mut next {
            list.sort_by(|a, b| a.bound.total_cmp(&b.bound).then(a.turns.total_cmp(&b.turns)));
            list.truncate(LABELS_MAX);
        }
        labels = next;
    }
    let partitions = labels[blocks]
        .iter()
        .map(|label| {
            let mut first = 0;
            let stages = label
                .counts
                .iter()
                .enumerate()
                .filter_map(|(stage, count)| {
                    let allotment = choice(stage, first, *count);
                    first += count;
                    allotment
                })
                .collect();
            Partition { bound: Seconds(label.bound), stages }
        })
        .collect();
    (partitions, priced)
}
