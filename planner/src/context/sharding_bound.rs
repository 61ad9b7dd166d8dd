//! Lower bound on a step in which collectives of sharded parameters take longer than the passes that they overlap with.
//!
//! On one stage and without collectives of activations, the weights of a block are gathered during the forward pass of
//! another block. During the backward pass of a block, the weights of a second block are gathered and the gradients of a
//! third block are reduced. A longer pass never makes the pass and its collectives end earlier, so that the least pass
//! of each block gives a bound:
//!
//! ```text
//! m·Σ (f + exposed(gather, f) + b + exposed(gather + reduction, b)) + embedding and head
//! ```
//! With ZeRO-2, gathers of updated weights may take longer than the first forward pass, and then add to it.

use narrows_cost_model::ShardingMin;
use narrows_plan::graph::SegmentKind;
use narrows_plan::strategy::{BoundaryLayout, TiedWeightLayout};
use narrows_plan::{Context, Seconds};

use super::bucket_bound::uncounted_gathers;
use crate::segment::{SegmentSolver, SegmentSpec};

/// Lower bound in seconds on the plans of a context with this boundary layout; 0 without sharded parameters whose
/// collectives overlap with passes, with several stages, and on several devices of the tensor or context axis.
pub(super) fn sharding_bound(
    segments: &SegmentSolver,
    context: &Context,
    (boundary, tied_weight): (BoundaryLayout, Option<TiedWeightLayout>),
) -> f64 {
    let Some(slowdown) = segments.prices(context).overlap_slowdown() else { return 0.0 };
    let is_covered = context.overlap_grad_reduce && context.shards_gradients();
    if !is_covered || context.mesh.pipeline > 1 || context.has_activation_collectives() {
        return 0.0;
    }
    let blocks = |shape: usize| SegmentSpec::block(shape, boundary);
    // The collectives during the pass of a block belong to its neighbours, which may have any shape.
    let of_shape = |shape: usize| segments.sharding_min(blocks(shape), context);
    let least = (0..segments.shape_count()).map(of_shape).reduce(ShardingMin::min);
    let ShardingMin { gather, reduction, .. } = least.unwrap_or_default();
    let with_collectives =
        |pass: f64, collectives: Seconds| pass + slowdown.exposed(collectives, Seconds(pass)).0;
    let mut microbatch = 0.0;
    for least in segments.of_layers(|shape| segments.min_pass_times(blocks(shape), context)) {
        microbatch += with_collectives(least.forward, gather);
        microbatch += with_collectives(least.backward, gather + reduction);
    }
    // During the passes of the last block, no weights are gathered forward and no gradients are reduced backward; during
    // the backward pass of the first block, no weights are gathered. The missing collectives overlap with embedding and
    // head, or add at most the time that they take alone.
    microbatch -= with_collectives(0.0, gather + gather + reduction);
    let mut step_phase = 0.0;
    for kind in [SegmentKind::Embedding, SegmentKind::Head] {
        let spec = SegmentSpec::embedding_or_head(kind, boundary, tied_weight);
        let least = segments.min_pass_times(spec, context);
        microbatch += least.forward + least.backward;
        step_phase += segments.step_phase_range(spec, context)[0];
    }
    let of_layers = segments.of_layers(|shape| segments.step_phase_range(blocks(shape), context));
    for [least, _] in of_layers {
        step_phase += least;
    }
    let microbatches = context.workload.microbatches(&context.mesh) as f64;
    let gathers = uncounted_gathers(segments, context, (boundary, tied_weight));
    microbatches * microbatch + step_phase + gathers
}
