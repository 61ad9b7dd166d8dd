//! The weights of a path of passes through a pipeline that a step waits for.

use narrows_cost_model::{PartTimes, StepWeights};
use narrows_plan::graph::SegmentKind;

/// Number of kinds of segments.
const KINDS: usize = 3;

/// The times of all segments of a virtual stage by kind.
pub(super) type KindTimes = [PartTimes; KINDS];

/// A path: a step takes at least the weighted times of all segments, what the path counts besides them, and the updates of the
/// segments of any stage, which follow the norm of all gradients. The weights leave out all updates.
#[derive(Clone, Debug)]
pub(super) struct StepPath {
    /// Weights of segments by virtual stage and kind.
    weights: Vec<[StepWeights; KINDS]>,
    /// In seconds.
    pub besides_segments: f64,
}

impl StepPath {
    /// A path with these weights of segments of a kind on each virtual stage.
    pub(super) fn new(
        virtual_stages: usize,
        weights: impl Fn(usize, SegmentKind) -> StepWeights,
        besides_segments: f64,
    ) -> StepPath {
        let kinds = [SegmentKind::Embedding, SegmentKind::Block, SegmentKind::Head];
        let of_stage = |stage| kinds.map(|kind| weights(stage, kind));
        StepPath { weights: (0..virtual_stages).map(of_stage).collect(), besides_segments }
    }

    /// The weights of a segment of this kind on a virtual stage.
    pub(super) fn weights(&self, virtual_stage: usize, kind: SegmentKind) -> &StepWeights {
        &self.weights[virtual_stage][kind as usize]
    }

    /// The length in seconds where the segments of each virtual stage have these times.
    pub(super) fn length(&self, times: &[KindTimes]) -> f64 {
        let of_stages = self.weights.iter().flatten().zip(times.iter().flatten());
        self.besides_segments
            + of_stages.map(|(weights, times)| times.weighted(weights)).sum::<f64>()
    }
}
