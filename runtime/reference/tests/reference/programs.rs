//! The parameters of programs are the logical parameters of their models, for every grouping.

use std::collections::{BTreeMap, BTreeSet};

use narrows_plan::graph::{
    BlockShape, Grouping, Segment, block_segment, embedding_segment, head_segment,
};
use narrows_plan::model::{Model, ParameterId, WeightId, WeightShape, presets};
use narrows_plan::program::BufferRole;
use narrows_plan::strategy::{Strategy, op_parameters};
use narrows_plan::{Context, Mesh, Plan, Precision, Workload, Zero, lower};
use narrows_runtime::logical_parameters;

use super::cases::GoldenCase;

/// Plans from `narrows plan`: grouped factors, two stages, two replicas.
const PLANS: [&str; 3] = [
    narrows_test_support::plan_files::BTP,
    narrows_test_support::plan_files::STAGES,
    narrows_test_support::plan_files::REPLICAS,
];

#[test]
fn weights_of_programs_are_logical_parameters() {
    for text in PLANS {
        let plan = Plan::read(text).expect("a plan");
        let model = presets::find(&plan.model.name).expect("a preset");
        let program = lower(&plan.resolve(&model).expect("it resolves"));
        let buffers = program.stages.iter().flat_map(|stage| &stage.buffers);
        let weights = buffers.filter(|buffer| buffer.role == BufferRole::Weight);
        let members = weights.flat_map(|buffer| {
            let shard = buffer.shard.as_ref().expect("a weight has a shard");
            shard.members.iter().map(|member| (shard.block, *member))
        });
        check(&model, members);
    }
}

#[test]
fn parameters_of_op_graphs_are_logical_parameters() {
    let context = Context::new(
        Mesh { tensor: 1, pipeline: 1, data: 1, context: 1 },
        Workload { global_batch: 1, sequence_length: 4, micro_batch: 1 },
        Precision::Fp32,
        Zero::Off,
    );
    for case in GoldenCase::all() {
        for grouping in Grouping::ALL {
            let blocks = BlockShape::all(&case.model);
            let blocks = blocks.iter().map(|shape| block_segment(&case.model, shape, grouping));
            let mut segments: Vec<(Option<u64>, Segment)> =
                blocks.enumerate().map(|(index, segment)| (Some(index as u64), segment)).collect();
            segments.push((None, embedding_segment(&case.model)));
            segments.push((None, head_segment(&case.model)));
            let members = segments.iter().flat_map(|(block, segment)| {
                let parameters = segment
                    .ops
                    .iter()
                    .filter_map(|op| op_parameters(op, Strategy::Replicate, &context));
                parameters
                    .flat_map(|parameter| parameter.members)
                    .map(move |member| (*block, member))
            });
            check(&case.model, members);
        }
    }
}

/// Asserts that the members are the logical parameters of the model, with their shapes.
fn check(model: &Model, members: impl Iterator<Item = (Option<u64>, WeightShape)>) {
    let shapes: BTreeMap<ParameterId, (u64, u64)> = logical_parameters(model)
        .into_iter()
        .map(|parameter| (parameter.id, (parameter.rows, parameter.columns)))
        .collect();
    let mut ids = BTreeSet::new();
    for (block, WeightShape { weight, rows, columns }) in members {
        let (weight, shape) = match weight {
            WeightId::Head if model.tied => (WeightId::Embedding, (columns, rows)),
            _ => (weight, (rows, columns)),
        };
        let id = ParameterId { block, weight };
        let expected = shapes.get(&id).copied().map(|(rows, columns)| {
            // In programs, the two matrices of a tensor gate have one row each.
            let flat = matches!(weight, WeightId::CrossingGateU(_) | WeightId::CrossingGateV(_));
            if flat { (1, rows * columns) } else { (rows, columns) }
        });
        assert_eq!(expected, Some(shape), "{}: {id}", model.name);
        ids.insert(id);
    }
    assert_eq!(ids, shapes.into_keys().collect(), "{}", model.name);
}
