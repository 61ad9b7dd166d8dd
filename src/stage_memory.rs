//! Memory of a pipeline stage by contents.

use narrows_plan::Bytes;
use narrows_plan::program::{BufferRole, StageProgram};

/// Contents of the arena of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryContents {
    /// Weights in the compute format.
    Weights,
    /// Accumulated gradients of the weights.
    WeightGradients,
    /// Moments, and master copies of the weights.
    OptimizerStates,
    /// The rest: activations, their gradients, inputs, and gaps.
    Activations,
}

impl MemoryContents {
    /// All contents.
    pub const ALL: [MemoryContents; 4] = [
        MemoryContents::Weights,
        MemoryContents::WeightGradients,
        MemoryContents::OptimizerStates,
        MemoryContents::Activations,
    ];

    /// The name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            MemoryContents::Weights => "weights",
            MemoryContents::WeightGradients => "weight_gradients",
            MemoryContents::OptimizerStates => "optimizer_states",
            MemoryContents::Activations => "activations",
        }
    }

    /// The name in a table.
    pub fn title(self) -> &'static str {
        match self {
            MemoryContents::Weights => "weights",
            MemoryContents::WeightGradients => "weight gradients",
            MemoryContents::OptimizerStates => "optimizer states",
            MemoryContents::Activations => "activations and the rest",
        }
    }
}

/// Bytes of the arena of a stage, in the order of [`MemoryContents::ALL`].
pub fn stage_memory(stage: &StageProgram) -> [Bytes; 4] {
    let sum = |of: fn(BufferRole) -> bool| -> Bytes {
        let buffers = stage.buffers.iter().filter(|buffer| of(buffer.role));
        buffers.map(|buffer| buffer.extent.bytes()).sum()
    };
    let weights = sum(|role| role == BufferRole::Weight);
    let gradients = sum(|role| role == BufferRole::WeightGradient);
    let states = sum(BufferRole::is_optimizer_state);
    let rest = stage.arena.saturating_sub(weights + gradients + states);
    [weights, gradients, states, rest]
}

#[cfg(test)]
mod tests {
    use narrows_cost_model::profile;
    use narrows_plan::model::presets;
    use narrows_planner::{Request, search};

    use super::*;

    #[test]
    fn parameters_take_two_bytes_and_their_gradients_and_states_sixteen() {
        let model = presets::find("cola-60m").unwrap();
        let parameters = model.parameters();
        let profile = profile::preset("a100-80gb").unwrap();
        let program =
            search(&Request::new(model, profile, 1, 1, 128)).best.expect("a plan").program;
        let stage = &program.program().stages[0];
        let [weights, gradients, states, rest] = stage_memory(stage);
        assert_eq!([weights, gradients, states], [2, 4, 12].map(|bytes| Bytes(bytes * parameters)));
        let activations = stage.buffers.iter().filter(|b| b.role == BufferRole::Activation);
        let largest = activations.map(|buffer| buffer.extent.bytes()).max();
        assert!(Some(rest) >= largest, "{rest} of {largest:?}");
    }
}
