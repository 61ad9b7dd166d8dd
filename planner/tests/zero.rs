//! ZeRO-2 and ZeRO-3: prices equal the simulation, bounds hold, and memory falls from stage to stage.

use std::collections::BTreeSet;

use narrows_cost_model::{Prices, profile};
use narrows_plan::model;
use narrows_plan::model::presets;
use narrows_plan::program::{BufferId, BufferRole, Instr};
use narrows_plan::strategy::{Rules, WeightRule};
use narrows_plan::{BucketSplit, Bytes, GradReduceDtype, Plan, Zero};
use narrows_planner::{MemoryLimit, Request, predict, search};

fn request(model: &str, devices: u64) -> Request {
    let model = presets::find(model).expect("a preset");
    let profile = profile::preset("a100-80gb").expect("a preset");
    Request::new(model, profile, devices, 4 * devices, 1024)
}

/// On one device of the tensor axis, all choices of a block have the same collectives.
#[test]
fn without_overlap_prices_are_those_of_the_simulation() {
    for (model, zero, shard_size, micro_batch, grad_reduce_dtype) in [
        ("cola-60m", Zero::Two, 8, 4, GradReduceDtype::Fp32),
        ("cola-60m", Zero::Three, 4, 2, GradReduceDtype::Fp32),
        ("lax-130m", Zero::Three, 8, 4, GradReduceDtype::Fp32),
        ("llama-350m", Zero::Three, 2, 1, GradReduceDtype::Fp32),
        ("cola-60m", Zero::Two, 8, 4, GradReduceDtype::Bf16),
        ("lax-130m", Zero::Three, 4, 2, GradReduceDtype::Bf16),
    ] {
        let request = Request {
            grad_reduce_dtype,
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
    let (fp32, bf16) = (GradReduceDtype::Fp32, GradReduceDtype::Bf16);
    for (model, [tensor, pipeline, data], zero, shard_size, micro_batch, grad_reduce_dtype) in [
        ("cola-60m", [1, 1, 8], Zero::One, 8, 2, fp32),
        ("cola-1b", [1, 1, 8], Zero::One, 4, 4, fp32),
        ("svd-350m", [1, 2, 4], Zero::One, 4, 1, bf16),
        ("cola-60m", [1, 1, 8], Zero::Two, 8, 2, fp32),
        ("cola-1b", [1, 1, 8], Zero::Three, 4, 4, fp32),
        ("cola-1b", [1, 1, 8], Zero::Three, 8, 1, fp32),
        ("lax-130m", [2, 1, 4], Zero::Three, 4, 2, fp32),
        ("svd-350m", [1, 2, 4], Zero::Three, 2, 1, fp32),
        ("llama-1b", [2, 2, 2], Zero::Two, 2, 2, fp32),
        ("cola-1b", [1, 1, 8], Zero::Three, 4, 4, bf16),
        ("cola-60m", [1, 1, 8], Zero::Two, 8, 4, bf16),
        ("svd-350m", [2, 2, 2], Zero::Two, 2, 2, bf16),
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
                grad_reduce_dtype,
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
            assert!(time <= without.time.0 * (1.0 + 1e-9), "{model}");
            let collectives: usize =
                best.program.program().instructions().map(|i| i.overlapped_instrs).sum();
            waiting += collectives;
        }
    }
    assert!(waiting > 0);
}

/// Gathers beside the next forward pass are hidden but for the first, which only the embedding can hide, and their slowdown.
#[test]
fn gathers_beside_the_next_forward_pass_shorten_steps() {
    for zero in [Zero::One, Zero::Two] {
        let request = Request {
            tensor: Some(1),
            data: Some(8),
            zero: Some(zero),
            shard_size: Some(8),
            overlap_grad_reduce: Some(true),
            ..request("cola-1b", 8)
        };
        let best = search(&request).best.expect("a plan");
        assert!(best.plan.overlap_param_gather);
        let stage = &best.program.program().stages[0];
        let buckets = stage.gather_buckets.len() as f64;
        let in_order = Plan { overlap_param_gather: false, ..best.plan.clone() };
        let predict = |plan| predict(&request.model, &request.profile, request.executor, plan);
        let (exposed, checked) = predict(&in_order).expect("a prediction");
        assert!(checked.program().stages[0].gather_buckets.is_empty());
        let prices = Prices::new(&request.profile, request.executor, &best.plan.mesh);
        let gathers = stage.step[stage.before_gathers()..].iter();
        let gathered: f64 = gathers.map(|instr| prices.kernel_time(&instr.kernel()).0).sum();
        let saved = exposed.step_time_s - best.time.0;
        let hidden_cost = prices.overlap_slowdown().expect("overlap").hidden_cost();
        let hidden = gathered * (1.0 - hidden_cost);
        assert!(saved < hidden && saved > hidden * (1.0 - 4.0 / buckets), "{saved} of {gathered}");
    }
}

/// The buckets of the first block are split where they take long, by linear or at attention, and what is chosen is the fastest.
#[test]
fn buckets_of_the_first_block_are_split_where_that_is_faster() {
    let mut chosen = [vec![], vec![]];
    // The last one's reductions take almost as long as its backward pass.
    for (model, devices, zero, gap_max) in [
        ("cola-60m", 2, Zero::Two, 1e-9),
        ("cola-60m", 8, Zero::One, 1e-9),
        ("cola-1b", 16, Zero::One, 1e-9),
        ("llama-1b", 16, Zero::Off, 0.02),
    ] {
        let (tensor, pipeline) = (Some(1), Some(1));
        let request = Request { tensor, pipeline, zero: Some(zero), ..request(model, devices) };
        let searched = search(&request);
        let best = searched.best.expect("a plan");
        assert!(searched.report.gap < gap_max, "{model}: {}", searched.report.gap);
        assert!((best.partition_time.0 / best.time.0 - 1.0).abs() < 1e-9, "{model}");
        let with_buckets = |last_gradient_bucket, first_gather_bucket| {
            let plan = Plan { last_gradient_bucket, first_gather_bucket, ..best.plan.clone() };
            let predicted = predict(&request.model, &request.profile, request.executor, &plan);
            let (prediction, program) = predicted.expect("a prediction");
            let stage = &program.program().stages[0];
            let buckets = [stage.gradient_buckets.len(), stage.gather_buckets.len()];
            (prediction.step_time_s, buckets)
        };
        let all = BucketSplit::ALL
            .map(|gradients| BucketSplit::ALL.map(|weights| with_buckets(gradients, weights)));
        let times = all.as_flattened().iter().map(|(time, _)| *time);
        let fastest = times.fold(f64::INFINITY, f64::min);
        assert!((best.time.0 / fastest - 1.0).abs() < 1e-9, "{model}: {all:?}");
        // Whole gradients of the first block are reduced in the step phase.
        let buckets = [all.map(|row| row[0].1[0]), all[0].map(|(_, buckets)| buckets[1])];
        for buckets in buckets.into_iter().filter(|buckets| buckets[2] > 0 && zero == Zero::One) {
            assert!(
                buckets[1] == buckets[0] + 1 && buckets[2] > buckets[1],
                "{model}: {buckets:?}"
            );
        }
        chosen[0].push(best.plan.last_gradient_bucket);
        chosen[1].push(best.plan.first_gather_bucket);
    }
    for chosen in chosen {
        let all = BucketSplit::ALL.iter().all(|split| chosen.contains(split));
        assert!(all || chosen.contains(&BucketSplit::AtAttention), "{chosen:?}");
    }
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

/// Reductions of bf16 gradients take less time where they are exposed. During the last pass, buckets are rounded one after
/// the other, in the bytes of the largest.
#[test]
fn rounded_gradients_shorten_reductions() {
    for (zero, overlap) in [(Zero::Off, false), (Zero::One, true), (Zero::Three, true)] {
        let plan = |grad_reduce_dtype| {
            let request = Request {
                data: Some(8),
                zero: Some(zero),
                shard_size: (zero != Zero::Off).then_some(8),
                micro_batch: Some(1),
                overlap_grad_reduce: Some(overlap),
                global_batch: 8,
                grad_reduce_dtype,
                ..request("cola-1b", 8)
            };
            search(&request).best.expect("a plan")
        };
        let [fp32, bf16] = [GradReduceDtype::Fp32, GradReduceDtype::Bf16].map(plan);
        assert!(bf16.time < fp32.time, "{zero:?}: {} and {}", bf16.time, fp32.time);
        let stage = &bf16.program.program().stages[0];
        let rounded_bytes = |instructions: &[Instr]| -> u64 {
            let written: BTreeSet<BufferId> =
                instructions.iter().flat_map(|i| &i.writes).map(|access| access.buffer).collect();
            let rounded = written.into_iter().map(|id| stage.buffer(id));
            let rounded = rounded.filter(|buffer| buffer.role == BufferRole::RoundedGradient);
            rounded.map(|buffer| buffer.copy_stride()).sum()
        };
        let buckets = stage.gradient_buckets.iter();
        let buckets = buckets.map(|bucket| rounded_bytes(&stage.step[bucket.reductions.clone()]));
        // Embedding, head and the first block are reduced after the last pass, in bytes that passes no longer use.
        let largest = buckets.max().unwrap_or(0);
        let arena = fp32.program.program().stages[0].arena.0;
        assert!(stage.arena.0 <= arena + largest, "{zero:?}: {} and {arena}", stage.arena.0);
    }
}

/// Embeddings of a tied weight differ in their passes. What hides a block's gather belongs to the time that a bound counts.
#[test]
fn gathers_behind_the_embedding_of_a_tied_weight_are_not_overstated() {
    let text = include_str!("../../models/mixed-ranks.json");
    let model = model::read("mixed-ranks.json", text).unwrap();
    for (hardware, micro_batch, length) in
        [("a100-80gb-8-4nic", 1, 96), ("a100-80gb-8", 2, 96), ("h100-sxm", 1, 256)]
    {
        let request = Request {
            tensor: Some(2),
            pipeline: Some(1),
            micro_batch: Some(micro_batch),
            rules: Rules { weights: WeightRule::Sharded, ..Rules::ALL },
            ..Request::new(
                model.clone(),
                profile::preset(hardware).unwrap(),
                8,
                4 * micro_batch,
                length,
            )
        };
        // A plan that beats the bound is a panic.
        let result = search(&request);
        assert!(result.report.gap < 0.01, "{hardware}: {}", result.report.gap);
    }
}
