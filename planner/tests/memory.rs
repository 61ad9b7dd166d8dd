//! Where memory binds: nothing is called impossible or proved that a restricted search refutes.

use narrows_cost_model::profile;
use narrows_plan::Bytes;
use narrows_plan::model::{self, Model, presets};
use narrows_plan::strategy::{Recompute, Rules, WeightRule};
use narrows_planner::{MemoryLimit, Request, SearchStatus, search};

fn request(model: Model, micro_batch: u64, global_batch: u64, length: u64) -> Request {
    Request {
        tensor: Some(2),
        micro_batch: Some(micro_batch),
        ..Request::new(model, profile::preset("cpu-local").unwrap(), 2, global_batch, length)
    }
}

fn restrictions() -> [Rules; 4] {
    [
        Rules { recompute: Recompute::Block, ..Rules::ALL },
        Rules { recompute: Recompute::None, ..Rules::ALL },
        Rules { recompute: Recompute::Latents, ..Rules::ALL },
        Rules { weights: WeightRule::Sharded, ..Rules::ALL },
    ]
}

#[test]
fn no_restricted_search_refutes_a_bound() {
    let wide = r#"{"format": "narrows-model/1", "hidden": 256, "vocab": 4096, "heads": 4,
        "d_ff": 64, "blocks": {"count": 1, "default": {"product": "swiglu", "all": "dense"}}}"#;
    let cases = [
        request(presets::find("cola-tiny").unwrap(), 4, 4, 128),
        // Its ends are most of it.
        request(model::read("wide.json", wide).unwrap(), 1, 64, 64),
    ];
    let mut bound = 0;
    for case in cases {
        let free = search(&Request { memory_limit: MemoryLimit::None, ..case.clone() });
        let peak = free.best.expect("without a limit there is a plan").peak_arena();
        for percent in [95, 85, 75, 65] {
            let limit = MemoryLimit::Bytes(Bytes(peak.0 * percent / 100));
            let limited = Request { memory_limit: limit, ..case.clone() };
            let found = search(&limited);
            for rules in restrictions() {
                let Some(restricted) = search(&Request { rules, ..limited.clone() }).best else {
                    continue;
                };
                bound += 1;
                let least = found.report.bound.0 * (1.0 - 1e-9);
                assert!(restricted.time.0 >= least, "{percent} %: {rules:?} beats the bound");
                if found.report.status == SearchStatus::Optimal {
                    let time = found.best.as_ref().map_or(0.0, |best| best.time.0);
                    assert!(restricted.time.0 >= time * (1.0 - 1e-9), "{percent} %: {rules:?}");
                }
            }
        }
    }
    assert!(bound >= 8, "{bound} restricted plans");
}

/// The ends need not be the fastest ones.
/// The arena of a block that redoes a lot is larger than its bytes tell, and the plan with the fewest
/// bytes is not the smallest one.
#[test]
fn a_plan_of_narrower_rules_is_found_where_nothing_else_fits() {
    let limit = MemoryLimit::Bytes(Bytes(14_383_104));
    let model = presets::find("cola-tiny").unwrap();
    let limited = Request { memory_limit: limit, ..request(model, 2, 4, 128) };
    let rules = Rules { recompute: Recompute::Latents, ..Rules::ALL };
    let restricted = search(&Request { rules, ..limited.clone() });
    assert!(restricted.best.is_some(), "the case is no case any more");
    let best = search(&limited).best.expect("what exists under narrower rules exists");
    assert!(best.peak_arena() <= Bytes(14_383_104));
}

#[test]
fn ends_give_way_to_memory() {
    let text = r#"{"format": "narrows-model/1", "hidden": 256, "vocab": 4096, "heads": 4,
        "d_ff": 64, "blocks": {"count": 1, "default": {"product": "swiglu", "all": "dense"}}}"#;
    let case = request(model::read("wide.json", text).unwrap(), 1, 64, 64);
    let limited = Request { memory_limit: MemoryLimit::Bytes(Bytes(30 << 20)), ..case };
    let found = search(&limited).best.expect("sharded ends fit");
    assert!(found.peak_arena() <= Bytes(30 << 20));
}

/// What a partition was divided by is what its program takes, with several stages and where memory
/// makes blocks redo parts of their forward pass.
#[test]
fn divided_times_are_simulated_times() {
    let model = presets::find("cola-60m").unwrap();
    let profile = profile::preset("a100-80gb").unwrap();
    let mut redone = 0;
    for (tensor, pipeline, percent) in
        [(2, 2, 100), (1, 4, 100), (2, 2, 70), (1, 1, 60), (2, 1, 70)]
    {
        let free = Request {
            tensor: Some(tensor),
            pipeline: Some(pipeline),
            memory_limit: MemoryLimit::None,
            ..Request::new(model.clone(), profile.clone(), tensor * pipeline, 16, 1024)
        };
        let peak = search(&free).best.expect("a plan").peak_arena();
        let limit = MemoryLimit::Bytes(Bytes(peak.0 * percent / 100));
        let Some(found) = search(&Request { memory_limit: limit, ..free }).best else { continue };
        let (played, simulated) = (found.partition_time.0, found.time.0);
        let off = ((played - simulated) / simulated).abs();
        assert!(off < 1e-9, "{tensor} × {pipeline} at {percent} %: {played} is not {simulated}");
        let blocks = found.decisions.stages.iter().flatten();
        redone += blocks.filter(|block| block.choice.ops.iter().any(|op| op.recompute)).count();
    }
    assert!(redone > 0, "nothing was redone");
}
