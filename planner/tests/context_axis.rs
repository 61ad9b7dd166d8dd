//! Sequences sharded over the context axis: legal sizes, prices and bounds.

use std::collections::{BTreeMap, BTreeSet};

use narrows_cost_model::{Breakdown, Prices, profile};
use narrows_plan::Zero;
use narrows_plan::kernel::CollectiveKind;
use narrows_plan::model::{Model, presets};
use narrows_plan::program::Action;
use narrows_plan::ring::RingSteps;
use narrows_plan::{Axis, CheckedProgram, Context, ContextAttention, Kernel, Mesh};
use narrows_planner::{Request, contexts, predict, search};

/// A model that supports sequences of up to 262,144 tokens.
fn long(name: &str) -> Model {
    Model { max_sequence_length: 1 << 18, ..presets::find(name).expect("a preset") }
}

fn request(model: &str, devices: u64, global_batch: u64, sequence_length: u64) -> Request {
    let profile = profile::preset("a100-80gb").expect("a preset");
    Request::new(long(model), profile, devices, global_batch, sequence_length)
}

#[test]
fn a_context_axis_divides_positions_and_heads() {
    // 32 heads and 3 · 2¹³ positions, on 24 devices.
    let request = Request { tensor: Some(2), ..request("cola-7b", 48, 48, 3 << 13) };
    let sizes = |attention: ContextAttention| -> Vec<u64> {
        let contexts = contexts(&request).into_iter();
        let of = contexts.filter(|context| context.context_attention == attention);
        of.map(|context| context.mesh.context).collect::<BTreeSet<_>>().into_iter().collect()
    };
    assert_eq!(sizes(ContextAttention::Exchange), [1, 2, 4, 8]);
    // Of as many keys as queries, no fewer bytes are gathered than are exchanged.
    assert_eq!(sizes(ContextAttention::Gather), [3, 6, 12, 24]);
    // Keys and values rotate wherever transfers overlap with attention.
    assert_eq!(sizes(ContextAttention::Ring), [2, 3, 4, 6, 8, 12, 24]);
    let short = Request { sequence_length: 4096, ..request };
    assert!(contexts(&short).iter().all(|context| context.mesh.context == 1));
    let fixed = Request { context: Some(4), ..short };
    let is_exchange = |context: &Context| {
        context.mesh.context == 4 && context.context_attention == ContextAttention::Exchange
    };
    assert!(contexts(&fixed).iter().all(is_exchange));
    assert!(!contexts(&fixed).is_empty());
}

/// Attention exchanges queries, keys, values and its output once in each pass: heads for positions, over the context
/// axis.
#[test]
fn attention_exchanges_heads_for_positions() {
    let request = Request {
        tensor: Some(1),
        pipeline: Some(1),
        data: Some(1),
        context: Some(4),
        context_attention: Some(ContextAttention::Exchange),
        ..request("cola-1b", 4, 1, 8192)
    };
    let best = search(&request).best.expect("a plan");
    let program = best.program.program();
    let blocks = request.model.blocks.len();
    let mut payload = 0;
    let mut count = 0;
    for instr in program.instructions() {
        let Action::Collective(collective) = &instr.action else { continue };
        match collective.axis {
            Axis::Context => {
                assert_eq!(collective.kind(), CollectiveKind::AllToAll);
                payload += collective.payload.0;
                count += 1;
            }
            axis => assert_eq!(axis, Axis::Data),
        }
    }
    // Forward and backward each have q, k, v and the output; a recomputed copy is exchanged again.
    let width = request.model.hidden;
    let once = 2 * 8192 * width * 4 * 2;
    assert!(count >= 4 * blocks, "{count} collectives of {blocks} blocks");
    assert!(payload >= once * blocks as u64, "{payload} bytes");
    assert!(payload <= 2 * once * blocks as u64, "{payload} bytes");
}

/// Keys and values are gathered in each pass of a block that reads them, and their gradients are reduced
/// to the devices that have their positions. Queries and the output stay. More devices than heads share a sequence.
#[test]
fn attention_gathers_keys_and_values() {
    let request = Request {
        tensor: Some(1),
        pipeline: Some(1),
        data: Some(1),
        context: Some(64),
        ..request("cola-1b", 64, 1, 32_768)
    };
    let best = search(&request).best.expect("a plan");
    let context = best.decisions.context;
    assert_eq!(context.context_attention, ContextAttention::Gather);
    let program = best.program.program();
    let blocks = request.model.blocks.len();
    let once = 2 * 32_768 * request.model.hidden;
    let mut counts = BTreeMap::new();
    for instr in program.instructions() {
        match &instr.action {
            Action::Collective(collective) if collective.axis == Axis::Context => {
                assert_eq!(collective.payload.0, once);
                *counts.entry(collective.kind()).or_default() += 1;
            }
            Action::Attention(attention) => {
                assert_eq!((attention.length, attention.query_parts), (32_768, 64));
                assert_eq!((attention.heads, attention.kv_heads), (32, 32));
            }
            _ => {}
        }
    }
    let gathers = counts[&CollectiveKind::AllGather];
    assert!((2 * blocks..=4 * blocks).contains(&gathers), "{gathers} of {blocks} blocks");
    assert_eq!(counts[&CollectiveKind::ReduceScatter], 2 * blocks);
}

/// Within a node, shifts take less time than the attention beside them. Tensors around attention need no collective, and
/// no device holds the keys of all positions.
#[test]
fn ring_attention_hides_its_transfers_within_a_node() {
    let request = Request {
        tensor: Some(1),
        pipeline: Some(1),
        data: Some(1),
        context: Some(8),
        context_attention: Some(ContextAttention::Ring),
        profile: profile::preset("h100-sxm").expect("a preset"),
        ..request("cola-7b", 8, 1, 1 << 18)
    };
    let best = search(&request).best.expect("a plan");
    let program = best.program.program();
    let (model, profile) = (&request.model, &request.profile);
    let (prediction, _) = predict(model, profile, request.executor, &best.plan).expect("a price");
    let prices = Prices::new(profile, request.executor, &best.plan.mesh);
    let (mut attention_s, mut ring_s, mut rings) = (0.0, 0.0, 0);
    for instr in program.instructions() {
        match &instr.action {
            Action::Collective(collective) => assert_eq!(collective.axis, Axis::Data),
            Action::Attention(attention) => {
                assert_eq!(attention.rotation(), Some(best.plan.mesh.group(Axis::Context)));
                let steps = attention.ring_steps().expect("a ring");
                let of_kernel = |kernel: &Kernel| prices.kernel_time(kernel).0;
                let of_kernels =
                    |(count, kernel): &(u64, Kernel)| *count as f64 * of_kernel(kernel);
                for RingSteps { count, beside_shift, without_shift, .. } in &steps {
                    let kernels = beside_shift.iter().chain(without_shift);
                    attention_s += *count as f64 * kernels.map(of_kernels).sum::<f64>();
                }
                ring_s += of_kernel(&instr.kernel());
                rings += 1;
                let scratch = attention.ring_scratch().expect("scratch memory");
                let written = instr.writes.iter().rev().take(2).rev().map(|access| access.extent);
                assert_eq!(written.collect::<Vec<_>>(), [scratch.parts, scratch.sums]);
            }
            _ => {}
        }
    }
    assert_eq!(rings, 2 * model.blocks.len());
    let Breakdown { attention, collective_exposed, .. } = prediction.breakdown_s;
    assert!((attention / attention_s - 1.0).abs() < 1e-9, "{attention}, {attention_s}");
    assert!(collective_exposed >= ring_s - attention_s - 1e-9, "{collective_exposed}");
    assert!(ring_s < 1.1 * attention_s, "{ring_s}, {attention_s}");
    let payloads = &prediction.block_collective_bytes;
    let once = (2 * model.hidden) << 18;
    // Keys of 2 bytes move seven times forward; backward also their gradients of 4 bytes, eight times.
    assert_eq!(payloads.forward.of(CollectiveKind::Shift).0, 7 * once * 2);
    assert_eq!(payloads.backward.of(CollectiveKind::Shift).0, 7 * once * 2 + 8 * once * 4);
    let gather = Request { context_attention: Some(ContextAttention::Gather), ..request.clone() };
    let gather = search(&gather).best.expect("a plan");
    assert!(best.time < gather.time, "{:?}, {:?}", best.time, gather.time);
}

/// With grouped-query attention, a free search chooses the fastest form.
#[test]
fn a_search_chooses_the_faster_collectives() {
    let text = r#"{"format": "narrows-model/1", "hidden": 4096, "vocab": 32000, "heads": 32, "kv_heads": 8,
        "d_ff": 14336, "max_sequence_length": 262144,
        "blocks": {"count": 32, "default": {"product": "swiglu", "all": "dense"}}}"#;
    let model = narrows_plan::model::read("grouped.json", text).expect("a model");
    let request = Request {
        tensor: Some(1),
        pipeline: Some(1),
        context: Some(4),
        model,
        ..request("llama-7b", 32, 8, 32_768)
    };
    let of = |attention| {
        let request = Request { context_attention: Some(attention), ..request.clone() };
        search(&request).best.expect("a plan").time.0
    };
    let free = search(&request).best.expect("a plan").time.0;
    let [exchange, gather, ring] = ContextAttention::ALL.map(of);
    // The free search ends within 1 % of its bound.
    let fastest = exchange.min(gather).min(ring);
    assert!(free <= fastest * 1.01, "{free}, {exchange}, {gather}, {ring}");
    assert!(exchange != gather && gather != ring && ring != exchange, "{exchange}");
}

/// No plan of a context is faster than the bound of its search, with data-axis collectives during the passes and
/// without.
#[test]
fn no_plan_with_a_context_axis_is_faster_than_its_bound() {
    let cases = [
        ("cola-1b", Mesh { tensor: 1, pipeline: 1, data: 2, context: 4 }, Zero::Three),
        ("lax-130m", Mesh { tensor: 2, pipeline: 1, data: 2, context: 2 }, Zero::Two),
        ("svd-350m", Mesh { tensor: 1, pipeline: 2, data: 2, context: 2 }, Zero::One),
        ("llama-1b", Mesh { tensor: 2, pipeline: 2, data: 1, context: 2 }, Zero::Off),
    ];
    let all = |case| ContextAttention::ALL.map(|attention| (case, attention));
    for ((model, mesh, zero), attention) in cases.into_iter().flat_map(all) {
        for overlap in [true, false] {
            let request = Request {
                tensor: Some(mesh.tensor),
                pipeline: Some(mesh.pipeline),
                data: Some(mesh.data),
                context: Some(mesh.context),
                context_attention: Some(attention),
                zero: Some(zero),
                overlap_grad_reduce: Some(overlap),
                ..request(model, 8, 4, 8192)
            };
            let searched = search(&request);
            let best = searched.best.unwrap_or_else(|| panic!("{model}"));
            let context = best.decisions.context;
            assert_eq!((context.mesh, context.context_attention), (mesh, attention));
            let (bound, time) = (searched.report.bound.0, best.time.0);
            assert!(bound <= time * (1.0 + 1e-9), "{model}: {bound} is more than {time}");
            let program = best.program.program().clone();
            CheckedProgram::check(program).unwrap_or_else(|errors| panic!("{model}: {errors}"));
        }
    }
}

/// With fewer sequences than devices, long sequences are searched with a context axis, and no plan with a fixed size is
/// faster than the best.
#[test]
fn no_fixed_size_beats_the_free_search() {
    let free = request("cola-7b", 16, 4, 65_536);
    let searched = search(&free);
    let best = searched.best.expect("a plan");
    let without = search(&Request { context: Some(1), ..free.clone() }).best.expect("a plan");
    assert!(best.decisions.context.mesh.context > 1, "{}", best.decisions.context.mesh);
    assert!(best.time < without.time, "{} and {}", best.time, without.time);
    for size in [2, 4, 8] {
        let fixed = search(&Request { context: Some(size), ..free.clone() });
        let Some(fixed) = fixed.best else { continue };
        assert!(fixed.time.0 >= searched.report.bound.0 * (1.0 - 1e-9), "context {size}");
    }
}
