//! Work of sharded parameters that the blocks of a stage do not count.
//!
//! Where they overlap with computation, a gather of a block's weights or a reduction of its gradients runs during the
//! pass of another block and counts the least time it can add. The gather for the first block of a pass and the
//! reduction of the last have no such pass. The additions of reduced parts, which a step of one microbatch does not
//! have, are the same for every choice of a block on one device of the tensor axis.

use narrows_cost_model::{OverlapSlowdown, ShardingMin};
use narrows_plan::graph::SegmentKind;
use narrows_plan::{Context, Seconds};

use super::embedding_and_head::EmbeddingAndHead;
use crate::segment::{SegmentSolver, SegmentSpec};

/// Lower bounds on what sharded parameters add to the forward and to the backward pass of a stage, beyond what its
/// blocks count.
pub(super) fn sharding_beside_blocks(
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

/// Lower bounds on what the collectives at the ends of the passes add, beyond the least that is counted for all.
fn at_ends(
    segments: &SegmentSolver,
    context: &Context,
    stage: u64,
    embedding_and_head: &EmbeddingAndHead,
    shapes: &[ShardingMin],
) -> [Seconds; 2] {
    let Some(slowdown) = segments.prices().overlap_slowdown() else { return Default::default() };
    // Strategies with collectives of activations differ in the instructions beside another collective.
    if !context.overlap_grad_reduce || context.has_activation_collectives() {
        return Default::default();
    }
    // The first block of a later stage, and the last of an earlier one, is any of them.
    let any = shapes.iter().copied().reduce(ShardingMin::min).unwrap_or_default();
    let first = if stage == 0 { shapes[segments.layer_shapes()[0]] } else { any };
    // The embedding has one solution on one device of the tensor axis.
    let (boundary, tied) = (embedding_and_head.boundary, embedding_and_head.tied_weight);
    let spec = SegmentSpec::embedding_or_head(SegmentKind::Embedding, boundary, tied);
    let embedding = segments.fastest(spec, context).filter(|_| stage == 0);
    let [beside_gather, beside_reduction] = embedding
        .map_or(Default::default(), |embedding| [embedding.time.forward, embedding.time.backward]);
    let forward = added(first.gather, beside_gather, slowdown);
    let mut backward = added(first.reduction, beside_reduction, slowdown);
    if stage + 1 < context.mesh.pipeline {
        // The last block's weights are gathered after the gradient has been received.
        backward += added(any.gather, Seconds(0.0), slowdown);
    }
    [forward, backward]
}

/// The time that a collective beside this computation adds beyond the least that any adds.
fn added(collective: Seconds, beside: Seconds, slowdown: OverlapSlowdown) -> Seconds {
    slowdown.exposed(collective, beside) - collective * slowdown.hidden_cost()
}
