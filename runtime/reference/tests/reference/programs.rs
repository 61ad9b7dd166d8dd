//! The parameters of programs are the logical parameters of their models, whatever the grouping.

use std::collections::{BTreeMap, BTreeSet};

use narrows_plan::emit::op_parameters;
use narrows_plan::graph::{
    BlockShape, Grouping, Segment, block_segment, embedding_segment, head_segment,
};
use narrows_plan::lower::lower;
use narrows_plan::model::{Model, presets};
use narrows_plan::program::Region;
use narrows_plan::strategy::{Context, Strategy, Zero};
use narrows_plan::{Mesh, Plan, Precision, Workload};
use narrows_runtime::{logical_name, logical_parameters};

use super::cases::Case;

/// Plans that `narrows plan` wrote: grouped factors, two stages, two replicas.
const PLANS: [&str; 3] = [
    narrows_test_support::saved::BTP,
    narrows_test_support::saved::STAGES,
    narrows_test_support::saved::REPLICAS,
];

#[test]
fn weights_of_programs_are_logical_parameters() {
    for text in PLANS {
        let plan = Plan::read(text).expect("a plan");
        let model = presets::find(&plan.model.name).expect("a preset");
        let program = lower(&plan.resolve(&model).expect("it resolves"));
        let buffers = program.stages.iter().flat_map(|stage| &stage.buffers);
        let weights = buffers.filter(|buffer| buffer.region == Region::Weight);
        let members = weights.flat_map(|buffer| {
            let shard = buffer.shard.as_ref().expect("a weight has a shard");
            shard.members.iter().map(|(member, rows, columns)| {
                (logical_name(&buffer.name, member), (*rows, *columns))
            })
        });
        check(&model, members);
    }
}

#[test]
fn parameters_of_op_graphs_are_logical_parameters() {
    let context = Context {
        mesh: Mesh { tensor: 1, pipeline: 1, data: 1 },
        workload: Workload { global_batch: 1, sequence_length: 4, micro_batch: 1 },
        precision: Precision::Full32,
        zero: Zero::Off,
    };
    for case in Case::all() {
        for grouping in Grouping::ALL {
            let blocks = BlockShape::all(&case.model);
            let blocks = blocks.iter().map(|shape| block_segment(&case.model, shape, grouping));
            let mut places: Vec<(String, Segment)> = blocks
                .enumerate()
                .map(|(index, segment)| (format!("layer {index}"), segment))
                .collect();
            places.push(("embedding".into(), embedding_segment(&case.model)));
            places.push(("head".into(), head_segment(&case.model)));
            let members = places.iter().flat_map(|(place, segment)| {
                let parameters = segment
                    .ops
                    .iter()
                    .filter_map(|op| op_parameters(op, Strategy::Replicate, &context));
                parameters.flat_map(|parameter| parameter.members).map(
                    move |(member, rows, columns)| {
                        (logical_name(&format!("{place} weight"), &member), (rows, columns))
                    },
                )
            });
            check(&case.model, members);
        }
    }
}

/// Every member is a logical parameter of its shape, and every logical parameter is a member.
fn check(model: &Model, members: impl Iterator<Item = (String, (u64, u64))>) {
    let shapes: BTreeMap<String, (u64, u64)> = logical_parameters(model)
        .into_iter()
        .map(|parameter| (parameter.name, (parameter.rows, parameter.columns)))
        .collect();
    let mut found = BTreeSet::new();
    for (name, (rows, columns)) in members {
        let (name, shape) = match name.as_str() {
            "head" if model.tied => ("embedding".to_owned(), (columns, rows)),
            _ => (name, (rows, columns)),
        };
        let expected = shapes.get(&name).copied().map(|(rows, columns)| {
            // Programs see the two matrices of a tensor gate as one row each.
            let flat = name.ends_with(".gate.u") || name.ends_with(".gate.v");
            if flat { (1, rows * columns) } else { (rows, columns) }
        });
        assert_eq!(expected, Some(shape), "{}: {name}", model.name);
        found.insert(name);
    }
    assert_eq!(found, shapes.into_keys().collect(), "{}", model.name);
}
