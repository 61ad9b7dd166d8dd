//! A segment to solve, and its solution.

use std::sync::Arc;

use narrows_cost_model::{SegmentBytes, SegmentTime, SplitBucketTime};
use narrows_plan::BucketSplit;
use narrows_plan::graph::{Grouping, Segment, SegmentKind};
use narrows_plan::strategy::{BoundaryLayout, SegmentChoice, TiedWeightLayout};

/// A segment to solve, with the layouts at its boundary fixed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SegmentSpec {
    /// Embedding, block or head.
    pub kind: SegmentKind,
    /// Index of a block's shape among the model's distinct block shapes; 0 for embedding and head.
    pub shape: usize,
    /// Layouts of the tensors that enter and leave the segment.
    pub boundary: BoundaryLayout,
    /// Layout of the weight that a tied embedding and head share.
    pub tied_weight: Option<TiedWeightLayout>,
}

impl SegmentSpec {
    /// A block of one shape.
    pub fn block(shape: usize, boundary: BoundaryLayout) -> SegmentSpec {
        SegmentSpec { kind: SegmentKind::Block, shape, boundary, tied_weight: None }
    }

    /// The embedding or the head. No latent crosses their boundary.
    pub fn embedding_or_head(
        kind: SegmentKind,
        boundary: BoundaryLayout,
        tied_weight: Option<TiedWeightLayout>,
    ) -> SegmentSpec {
        let boundary = BoundaryLayout::hidden(boundary.hidden);
        SegmentSpec { kind, shape: 0, boundary, tied_weight }
    }
}

/// A solution of a segment: its decisions and their cost.
#[derive(Clone, Debug)]
pub struct SolvedSegment {
    /// Factors that run as one GEMM.
    pub grouping: Grouping,
    /// Choices for every op and value.
    pub choice: Arc<SegmentChoice>,
    /// The op graph that the choices are for.
    pub segment: Arc<Segment>,
    /// Times of one instance.
    pub time: SegmentTime,
    /// Bytes of one instance.
    pub bytes: SegmentBytes,
    /// Buckets of a block as the first of a stage, for each of [`BucketSplit::SPLITS`]; empty for embedding and head, and where
    /// there are no buckets.
    pub split_buckets: Arc<[SplitBucketTime; BucketSplit::SPLITS.len()]>,
}

impl SolvedSegment {
    /// Buckets of a block as the first of a stage; `None` for whole ones.
    pub(crate) fn split_bucket(&self, split: BucketSplit) -> Option<&SplitBucketTime> {
        let mut all = BucketSplit::SPLITS.iter().zip(self.split_buckets.iter());
        all.find(|(other, _)| **other == split).map(|(_, times)| times)
    }
}
