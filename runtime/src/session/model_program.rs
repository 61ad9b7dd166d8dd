//! A checked program together with the properties of its model's parameters.

use std::collections::{BTreeMap, HashMap};

use narrows_plan::CheckedProgram;
use narrows_plan::model::{Activation, LinearKind, Model, ParameterId, Weight, WeightId};
use narrows_plan::program::{BufferId, BufferRole, ModelConstants, Program, StageProgram};

use super::sharded_parameter::ShardedParameter;
use crate::error::RunError;
use crate::loro::PairShape;
use crate::optimizer::UpdateGroup;
use crate::parameters::{LogicalParameter, logical_parameters};

/// A factor pair of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct FactorPairSite {
    pub block: u64,
    pub kind: LinearKind,
    pub shape: PairShape,
    /// Whether the latent is x·A, without an activation or a crossing.
    pub has_plain_latent: bool,
}

impl FactorPairSite {
    /// The factor A.
    pub fn a(&self) -> ParameterId {
        ParameterId { block: Some(self.block), weight: WeightId::FactorA(self.kind) }
    }

    /// The factor B.
    pub fn b(&self) -> ParameterId {
        ParameterId { block: Some(self.block), weight: WeightId::FactorB(self.kind) }
    }
}

/// A checked program of a model.
pub struct ModelProgram {
    program: CheckedProgram,
    /// The group of a weight, by stage and weight buffer.
    update_groups: Vec<HashMap<BufferId, UpdateGroup>>,
    /// The factor pairs, by block.
    pairs: BTreeMap<u64, Vec<FactorPairSite>>,
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
        Ok(ModelProgram {
            program,
            update_groups,
            pairs: pairs_by_block(model),
            parameter_elements,
        })
    }

    /// The program.
    pub fn program(&self) -> &Program {
        self.program.program()
    }

    /// The group of a weight, by weight buffer of a stage. A buffer of factors with different ranks has that of one of them.
    pub fn update_groups(&self, stage: usize) -> &HashMap<BufferId, UpdateGroup> {
        &self.update_groups[stage]
    }

    /// The factor pairs, by block.
    pub(crate) fn pairs(&self) -> &BTreeMap<u64, Vec<FactorPairSite>> {
        &self.pairs
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

fn pairs_by_block(model: &Model) -> BTreeMap<u64, Vec<FactorPairSite>> {
    let mut pairs: BTreeMap<u64, Vec<FactorPairSite>> = BTreeMap::new();
    for (block, layer) in (0..).zip(&model.blocks) {
        for (kind, linear) in layer.linears() {
            let (Weight::Pair(pair), Some(shape)) = (&linear.weight, PairShape::of(linear)) else {
                continue;
            };
            pairs.entry(block).or_default().push(FactorPairSite {
                block,
                kind,
                shape,
                has_plain_latent: pair.activation == Activation::Identity
                    && pair.crossing.is_none(),
            });
        }
    }
    pairs
}
