//! Work of sharded parameters that the blocks of a stage do not count.
//!
//! With overlap, the gather of a block's weights and the reduction of its gradients run during the pass of another segment,
//! and a block counts the least time that they can add. The gather for the first block of a pass and the reduction of
//! the last block overlap with no pass of a block. The additions of reduced parts are the same for every choice of a block
//! on one device of the tensor axis; a step of one microbatch has none.

use narrows_cost_model::{OverlapSlowdown, ShardingMin};
use narrows_plan::graph::SegmentKind;
use narrows_plan::{Context, Seconds};

use super::embedding_and_head::EmbeddingAndHead;
use crate::segment::{SegmentSolver, SegmentSpec};

/// Lower bounds on the time that sharded parameters add to the forward and to the backward pass of a stage and that its
/// blocks do not count.
pub(super) fn uncounted_sharding(
    segments: &SegmentSolver,
    context: &Context,
    stage: u64,
    embedding_and_head: &EmbeddingAndHead,
) -> [Seconds; 2] {
    if !context.shards_gradients() {
        return Default::default();
    }
    let of_shape = |shape: usize| {
        segments.sharding_min(SegmentSpec::block(shape, embedding_and_head.boundary), context)
    };
    let shapes: Vec<ShardingMin> = (0..segments.shape_count()).map(of_shape).collect();
    let [forward, mut backward] = at_ends(segments, context, stage, embedding_and_head, &shapes);
    // On several stages, the blocks of this one are not known.
    if context.accumulates_parts() && context.mesh.pipeline == 1 {
        backward += segments.of_layers(|shape| shapes[shape].additions).into_iter().sum();
    }
    [forward, backward]
}

/// Lower bounds on the time that the collectives at the ends of the passes add to the least time of every collective.
fn at_ends(
    segments: &SegmentSolver,
    context: &Context,
    stage: u64,
    embedding_and_head: &EmbeddingAndHead,
    shapes: &[ShardingMin],
) -> [Seconds; 2] {
    let slowdown = segments.prices(context).overlap_slowdown();
    let Some(slowdown) = slowdown.filter(|_| context.overlap_grad_reduce) else {
        return Default::default();
    };
    // The first block of a later stage and the last block of an earlier stage may have any shape.
    let any = shapes.iter().copied().reduce(ShardingMin::min).unwrap_or_default();
    let first = if stage == 0 { shapes[segments.layer_shapes()[0]] } else { any };
    let (boundary, tied) = (embedding_and_head.boundary, embedding_and_head.tied_weight);
    let spec = SegmentSpec::embedding_or_head(SegmentKind::Embedding, boundary, tied);
    let alone = Seconds(0.0);
    let longest = match stage {
        0 => segments.max_pass_times(spec, context),
        _ => Some([alone; 2]),
    };
    let Some([during_gather, during_reduction]) = longest else { return Default::default() };
    let forward = added(first.gather, during_gather, slowdown);
    let mut backward = added(first.reduction, during_reduction, slowdown);
    if stage + 1 < context.mesh.pipeline {
        // The last block's weights are gathered after the gradient has been received.
        backward += added(any.gather, alone, slowdown);
    }
    [forward, backward]
}

/// The least time that a collective overlapped with computation of `longest` or less adds beyond the least that it adds to any
/// computation. As computation grows from none, beside which the collective adds its own time, what it adds only falls, or
/// only rises where both slow each other much.
fn added(collective: Seconds, longest: Seconds, slowdown: OverlapSlowdown) -> Seconds {
    let exposed = slowdown.exposed(collective, longest).0.min(collective.0);
    Seconds(exposed) - collective * slowdown.hidden_cost()
}
