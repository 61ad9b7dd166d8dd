//! Identity of a linear in a model.

use narrows_plan::model::{LinearKind, ParameterId, WeightId};

/// A linear of the model.
#[derive(Clone, Copy)]
pub(super) struct LinearId {
    pub block: u64,
    pub kind: LinearKind,
}

impl LinearId {
    /// A parameter of the linear: `id.parameter(WeightId::FactorA)`.
    pub(super) fn parameter(self, weight: fn(LinearKind) -> WeightId) -> ParameterId {
        ParameterId { block: Some(self.block), weight: weight(self.kind) }
    }
}
