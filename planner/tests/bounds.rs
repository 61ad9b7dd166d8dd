//! No plan is faster than the bound of a request that allows it. In debug builds, a search also compares its plan with the bound of
//! the plan's own context.

use narrows_cost_model::profile;
use narrows_plan::model::{self, Model, presets};
use narrows_plan::strategy::{NormRule, Rules, WeightRule};
use narrows_plan::{PipelineSchedule, Zero};
use narrows_planner::{MemoryLimit, Request, search};

fn request(model: Model, hardware: &str, [devices, batch, length]: [u64; 3]) -> Request {
    Request::new(model, profile::preset(hardware).unwrap(), devices, batch, length)
}

fn preset(name: &str) -> Model {
    presets::find(name).expect("a preset")
}

/// The one bound of the request, and the plans of all narrower ones.
fn assert_bounded(request: &Request, narrower: impl IntoIterator<Item = Request>) {
    let bound = search(request).report.bound.0;
    for other in narrower {
        let Some(best) = search(&other).best else { continue };
        let step = best.time.0;
        assert!(bound <= step * (1.0 + 1e-9), "{bound} above {step} of {:?}", best.plan.context());
    }
}

/// Replicas reduce gradients of embedding and head once a step, and add up nothing of theirs in passes.
#[test]
fn additions_of_sharded_gradients_are_those_of_blocks() {
    for (model, hardware, sizes, micro_batch) in [
        ("llama-130m", "h100-sxm", [16, 64, 256], 1),
        ("llama-60m", "a100-40gb", [16, 128, 256], 2),
        ("cola-1b", "h200-sxm", [32, 128, 256], 2),
    ] {
        let any = Request {
            tensor: Some(1),
            pipeline: Some(1),
            zero: Some(Zero::Two),
            micro_batch: Some(micro_batch),
            ..request(preset(model), hardware, sizes)
        };
        let of_size = |shard_size| Request { shard_size: Some(shard_size), ..any.clone() };
        assert_bounded(&any, [8, 16].map(of_size));
        // Groups of less than a node are not searched unless they are asked for.
        let four = of_size(4);
        assert_bounded(&four, [four.clone()]);
    }
}

/// The only block of a model is the first of its stage, so that parts of its buckets overlap with its own passes.
#[test]
fn a_single_block_hides_its_own_collectives() {
    for (hidden, linears) in [
        (1024, r#""dense""#),
        (4096, r#""dense""#),
        (2048, r#"{"rank": 256, "activation": "silu"}"#),
    ] {
        let (heads, d_ff) = (hidden / 128, 4 * hidden);
        let text = format!(
            r#"{{"format": "narrows-model/1", "hidden": {hidden}, "vocab": 1024, "heads": {heads},
                "d_ff": {d_ff}, "max_sequence_length": 32768,
                "blocks": {{"count": 1, "default": {{"product": "plain", "all": {linears}}}}}}}"#
        );
        let any = Request {
            tensor: Some(1),
            pipeline: Some(1),
            context: Some(4),
            micro_batch: Some(1),
            ..request(model::read("one-block.json", &text).unwrap(), "a100-80gb", [16, 4, 32768])
        };
        let stages = [Zero::Off, Zero::One, Zero::Two, Zero::Three].map(Some);
        assert_bounded(&any, stages.map(|zero| Request { zero, ..any.clone() }));
    }
}

/// A gather of several buckets waits at the first reader of its weights, behind the collective of a norm.
#[test]
fn collectives_before_the_first_reader_hide_gathers() {
    for (model, hardware, sizes, [tensor, pipeline]) in [
        ("svd-60m", "h100-sxm", [16, 16, 2048], [4, 1]),
        ("cola-60m", "a100-80gb-8", [32, 8, 128], [4, 2]),
    ] {
        let any = Request {
            tensor: Some(tensor),
            pipeline: Some(pipeline),
            zero: Some(Zero::One),
            rules: Rules { weights: WeightRule::Sharded, norm: NormRule::Sync, ..Rules::ALL },
            ..request(preset(model), hardware, sizes)
        };
        let micro_batches = [1, 2, 4].map(Some);
        assert_bounded(
            &any,
            micro_batches.map(|micro_batch| Request { micro_batch, ..any.clone() }),
        );
    }
}

/// A stage hides gathers of updated weights while it waits for its first microbatch.
#[test]
fn idle_stages_hide_gathers() {
    let text = r#"{"format": "narrows-model/1", "hidden": 8192, "vocab": 256, "heads": 64, "d_ff": 32768,
        "blocks": {"count": 22, "default": {"product": "plain", "all": "dense"},
        "overrides": {"21": {"d_ff": 262144}}}}"#;
    let large_last_block = model::read("large-last-block.json", text).unwrap();
    let request = Request {
        tensor: Some(1),
        pipeline: Some(8),
        zero: Some(Zero::One),
        micro_batch: Some(1),
        memory_limit: MemoryLimit::None,
        ..request(large_last_block, "a100-80gb", [64, 32, 256])
    };
    let schedules = [PipelineSchedule::OneForwardOneBackward, PipelineSchedule::ZeroBubble];
    let schedules = schedules.map(Some);
    assert_bounded(&request, schedules.map(|schedule| Request { schedule, ..request.clone() }));
}

/// Weight gradients have no passes of their own where every backward pass reduces gradients.
#[test]
fn sharded_gradients_are_reduced_in_backward_passes() {
    for (zero, shard_size) in [(Zero::Two, 2), (Zero::Two, 4), (Zero::Three, 2)] {
        let any = Request {
            tensor: Some(1),
            pipeline: Some(2),
            zero: Some(zero),
            micro_batch: Some(1),
            shard_size: Some(shard_size),
            ..request(preset("lax-130m"), "a100-80gb", [8, 4, 4096])
        };
        let schedules = [PipelineSchedule::OneForwardOneBackward, PipelineSchedule::ZeroBubble];
        let schedules = schedules.map(Some);
        assert_bounded(&any, schedules.map(|schedule| Request { schedule, ..any.clone() }));
    }
}

/// A collective adds less to a short pass of the embedding than to a long one where computation and collectives slow each other
/// much.
#[test]
fn collectives_beside_the_embedding_add_least_to_one_of_its_passes() {
    let slow = |compute: f64, collective: f64| {
        let mut file = profile::preset("a100-80gb-8").unwrap().file().clone();
        file.links.intra_node.bandwidth_bytes_per_s *= 0.003;
        file.links.inter_node.bandwidth_bytes_per_s *= 0.1;
        let overlap = file.overlap.as_mut().expect("factors of overlap");
        (overlap.compute_slowdown, overlap.collective_slowdown) = (compute, collective);
        file.resolve().expect("a profile")
    };
    let text = r#"{"format": "narrows-model/1", "hidden": 1024, "vocab": 1024, "heads": 16, "d_ff": 2048,
        "max_sequence_length": 4096, "blocks": {"count": 1, "default": {"product": "swiglu",
        "all": {"rank": 64, "activation": "identity"}}}}"#;
    let model = model::read("one-block.json", text).expect("a model");
    for profile in [slow(3.0, 8.0), slow(4.0, 2.5), slow(3.0, 3.0)] {
        for zero in [Zero::Two, Zero::Three] {
            let any = Request {
                tensor: Some(4),
                pipeline: Some(1),
                zero: Some(zero),
                overlap_grad_reduce: Some(true),
                profile: profile.clone(),
                ..request(model.clone(), "a100-80gb-8", [32, 32, 256])
            };
            assert_bounded(
                &any,
                [4, 2, 1].map(|size| Request { micro_batch: Some(size), ..any.clone() }),
            );
        }
    }
}
