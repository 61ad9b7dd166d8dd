//! Searches where memory binds: no restricted search refutes a bound, an optimum or infeasibility.

use narrows_cost_model::profile;
use narrows_plan::model::{self, Model, presets};
use narrows_plan::strategy::{Recompute, Rules, WeightRule};
use narrows_plan::{Bytes, PipelineSchedule};
use narrows_planner::{AssignmentMethod, MemoryLimit, Request, search};

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
        // Embedding and head are most of the model.
        request(model::read("wide.json", wide).unwrap(), 1, 64, 64),
    ];
    let mut checked = 0;
    for case in cases {
        let free = search(&Request { memory_limit: MemoryLimit::None, ..case.clone() });
        let peak = free.best.expect("without a limit there is a plan").peak_arena();
        for percent in [95, 85, 75, 65] {
            let limit = MemoryLimit::Bytes(Bytes(peak.0 * percent / 100));
            let limited = Request { memory_limit: limit, ..case.clone() };
            let result = search(&limited);
            for rules in restrictions() {
                let Some(restricted) = search(&Request { rules, ..limited.clone() }).best else {
                    continue;
                };
                checked += 1;
                let bound = result.report.bound.0 * (1.0 - 1e-9);
                assert!(restricted.time.0 >= bound, "{percent} %: {rules:?} beats the bound");
                if result.report.is_proven_best() {
                    let time = result.best.as_ref().map_or(0.0, |best| best.time.0);
                    assert!(restricted.time.0 >= time * (1.0 - 1e-9), "{percent} %: {rules:?}");
                }
            }
        }
    }
    assert!(checked >= 8, "{checked} restricted plans");
}

/// The arena of a block with much recomputation exceeds its bytes, so the plan with the fewest bytes does not have
/// the smallest arena.
#[test]
fn a_plan_that_fits_only_under_restricted_rules_is_found() {
    let limit = MemoryLimit::Bytes(Bytes(14_383_104));
    let model = presets::find("cola-tiny").unwrap();
    let limited = Request { memory_limit: limit, ..request(model, 2, 4, 128) };
    let rules = Rules { recompute: Recompute::Latents, ..Rules::ALL };
    let restricted = search(&Request { rules, ..limited.clone() });
    assert!(restricted.best.is_some(), "the restricted search finds a plan");
    let best =
        search(&limited).best.expect("a plan of the restricted search is a plan of the free one");
    assert!(best.peak_arena() <= Bytes(14_383_104));
}

#[test]
fn slower_embedding_and_head_are_chosen_when_memory_requires_them() {
    let text = r#"{"format": "narrows-model/1", "hidden": 256, "vocab": 4096, "heads": 4,
        "d_ff": 64, "blocks": {"count": 1, "default": {"product": "swiglu", "all": "dense"}}}"#;
    let case = request(model::read("wide.json", text).unwrap(), 1, 64, 64);
    let limited = Request { memory_limit: MemoryLimit::Bytes(Bytes(30 << 20)), ..case };
    let best = search(&limited).best.expect("sharded embedding and head fit");
    assert!(best.peak_arena() <= Bytes(30 << 20));
}

/// The stage times of a partition equal the stage times of its program, with several stages and where memory
/// makes blocks recompute parts of their forward pass.
#[test]
fn partition_times_are_simulated_times() {
    let model = presets::find("cola-60m").unwrap();
    let profile = profile::preset("a100-80gb").unwrap();
    let mut recomputed = 0;
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
        let Some(best) = search(&Request { memory_limit: limit, ..free }).best else { continue };
        let (partitioned, simulated) = (best.partition_time.0, best.time.0);
        let off = ((partitioned - simulated) / simulated).abs();
        assert!(
            off < 1e-9,
            "{tensor} × {pipeline} at {percent} %: {partitioned} is not {simulated}"
        );
        let blocks = best.decisions.stages.iter().flatten();
        recomputed += blocks.filter(|block| block.choice.ops.iter().any(|op| op.recompute)).count();
    }
    assert!(recomputed > 0, "no block recomputes");
}

/// With less memory, later methods assign the blocks: elimination while every block has its fastest solution, then
/// hull vertices, and the integer program where these leave bytes unused.
#[test]
fn the_integer_program_assigns_blocks_where_memory_binds() {
    let free = Request {
        tensor: Some(1),
        memory_limit: MemoryLimit::None,
        ..Request::new(
            presets::find("cola-60m").unwrap(),
            profile::preset("a100-80gb").unwrap(),
            1,
            8,
            1024,
        )
    };
    let peak = search(&free).best.expect("a plan").peak_arena();
    let mut methods = vec![];
    for percent in [100, 94, 88, 82, 76, 70, 64, 58, 52, 46, 40] {
        let limit = Bytes(peak.0 * percent / 100);
        let limited = Request { memory_limit: MemoryLimit::Bytes(limit), ..free.clone() };
        let Some(best) = search(&limited).best else { continue };
        assert!(best.peak_arena() <= limit, "{percent} %");
        methods.push(best.method);
    }
    assert_eq!(methods.first(), Some(&AssignmentMethod::Elimination), "{methods:?}");
    assert!(methods.contains(&AssignmentMethod::IntegerProgram), "{methods:?}");
}

/// The first limit is below the memory of the fastest plan by little: reserves that grow by the excess of the arena alone
/// do not lead to a plan that fits.
#[test]
fn a_plan_of_less_memory_does_not_beat_one_of_more() {
    let text = r#"{"format": "narrows-model/1", "hidden": 256, "vocab": 16384, "heads": 8,
        "d_ff": 640, "blocks": {"count": 11, "default": {"product": "plain",
        "all": {"rank": 64, "activation": "silu"}}}}"#;
    let model = model::read("narrow.json", text).unwrap();
    let profile = profile::preset("a100-80gb").unwrap();
    let free = Request::new(model, profile, 1, 8, 1024);
    let fastest = search(&free).best.expect("a plan");
    let mut more = fastest.time.0;
    for percent in [99, 96, 93, 90] {
        let limit = Bytes(fastest.peak_arena().0 * percent / 100);
        let limited = Request { memory_limit: MemoryLimit::Bytes(limit), ..free.clone() };
        let less = search(&limited).best.expect("a plan fits").time.0;
        assert!(less >= more * (1.0 - 1e-9), "{percent} %: {less} s, with more memory {more} s");
        more = less;
    }
    assert!(more <= fastest.time.0 * 1.05, "{more} s, without a limit {}", fastest.time);
}

/// Limits at which more memory led to slower interleaved plans: reserves for one stage kept others from fitting, and blocks
/// counted the average of the microbatches in flight of their stage's chunks.
#[test]
fn more_memory_leads_to_no_slower_interleaved_plan() {
    let text = r#"{"format": "narrows-model/1", "hidden": 256, "vocab": 4096, "heads": 8, "d_ff": 768, "tied": true,
        "blocks": {"count": 8, "default": {"product": "plain", "all": {"rank": 64, "activation": "silu"}}}}"#;
    let model = model::read("drawn.json", text).unwrap();
    let profile = profile::preset("a100-80gb").unwrap();
    let request = Request {
        tensor: Some(1),
        pipeline: Some(4),
        micro_batch: Some(1),
        schedule: Some(PipelineSchedule::Interleaved),
        ..Request::new(model, profile, 8, 24, 256)
    };
    let mut times = vec![];
    for limit in [28_965_542, 32_899_134, 36_832_726, 40_766_318] {
        let request = Request { memory_limit: MemoryLimit::Bytes(Bytes(limit)), ..request.clone() };
        times.push(search(&request).best.expect("a plan").time.0);
    }
    assert!(times.is_sorted_by(|fewer, more| more <= fewer), "{times:?}");
}
