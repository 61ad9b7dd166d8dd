//! A search of all contexts finds what searches of single contexts find: every mesh, microbatch, ZeRO stage, shard group,
//! schedule and overlap, each planned without a step time to beat.

use std::collections::BTreeSet;

use narrows_cost_model::profile;
use narrows_plan::{Context, model};
use narrows_planner::{Request, contexts, search};

fn request(blocks: u64, hardware: &str, devices: u64, global_batch: u64) -> Request {
    request_of_length(512, blocks, hardware, devices, global_batch)
}

fn request_of_length(
    length: u64,
    blocks: u64,
    hardware: &str,
    devices: u64,
    global_batch: u64,
) -> Request {
    let text = format!(
        r#"{{"format": "narrows-model/1", "hidden": 512, "vocab": 16384, "heads": 8, "d_ff": 1408,
            "max_sequence_length": 8192, "blocks": {{"count": {blocks}, "default": {{"product": "swiglu",
            "all": {{"rank": 128, "activation": "silu"}}}}}}}}"#,
    );
    let model = model::read("enumerated.json", &text).expect("a model");
    let profile = profile::preset(hardware).expect("a preset");
    Request::new(model, profile, devices, global_batch, length)
}

/// The request with every choice of a context made.
fn fixed(request: &Request, context: &Context) -> Request {
    Request {
        micro_batch: Some(context.workload.micro_batch),
        tensor: Some(context.mesh.tensor),
        pipeline: Some(context.mesh.pipeline),
        data: Some(context.mesh.data),
        context: Some(context.mesh.context),
        context_attention: Some(context.context_attention),
        zero: Some(context.zero),
        shard_size: (context.shard_size > 1).then_some(context.shard_size),
        schedule: Some(context.schedule),
        overlap_grad_reduce: Some(context.overlap_grad_reduce),
        ..request.clone()
    }
}

fn check_contexts(blocks: u64, hardware: &str, devices: u64, global_batch: u64) {
    check_request(&request(blocks, hardware, devices, global_batch));
}

fn check_request(free: &Request) {
    let result = search(free);
    let time = result.best.as_ref().expect("a plan").time.0;
    let bound = result.report.bound.0 * (1.0 - 1e-9);
    let mut searched = BTreeSet::new();
    let mut fastest = f64::INFINITY;
    for context in contexts(free) {
        let single = fixed(free, &context);
        // Numbers of model chunks have no field of the request: the search of a schedule covers them.
        let of_schedule = Context { chunks: 1, ..context };
        if !searched.insert(format!("{of_schedule:?}")) {
            continue;
        }
        let Some(best) = search(&single).best else { continue };
        assert!(best.time.0 >= bound, "{of_schedule:?} is faster than the bound {bound}");
        fastest = fastest.min(best.time.0);
    }
    assert!(searched.len() > 20, "only {} contexts", searched.len());
    let case = format!("{} devices of {}: {time}, {fastest}", free.devices, free.profile.name());
    assert!(fastest >= time * (1.0 - 1e-9), "{case}: a context was pruned or searched less well");
    if result.report.is_proven_best() {
        assert!(fastest <= time * (1.0 + 1e-9), "{case}: the optimum has no context");
    }
}

#[test]
fn no_single_context_beats_the_search_of_all() {
    check_contexts(4, "a100-80gb-8", 4, 8);
}

/// Contexts whose attention exchanges heads, and contexts whose attention gathers keys and values.
#[test]
fn no_single_context_axis_beats_the_search_of_all() {
    let request = request_of_length(8192, 4, "a100-80gb-8", 4, 2);
    check_request(&Request { tensor: Some(1), ..request });
}

#[test]
#[ignore = "second level: takes minutes"]
fn no_single_context_beats_the_search_of_all_on_more_devices() {
    check_contexts(2, "a100-80gb", 8, 8);
    check_contexts(3, "h100-sxm", 16, 16);
    check_contexts(2, "a100-80gb", 12, 24);
}
