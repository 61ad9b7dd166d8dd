//! A checked program together with the properties of its model's parameters.

use std::collections::HashMap;

use narrows_plan::CheckedProgram;
use narrows_plan::model::{Model, ParameterId};
use narrows_plan::program::{BufferId, BufferRole, ModelConstants, Program, StageProgram};

use super::sharded_parameter::ShardedParameter;
use crate::error::RunError;
use crate::optimizer::UpdateGroup;
use crate::parameters::{LogicalParameter, logical_parameters};

/// A checked program of a model.
pub struct ModelProgram {
    program: CheckedProgram,
    /// The group of a weight, by stage and weight buffer.
    update_groups: Vec<HashMap<BufferId, UpdateGroup>>,
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
        let group = |parameter| UpdateGroup::of(parameter, model.hidden);
        let groups: HashMap<ParameterId, UpdateGroup> =
            parameters.iter().map(|parameter| (parameter.id, group(parameter))).collect();
        let update_groups = whole
            .stages
            .iter()
            .map(|stage| groups_by_buffer(whole, stage, &groups))
            .collect::<Option<_>>()
            .ok_or_else(mismatch)?;
        let elements = |parameter: &LogicalParameter| parameter.elements() as usize;
        let parameter_elements = parameters.iter().map(|p| (p.id, elements(p))).collect();
        Ok(ModelProgram { program, update_groups, parameter_elements })
    }

    /// The program.
    pub fn program(&self) -> &Program {
        self.program.program()
    }

    /// The group of a weight, by weight buffer of a stage. A buffer of factors with different ranks has that of one of them.
    pub fn update_groups(&self, stage: usize) -> &HashMap<BufferId, UpdateGroup> {
        &self.update_groups[stage]
    }

    /// Number of elements of every logical parameter.
    pub fn parameter_elements(&self) -> &HashMap<ParameterId, usize> {
        &self.parameter_elements
    }
}

/// Groups of the weights of a stage; `None` when a weight is not one of the model's parameters.
fn groups_by_buffer(
    program: &Program,
    stage: &StageProgram,
    groups: &HashMap<ParameterId, UpdateGroup>,
) -> Option<HashMap<BufferId, UpdateGroup>> {
    let mut by_buffer = HashMap::new();
    for (index, buffer) in stage.buffers.iter().enumerate() {
        if buffer.role != BufferRole::Weight {
            continue;
        }
        let shards = ShardedParameter::new(buffer, 0, program.context.tensor_size(), program.tied)?;
        for id in shards.parameter_ids() {
            by_buffer.insert(BufferId(index as u32), *groups.get(&id)?);
        }
    }
    Some(by_buffer)
}
