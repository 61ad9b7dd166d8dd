//! Embedding and head: how they may be decided beside the blocks.

use std::sync::Arc;

use narrows_cost_model::segment::SegmentTime;
use narrows_plan::graph::SegmentKind;
use narrows_plan::strategy::{BoundaryLayout, Context, TiedWeight};
use narrows_plan::{Bytes, Seconds};

use crate::divide::{block_part, in_flight};
use crate::request::Request;
use crate::search::tied_weights;
use crate::segments::{SegmentSolver, SegmentSpec, SolvedSegment};

/// Embedding and head of a context, for one layout of what segments hand on.
#[derive(Clone)]
pub(crate) struct EmbeddingAndHead {
    pub border: BoundaryLayout,
    pub tied_weight: Option<TiedWeight>,
    pub embedding: Arc<SolvedSegment>,
    pub head: Arc<SolvedSegment>,
    /// No plan with them is faster, whatever the memory.
    pub bound: Seconds,
}

impl EmbeddingAndHead {
    /// The fastest ends for every layout, and every way a tied weight may lie.
    pub fn all(
        request: &Request,
        segments: &SegmentSolver,
        context: &Context,
    ) -> Vec<EmbeddingAndHead> {
        let microbatches = context.workload.microbatches(&context.mesh);
        let mut found = vec![];
        for border in segments.borders(context) {
            let fastest = |shape: &usize| segments.fastest(block_part(*shape, border), context);
            let blocks: Option<Vec<Arc<SolvedSegment>>> =
                segments.layer_shapes().iter().map(fastest).collect();
            let Some(blocks) = blocks else { continue };
            let total = |solved: &Arc<SolvedSegment>| solved.time.total(microbatches);
            let blocks_time: Seconds = blocks.iter().map(total).sum();
            for tied_weight in tied_weights(request) {
                let end =
                    |kind| segments.fastest(SegmentSpec::end(kind, border, tied_weight), context);
                let ends = end(SegmentKind::Embedding).zip(end(SegmentKind::Head));
                let Some((embedding, head)) = ends else { continue };
                let all = blocks_time + total(&embedding) + total(&head);
                let bound = Seconds(all.0 / context.mesh.pipeline as f64);
                found.push(EmbeddingAndHead { border, tied_weight, embedding, head, bound });
            }
        }
        found
    }

    /// Ends that are nowhere: as fast as the fastest and as small as the smallest. What is bounded
    /// with them is bounded for all.
    pub fn ideal(&self, segments: &SegmentSolver, context: &Context) -> EmbeddingAndHead {
        let microbatches = context.workload.microbatches(&context.mesh);
        let ideal = |fastest: &Arc<SolvedSegment>, kind, in_flight| {
            let part = SegmentSpec::end(kind, self.border, self.tied_weight);
            let turn = segments.least_turn(part, context).unwrap_or(0.0);
            let total = fastest.time.total(microbatches).0;
            let time = SegmentTime {
                forward: Seconds(turn),
                backward: Seconds(0.0),
                step: Seconds((total - microbatches as f64 * turn).max(0.0)),
                update: Seconds(0.0),
            };
            let smallest = segments.hull(part, context, in_flight, Some(Bytes(0)));
            let bytes = smallest.last().map_or(fastest.bytes, |solved| solved.bytes);
            Arc::new(SolvedSegment { time, bytes, ..SolvedSegment::clone(fastest) })
        };
        EmbeddingAndHead {
            embedding: ideal(&self.embedding, SegmentKind::Embedding, in_flight(context, 0)),
            head: ideal(&self.head, SegmentKind::Head, 0),
            ..self.clone()
        }
    }

    /// What they hold on a stage.
    pub fn bytes(&self, context: &Context, stage: usize) -> Bytes {
        let mut held = Bytes(0);
        if stage == 0 {
            held += self.embedding.bytes.total(in_flight(context, stage));
        }
        if stage as u64 + 1 == context.mesh.pipeline {
            held += self.head.bytes.resident;
        }
        held
    }

    /// All pairs of points on the hulls of both ends, the fastest first and the smallest
    /// last.
    pub fn pairs(&self, segments: &SegmentSolver, context: &Context) -> Vec<EmbeddingAndHead> {
        let microbatches = context.workload.microbatches(&context.mesh);
        let total = |ends: &EmbeddingAndHead| {
            ends.embedding.time.total(microbatches).0 + ends.head.time.total(microbatches).0
        };
        let points = |kind, in_flight| {
            let part = SegmentSpec::end(kind, self.border, self.tied_weight);
            segments.hull(part, context, in_flight, None)
        };
        let embeddings = points(SegmentKind::Embedding, in_flight(context, 0));
        // The backward pass of the head follows its forward pass at once: nothing is kept for it.
        let heads = points(SegmentKind::Head, 0);
        let mut pairs = vec![];
        for embedding in &embeddings {
            for head in &heads {
                let (embedding, head) = (embedding.clone(), head.clone());
                let mut ends = EmbeddingAndHead { embedding, head, ..self.clone() };
                let more = total(&ends) - total(self);
                ends.bound.0 += more.max(0.0) / context.mesh.pipeline as f64;
                pairs.push(ends);
            }
        }
        // Both hulls end with their smallest points.
        let smallest = pairs.pop();
        pairs.sort_by(|a, b| total(a).total_cmp(&total(b)));
        pairs.extend(smallest);
        pairs
    }
}
