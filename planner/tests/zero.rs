//! ZeRO-2 and ZeRO-3: prices equal the simulation, bounds hold, and memory falls from stage to stage.

use narrows_cost_model::profile;
use narrows_plan::model::presets;
use narrows_plan::{Bytes, Zero};
use narrows_planner::{MemoryLimit, Request, search};

fn request(model: &str, devices: u64) -> Request {
    let model = presets::find(model).expect("a preset");
    let profile = profile::preset("a100-80gb").expect("a preset");
    Request::new(model, profile, devices, 4 * devices, 1024)
}

/// On one device of the tensor axis, all choices of a block have the same collectives.
#[test]
fn without_overlap_prices_are_those_of_the_simulation() {
    for (model, zero, shard_size, micro_batch) in [
        ("cola-60m", Zero::Two, 8, 4),
        ("cola-60m", Zero::Three, 4, 2),
        ("lax-130m", Zero::Three, 8, 4),
        ("llama-350m", Zero::Three, 2, 1),
    ] {
        let request = Request {
            data: Some(8),
            zero: Some(zero),
            shard_size: Some(shard_size),
            micro_batch: Some(micro_batch),
            overlap_grad_reduce: Some(false),
            ..request(model, 8)
        };
        let searched = search(&request);
        let best = searched.best.unwrap_or_else(|| panic!("{model}"));
        let (objective, time) = (best.objective.0, best.time.0);
        assert!((objective / time - 1.0).abs() < 1e-9, "{model}: {objective} is not {time}");
        assert!(searched.report.gap < 1e-9, "{model}: {}", searched.report.gap);
    }
}

/// Single contexts, in which the bound of the search is that of the context.
#[test]
fn no_plan_is_faster_than_the_bound_of_its_context() {
    let mut slow_links = profile::preset("a100-80gb").expect("a preset").file().clone();
    slow_links.links.inter_node.bandwidth_bytes_per_s /= 20.0;
    let mut waiting = 0;
    for (model, [tensor, pipeline, data], zero, shard_size, micro_batch) in [
        ("cola-60m", [1, 1, 8], Zero::Two, 8, 2),
        ("cola-1b", [1, 1, 8], Zero::Three, 4, 4),
        ("cola-1b", [1, 1, 8], Zero::Three, 8, 1),
        ("lax-130m", [2, 1, 4], Zero::Three, 4, 2),
        ("svd-350m", [1, 2, 4], Zero::Three, 2, 1),
        ("llama-1b", [2, 2, 2], Zero::Two, 2, 2),
    ] {
        for profile in [
            profile::preset("a100-80gb").expect("a preset").clone(),
            slow_links.clone().resolve().expect("a profile"),
        ] {
            let request = Request {
                tensor: Some(tensor),
                pipeline: Some(pipeline),
                data: Some(data),
                zero: Some(zero),
                shard_size: Some(shard_size),
                micro_batch: Some(micro_batch),
                overlap_grad_reduce: Some(true),
                profile,
                ..request(model, 8)
            };
            let searched = search(&request);
            let best = searched.best.unwrap_or_else(|| panic!("{model}"));
            let (bound, time) = (searched.report.bound.0, best.time.0);
            assert!(bound <= time * (1.0 + 1e-9), "{model}: {bound} is more than {time}");
            let is_close = tensor * pipeline > 1 || bound > 0.9 * time;
            assert!(is_close, "{model}: {bound} is far below {time}");
            let without = Request { overlap_grad_reduce: Some(false), ..request };
            let without = search(&without).best.unwrap_or_else(|| panic!("{model}"));
            // Over the tensor axis, estimates of what passes hide are too good to find the fastest plan.
            assert!(tensor > 1 || time <= without.time.0 * (1.0 + 1e-9), "{model}");
            let collectives: usize =
                best.program.program().instructions().map(|i| i.overlapped_instrs).sum();
            waiting += collectives;
        }
    }
    assert!(waiting > 0);
}

/// Each stage shards more than the one before, and two shard groups of four have two copies.
#[test]
fn every_stage_needs_less_memory() {
    let peak = |zero, shard_size| {
        let request = Request {
            data: Some(8),
            zero: Some(zero),
            shard_size,
            micro_batch: Some(1),
            ..request("cola-1b", 8)
        };
        let best = search(&request).best.expect("a plan");
        best.program.program().stages[0].arena
    };
    let of_stage = |zero| peak(zero, Some(8));
    let peaks = [peak(Zero::Off, None), of_stage(Zero::One), of_stage(Zero::Two)];
    let least = of_stage(Zero::Three);
    assert!(peaks.is_sorted_by(|larger, smaller| larger > smaller), "{peaks:?}");
    assert!(peaks.iter().all(|peak| *peak > least) && peak(Zero::Three, Some(4)) > least);
}

/// With overlap, the sharded parameters of two blocks are in memory at once.
#[test]
fn plans_without_overlap_are_found_where_overlap_does_not_fit() {
    let request = Request {
        tensor: Some(1),
        pipeline: Some(1),
        micro_batch: Some(1),
        memory_limit: MemoryLimit::Bytes(Bytes(1_850_000_000)),
        ..request("cola-1b", 8)
    };
    let best = search(&request).best.expect("a plan fits");
    assert!(!best.decisions.context.overlap_grad_reduce);
    assert!(search(&Request { overlap_grad_reduce: Some(true), ..request }).best.is_none());
}
