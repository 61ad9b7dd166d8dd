//! Sequences sharded over the context axis: legal sizes, prices and bounds.

use narrows_cost_model::profile;
use narrows_plan::Zero;
use narrows_plan::kernel::CollectiveKind;
use narrows_plan::model::{Model, presets};
use narrows_plan::program::Action;
use narrows_plan::{Axis, CheckedProgram, Mesh};
use narrows_planner::{Request, contexts, search};

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
    let mut sizes: Vec<u64> =
        contexts(&request).iter().map(|context| context.mesh.context).collect();
    sizes.sort_unstable();
    sizes.dedup();
    assert_eq!(sizes, [1, 2, 4, 8]);
    let short = Request { sequence_length: 4096, ..request };
    assert!(contexts(&short).iter().all(|context| context.mesh.context == 1));
    let fixed = Request { context: Some(4), ..short };
    assert!(contexts(&fixed).iter().all(|context| context.mesh.context == 4));
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

/// No plan of a context is faster than the bound of its search, with data-axis collectives during the passes and
/// without.
#[test]
fn no_plan_with_a_context_axis_is_faster_than_its_bound() {
    for (model, mesh, zero) in [
        ("cola-1b", Mesh { tensor: 1, pipeline: 1, data: 2, context: 4 }, Zero::Three),
        ("lax-130m", Mesh { tensor: 2, pipeline: 1, data: 2, context: 2 }, Zero::Two),
        ("svd-350m", Mesh { tensor: 1, pipeline: 2, data: 2, context: 2 }, Zero::One),
        ("llama-1b", Mesh { tensor: 2, pipeline: 2, data: 1, context: 2 }, Zero::Off),
    ] {
        for overlap in [true, false] {
            let request = Request {
                tensor: Some(mesh.tensor),
                pipeline: Some(mesh.pipeline),
                data: Some(mesh.data),
                context: Some(mesh.context),
                zero: Some(zero),
                overlap_grad_reduce: Some(overlap),
                ..request(model, 8, 4, 8192)
            };
            let searched = search(&request);
            let best = searched.best.unwrap_or_else(|| panic!("{model}"));
            assert_eq!(best.decisions.context.mesh, mesh);
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
