//! The parameters of lowered programs are the logical parameters of their models.

use std::collections::{BTreeMap, BTreeSet};

use narrows_plan::Plan;
use narrows_plan::lower::lower;
use narrows_plan::model::presets;
use narrows_plan::program::Region;
use narrows_runtime::parameters::{logical_name, logical_parameters};

/// Plans that `narrows plan` wrote: grouped factors, two stages, two replicas.
const PLANS: [&str; 3] = [
    include_str!("../data/btp.json"),
    include_str!("../data/stages.json"),
    include_str!("../data/replicas.json"),
];

#[test]
fn every_weight_is_a_logical_parameter() {
    for text in PLANS {
        let plan = Plan::read(text).expect("a plan");
        let model = presets::find(&plan.model.name).expect("a preset");
        let program = lower(&plan.resolve(&model).expect("it resolves"));
        let shapes: BTreeMap<String, (u64, u64)> = logical_parameters(&model)
            .into_iter()
            .map(|parameter| (parameter.name, (parameter.rows, parameter.columns)))
            .collect();
        let mut found = BTreeSet::new();
        let buffers = program.stages.iter().flat_map(|stage| &stage.buffers);
        for buffer in buffers.filter(|buffer| buffer.region == Region::Weight) {
            let shard = buffer.shard.as_ref().expect("a weight has a shard");
            for (member, rows, columns) in &shard.members {
                let name = logical_name(&buffer.name, member);
                let (name, shape) = match name.as_str() {
                    "head" if model.tied => ("embedding".to_owned(), (*columns, *rows)),
                    _ => (name, (*rows, *columns)),
                };
                assert_eq!(shapes.get(&name), Some(&shape), "{}: {name}", buffer.name);
                found.insert(name);
            }
        }
        assert_eq!(found, shapes.into_keys().collect(), "{}", model.name);
    }
}
