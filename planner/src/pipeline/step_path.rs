//! The weights of a path of passes through a pipeline that a step waits for.

use narrows_cost_model::{PartTimes, StepWeights};
use narrows_plan::graph::SegmentKind;

/// Segments that a path weighs alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SegmentClass {
    /// The embedding.
    Embedding,
    /// Blocks some of whose weight gradients may have passes of their own.
    Block,
    /// Blocks none of whose weight gradients may: each overlaps with a collective.
    BlockWithoutWeightGradientPass,
    /// The head.
    Head,
}

/// All classes.
const CLASSES: [SegmentClass; 4] = [
    SegmentClass::Embedding,
    SegmentClass::Block,
    SegmentClass::BlockWithoutWeightGradientPass,
    SegmentClass::Head,
];

/// The times of all segments of a virtual stage by class.
pub(super) type ClassTimes = [PartTimes; CLASSES.len()];

impl SegmentClass {
    /// The class of a segment of this kind, of which weight gradients that may have passes of their own take these seconds.
    pub(super) fn of(kind: SegmentKind, weight_gradient: f64) -> SegmentClass {
        match kind {
            SegmentKind::Embedding => SegmentClass::Embedding,
            SegmentKind::Block if weight_gradient > 0.0 => SegmentClass::Block,
            SegmentKind::Block => SegmentClass::BlockWithoutWeightGradientPass,
            SegmentKind::Head => SegmentClass::Head,
        }
    }

    pub(super) fn is_block(self) -> bool {
        matches!(self, SegmentClass::Block | SegmentClass::BlockWithoutWeightGradientPass)
    }
}

/// A path: a step takes at least the weighted times of all segments, what the path counts besides them, and the updates of the
/// segments of any stage, which follow the norm of all gradients. The weights leave out all updates.
#[derive(Clone, Debug)]
pub(super) struct StepPath {
    /// Weights of segments by virtual stage and class.
    weights: Vec<[StepWeights; CLASSES.len()]>,
    /// In seconds.
    pub besides_segments: f64,
}

impl StepPath {
    /// A path with these weights of segments of a class on each virtual stage.
    pub(super) fn new(
        virtual_stages: usize,
        weights: impl Fn(usize, SegmentClass) -> StepWeights,
        besides_segments: f64,
    ) -> StepPath {
        let of_stage = |stage| CLASSES.map(|class| weights(stage, class));
        StepPath { weights: (0..virtual_stages).map(of_stage).collect(), besides_segments }
    }

    /// The weights of a segment of this class on a virtual stage.
    pub(super) fn weights(&self, virtual_stage: usize, class: SegmentClass) -> &StepWeights {
        &self.weights[virtual_stage][class as usize]
    }

    /// The length in seconds where the segments of each virtual stage have these times.
    pub(super) fn length(&self, times: &[ClassTimes]) -> f64 {
        let of_stages = self.weights.iter().flatten().zip(times.iter().flatten());
        self.besides_segments
            + of_stages.map(|(weights, times)| times.weighted(weights)).sum::<f64>()
    }
}
