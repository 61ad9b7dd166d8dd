//! A program, with what of its model must be known to execute it.

use std::collections::{BTreeMap, HashMap};

use narrows_plan::CheckedProgram;
use narrows_plan::model::Model;
use narrows_plan::program::{BufferId, Constants, Program, Region, StageProgram};

use super::sharded_parameter::ShardedParameter;
use crate::error::RunError;
use crate::parameters::{ParameterKind, logical_parameters};

/// A checked program of a model.
pub struct ModelProgram {
    program: CheckedProgram,
    /// Whether weight decay applies, by stage and weight.
    weight_decay_applies: Vec<HashMap<BufferId, bool>>,
    /// Elements of every logical parameter.
    parameter_elements: BTreeMap<String, usize>,
}

impl ModelProgram {
    /// Puts them together.
    ///
    /// # Errors
    /// When the program is not of this model.
    pub fn new(model: &Model, program: CheckedProgram) -> Result<ModelProgram, RunError> {
        let other = || RunError::ModelMismatch { model: model.name.clone() };
        let whole = program.program();
        if whole.constants != Constants::of(model) || whole.tied != model.tied {
            return Err(other());
        }
        let logical: BTreeMap<String, (usize, ParameterKind)> = logical_parameters(model)
            .into_iter()
            .map(|parameter| {
                let elements = parameter.elements() as usize;
                (parameter.name, (elements, parameter.kind))
            })
            .collect();
        let stages = whole.stages.iter();
        let decays = stages.map(|stage| decays(whole, stage, &logical)).collect::<Option<_>>();
        let decays = decays.ok_or_else(other)?;
        let sizes = logical.into_iter().map(|(name, (size, _))| (name, size)).collect();
        Ok(ModelProgram { program, weight_decay_applies: decays, parameter_elements: sizes })
    }

    /// The program.
    pub fn program(&self) -> &Program {
        self.program.program()
    }

    /// Whether weight decay applies, by the weights of a stage.
    pub fn decays(&self, stage: usize) -> &HashMap<BufferId, bool> {
        &self.weight_decay_applies[stage]
    }

    /// Elements of every logical parameter.
    pub fn sizes(&self) -> &BTreeMap<String, usize> {
        &self.parameter_elements
    }
}

/// `None` when a weight is not one of the model's.
fn decays(
    program: &Program,
    stage: &StageProgram,
    logical: &BTreeMap<String, (usize, ParameterKind)>,
) -> Option<HashMap<BufferId, bool>> {
    let mut made = HashMap::new();
    for (id, buffer) in stage.buffers.iter().enumerate() {
        if buffer.region != Region::Weight {
            continue;
        }
        let held = ShardedParameter::new(buffer, 0, program.context.tensor(), program.tied)?;
        for name in held.parameter_names() {
            let (_, role) = logical.get(&name)?;
            made.insert(BufferId(id as u32), *role == ParameterKind::Matrix);
        }
    }
    Some(made)
}
