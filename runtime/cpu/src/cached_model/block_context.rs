//! What the computations of a block share.

use narrows_plan::model::{Model, ParameterId, WeightId};
use narrows_runtime::session::ModelTensors;

use crate::kernels::{Parallel, RopeTable};

/// A block, its weights, and the place of the new tokens.
#[derive(Clone, Copy)]
pub(super) struct BlockContext<'a> {
    pub model: &'a Model,
    pub index: usize,
    pub weights: &'a ModelTensors,
    pub rope: &'a RopeTable,
    /// Position of the first new token.
    pub first_position: usize,
    /// Number of new tokens.
    pub tokens: usize,
    pub parallel: Parallel,
}

impl BlockContext<'_> {
    /// A parameter of the block.
    pub(super) fn weight(&self, weight: WeightId) -> &[f32] {
        &self.weights[&ParameterId { block: Some(self.index as u64), weight }]
    }
}
