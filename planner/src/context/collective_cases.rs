//! Cases of a step on one stage: the passes whose collectives over the data axis take longer than they do.

use narrows_plan::{BucketSplit, Context};

/// The passes in one direction whose collectives take longer than they do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Longer {
    Never,
    /// In the first forward pass before the first block reads its weights, or after the last backward pass.
    AtEnd,
    /// In the first forward pass before the second block, or in the last backward pass after it.
    BesideFirstBlock,
    /// In the first forward pass, or in the last backward pass.
    InOnePass,
    /// In every pass, beside the blocks.
    InEveryPass,
}

impl Longer {
    /// The cases that a context has in forward (0) and in backward (1) passes.
    pub(super) fn cases(context: &Context) -> [Vec<Longer>; 2] {
        let overlaps = context.overlap_grad_reduce;
        let of_passes = [
            (context.gathers_in_forward(), context.shards_weights() && overlaps),
            (overlaps, context.shards_gradients() && overlaps),
        ];
        [0, 1].map(|at| {
            let (in_one, in_every) = of_passes[at];
            let end = (in_one || in_every).then_some(Longer::AtEnd);
            let one = in_one.then_some(Longer::InOnePass);
            let beside_first =
                (in_one && !context.shards_gradients()).then_some(Longer::BesideFirstBlock);
            let every = in_every.then_some(Longer::InEveryPass);
            [Some(Longer::Never), end, beside_first, one, every].into_iter().flatten().collect()
        })
    }
}

/// The buckets of the first block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FirstBuckets {
    pub gather: BucketSplit,
    pub reduction: BucketSplit,
}

impl FirstBuckets {
    /// All that a plan of a context may have; one for all gathers (0) or all reductions (1) where they do not count.
    pub(super) fn all(context: &Context, count: [bool; 2]) -> impl Iterator<Item = FirstBuckets> {
        let can_split = [context.gathers_in_forward(), context.can_split_gradient_bucket()];
        let [gathers, reductions] = [0, 1].map(|at| match count[at] && can_split[at] {
            true => &BucketSplit::ALL[..],
            false => &[BucketSplit::Whole],
        });
        gathers.iter().flat_map(move |gather| {
            reductions
                .iter()
                .map(move |reduction| FirstBuckets { gather: *gather, reduction: *reduction })
        })
    }
}

/// A segment's place in the passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Embedding,
    FirstBlock,
    SecondBlock,
    Block,
    SecondToLastBlock,
    LastBlock,
    Head,
}

impl Place {
    /// Number of blocks after the last ones, which have a place of their own.
    pub(super) fn blocks_after(self) -> Option<u64> {
        match self {
            Place::LastBlock => Some(0),
            Place::SecondToLastBlock => Some(1),
            _ => None,
        }
    }
}
