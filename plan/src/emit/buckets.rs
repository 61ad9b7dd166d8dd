//! Parts of the buckets of a block.

use crate::context::BucketSplit;
use crate::graph::{Op, OpId, Segment};

/// The parameters of a stage's first block, with what a caller knows of their ops.
#[derive(Clone, Debug, PartialEq)]
pub struct SplitBucket<T> {
    /// The first ops of the block: their weights are read as the forward pass begins, and their gradients are complete when the
    /// backward pass has almost ended.
    pub first: Vec<(OpId, T)>,
    /// The other ops, in the order of the backward pass. The gradient of the last op of each part is the last to be
    /// complete, and its weight is the first to be read.
    pub rest: Vec<Vec<(OpId, T)>>,
}

/// Splits the parameters of a block, given in the order of its ops.
pub fn split_bucket<T>(
    split: BucketSplit,
    segment: &Segment,
    ops: impl DoubleEndedIterator<Item = (OpId, T)>,
) -> SplitBucket<T> {
    let (mut rest, mut first, mut part) = (vec![], vec![], vec![]);
    for (op, of_op) in ops.rev() {
        if is_first(split, segment, op) {
            first.push((op, of_op));
            continue;
        }
        part.push((op, of_op));
        if split == BucketSplit::ByLinear && is_linear(segment, op) {
            rest.push(std::mem::take(&mut part));
        }
    }
    first.reverse();
    rest.extend((!part.is_empty()).then_some(part));
    SplitBucket { first, rest }
}

fn is_first(split: BucketSplit, segment: &Segment, op: OpId) -> bool {
    let find = |is_kind: &dyn Fn(OpId) -> bool| segment.op_ids().find(|op| is_kind(*op));
    match split {
        BucketSplit::Whole => true,
        BucketSplit::AtAttention => {
            let attention = find(&|op| matches!(segment.op(op).op, Op::Attention(_)));
            attention.is_none_or(|attention| op < attention)
        }
        BucketSplit::ByLinear => {
            let input = |op: OpId| segment.op(op).inputs.first();
            find(&|op| is_linear(segment, op)).is_none_or(|first| {
                op < first || is_linear(segment, op) && input(op) == input(first)
            })
        }
    }
}

fn is_linear(segment: &Segment, op: OpId) -> bool {
    matches!(segment.op(op).op, Op::Linear(_))
}
