//! Directions of transfers between pipeline stages.

use narrows_plan::program::Phase;

/// Direction of a transfer along the pipeline. With an interleaved schedule the pipeline is a ring: the last stage sends
/// downstream to the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PipelineDirection {
    /// Towards later segments of the model: activations.
    Downstream,
    /// Towards earlier segments of the model: gradients.
    Upstream,
}

impl PipelineDirection {
    /// Both directions, in the order of their [`index`](PipelineDirection::index).
    pub const ALL: [PipelineDirection; 2] =
        [PipelineDirection::Downstream, PipelineDirection::Upstream];

    /// Index of the direction in arrays.
    pub fn index(self) -> usize {
        self as usize
    }

    /// The direction of the transfers of a pass.
    pub fn of_phase(phase: Phase) -> PipelineDirection {
        match phase {
            Phase::Forward => PipelineDirection::Downstream,
            _ => PipelineDirection::Upstream,
        }
    }

    /// The stage that a stage sends to, of this many stages.
    pub fn receiver(self, stage: u64, stages: u64) -> u64 {
        match self {
            PipelineDirection::Downstream => (stage + 1) % stages,
            PipelineDirection::Upstream => (stage + stages - 1) % stages,
        }
    }

    /// The stage that a stage receives from, of this many stages.
    pub fn sender(self, stage: u64, stages: u64) -> u64 {
        let opposite = match self {
            PipelineDirection::Downstream => PipelineDirection::Upstream,
            PipelineDirection::Upstream => PipelineDirection::Downstream,
        };
        opposite.receiver(stage, stages)
    }
}
