//! Parts of the gradient bucket of a block.

use crate::context::LastBucket;
use crate::graph::{Op, OpId, Segment};

/// The gradients of a stage's first block, with what a caller knows of their ops.
#[derive(Clone, Debug, PartialEq)]
pub struct SplitBucket<T> {
    /// Gradients that are reduced in buckets of their own during the backward pass, in the order of the buckets. The gradient
    /// of the last op of each is the last to be complete.
    pub early: Vec<Vec<(OpId, T)>>,
    /// Gradients that are complete when the backward pass has almost ended.
    pub late: Vec<(OpId, T)>,
}

/// Splits the gradients of a block, given in the order of its ops.
pub fn split_bucket<T>(
    last_bucket: LastBucket,
    segment: &Segment,
    ops: impl DoubleEndedIterator<Item = (OpId, T)>,
) -> SplitBucket<T> {
    let (mut early, mut late, mut bucket) = (vec![], vec![], vec![]);
    for (op, of_op) in ops.rev() {
        if is_late(last_bucket, segment, op) {
            late.push((op, of_op));
            continue;
        }
        bucket.push((op, of_op));
        if last_bucket == LastBucket::SplitByLinear && is_linear(segment, op) {
            early.push(std::mem::take(&mut bucket));
        }
    }
    late.reverse();
    early.extend((!bucket.is_empty()).then_some(bucket));
    SplitBucket { early, late }
}

fn is_late(last_bucket: LastBucket, segment: &Segment, op: OpId) -> bool {
    let first = |is_kind: &dyn Fn(OpId) -> bool| segment.op_ids().find(|op| is_kind(*op));
    match last_bucket {
        LastBucket::Whole => true,
        LastBucket::SplitAtAttention => {
            let attention = first(&|op| matches!(segment.op(op).op, Op::Attention(_)));
            attention.is_none_or(|attention| op < attention)
        }
        LastBucket::SplitByLinear => {
            let input = |op: OpId| segment.op(op).inputs.first();
            first(&|op| is_linear(segment, op)).is_none_or(|first| {
                op < first || is_linear(segment, op) && input(op) == input(first)
            })
        }
    }
}

fn is_linear(segment: &Segment, op: OpId) -> bool {
    matches!(segment.op(op).op, Op::Linear(_))
}
