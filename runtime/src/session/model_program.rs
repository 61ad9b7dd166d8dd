//! A checked program together with the properties of its model's parameters.

use std::collections::HashMap;

use narrows_plan::CheckedProgram;
use narrows_plan::model::{Model, ParameterId};
use narrows_plan::program::{BufferId, BufferRole, ModelConstants, Program, StageProgram};

use super::sharded_parameter::ShardedParameter;
use crate::error::RunError;
use crate::parameters::{LogicalParameter, ParameterKind, logical_parameters};

/// A checked program of a model.
pub struct ModelProgram {
    program: CheckedProgram,
    /// Whether a weight is a matrix, and so always decays, by stage and weight buffer.
    weight_is_matrix: Vec<HashMap<BufferId, bool>>,
    /// Elements of every logical parameter.
    parameter_elements: HashMap<ParameterId, usize>,
}

impl ModelProgram {
    /// Combines a program with its model.
    ///
    /// # Errors
    /// [`RunError::ModelMismatch`] when the program was not lowered from a plan of this model.
    pub fn new(model: &Model, program: CheckedProgram) -> Result<ModelProgram, RunError> {
        let mismatch = || RunError::ModelMismatch { model: model.name.clone() };
        let whole = program.program();
        if whole.constants != ModelConstants::of(model) || whole.tied != model.tied {
            return Err(mismatch());
        }
        let parameters = logical_parameters(model);
        let kinds: HashMap<ParameterId, ParameterKind> =
            parameters.iter().map(|parameter| (parameter.id, parameter.kind)).collect();
        let weight_is_matrix = whole
            .stages
            .iter()
            .map(|stage| matrices_by_buffer(whole, stage, &kinds))
            .collect::<Option<_>>()
            .ok_or_else(mismatch)?;
        let elements = |parameter: &LogicalParameter| parameter.elements() as usize;
        let parameter_elements = parameters.iter().map(|p| (p.id, elements(p))).collect();
        Ok(ModelProgram { program, weight_is_matrix, parameter_elements })
    }

    /// The program.
    pub fn program(&self) -> &Program {
        self.program.program()
    }

    /// Whether a weight is a matrix, and so always decays, by weight buffer of a stage.
    pub fn weight_is_matrix(&self, stage: usize) -> &HashMap<BufferId, bool> {
        &self.weight_is_matrix[stage]
    }

    /// Number of elements of every logical parameter.
    pub fn parameter_elements(&self) -> &HashMap<ParameterId, usize> {
        &self.parameter_elements
    }
}

/// Whether the weights of a stage are matrices; `None` when a weight is not one of the model's
/// parameters.
fn matrices_by_buffer(
    program: &Program,
    stage: &StageProgram,
    kinds: &HashMap<ParameterId, ParameterKind>,
) -> Option<HashMap<BufferId, bool>> {
    let mut matrices = HashMap::new();
    for (index, buffer) in stage.buffers.iter().enumerate() {
        if buffer.role != BufferRole::Weight {
            continue;
        }
        let shards = ShardedParameter::new(buffer, 0, program.context.tensor_size(), program.tied)?;
        for id in shards.parameter_ids() {
            let kind = kinds.get(&id)?;
            matrices.insert(BufferId(index as u32), *kind == ParameterKind::Matrix);
        }
    }
    Some(matrices)
}
