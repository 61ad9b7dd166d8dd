//! Solutions for the embedding and the head of a model.

use std::iter;
use std::sync::Arc;

use narrows_cost_model::{InFlight, SegmentTime};
use narrows_plan::graph::SegmentKind;
use narrows_plan::strategy::{BoundaryLayout, TiedWeightLayout};
use narrows_plan::{Bytes, Context, PipelineSchedule, Seconds};

use super::in_flight::in_flight_in_chunk;
use crate::request::Request;
use crate::segment::{SegmentSolver, SegmentSpec, SolvedSegment};

/// Solutions for the embedding and the head under one boundary layout.
#[derive(Clone)]
pub(crate) struct EmbeddingAndHead {
    /// Layouts of the tensors between segments.
    pub boundary: BoundaryLayout,
    /// Layout of a tied weight.
    pub tied_weight: Option<TiedWeightLayout>,
    /// Solution of the embedding.
    pub embedding: Arc<SolvedSegment>,
    /// Solution of the head.
    pub head: Arc<SolvedSegment>,
    /// Lower bound on plans with these solutions, without a memory limit.
    pub bound: Seconds,
}

/// Microbatches whose activations the head keeps while the blocks of the last stage keep most: those of a pass, whose backward pass
/// follows the forward pass at once with every schedule. The blocks then keep what they have of these and of other microbatches.
fn head_in_flight(context: &Context) -> InFlight {
    InFlight { kept: context.pass_microbatches(), ..InFlight::default() }
}

impl EmbeddingAndHead {
    /// The fastest solutions for every boundary layout and every layout of a tied weight.
    pub(crate) fn fastest_per_layout(
        request: &Request,
        segments: &SegmentSolver,
        context: &Context,
    ) -> Vec<EmbeddingAndHead> {
        let layouts = segments.boundary_layouts(context).into_iter().flat_map(|boundary| {
            request.tied_weights().into_iter().map(move |tied_weight| (boundary, tied_weight))
        });
        layouts.filter_map(|layout| EmbeddingAndHead::fastest(segments, context, layout)).collect()
    }

    /// The fastest solutions for a boundary layout and a layout of a tied weight; `None` without legal decisions.
    pub(crate) fn fastest(
        segments: &SegmentSolver,
        context: &Context,
        (boundary, tied_weight): (BoundaryLayout, Option<TiedWeightLayout>),
    ) -> Option<EmbeddingAndHead> {
        let microbatches = context.workload.microbatches(&context.mesh);
        let total = |solved: &Arc<SolvedSegment>| solved.time.total(microbatches);
        let of_block = |shape| segments.fastest(SegmentSpec::block(shape, boundary), context);
        let blocks = segments.of_layers(|shape| of_block(shape).map(|solved| total(&solved)));
        let blocks: Seconds =
            blocks.into_iter().collect::<Option<Vec<Seconds>>>()?.into_iter().sum();
        let end = |kind| {
            segments.fastest(SegmentSpec::embedding_or_head(kind, boundary, tied_weight), context)
        };
        let (embedding, head) = (end(SegmentKind::Embedding)?, end(SegmentKind::Head)?);
        let all = blocks + total(&embedding) + total(&head);
        let bound = Seconds(all.0 / context.mesh.pipeline as f64);
        Some(EmbeddingAndHead { boundary, tied_weight, embedding, head, bound })
    }

    /// The segments of the layout: blocks of so many shapes, embedding and head.
    pub(crate) fn specs(&self, shapes: usize) -> Vec<SegmentSpec> {
        let block = |shape| SegmentSpec::block(shape, self.boundary);
        let end = |kind| SegmentSpec::embedding_or_head(kind, self.boundary, self.tied_weight);
        let ends = [SegmentKind::Embedding, SegmentKind::Head].map(end);
        (0..shapes).map(block).chain(ends).collect()
    }

    /// A relaxation of all solutions: as fast as the fastest and as small as the smallest. Bounds computed
    /// with the relaxation hold for all solutions.
    pub(crate) fn relaxation(
        &self,
        segments: &SegmentSolver,
        context: &Context,
    ) -> EmbeddingAndHead {
        let microbatches = context.workload.microbatches(&context.mesh);
        let relaxed = |fastest: &Arc<SolvedSegment>, kind, in_flight| {
            let spec = SegmentSpec::embedding_or_head(kind, self.boundary, self.tied_weight);
            let least = || segments.min_pass_times(spec, context);
            let both = || segments.min_microbatch_time(spec, context).unwrap_or(0.0);
            // Only bounds of pipelines use the times of single passes, and only bounds of zero-bubble pipelines use the
            // time of a backward pass alone.
            let [forward, backward] = match context.schedule {
                PipelineSchedule::ZeroBubble => {
                    let least = segments.min_pass_times_with_flows(spec, context);
                    [least.forward, least.backward]
                }
                PipelineSchedule::OneForwardOneBackward | PipelineSchedule::Interleaved => {
                    match context.mesh.pipeline {
                        1 => [both(), 0.0],
                        _ => [least().forward, (both() - least().forward).max(0.0)],
                    }
                }
            };
            let total = fastest.time.total(microbatches).0;
            let passes = microbatches as f64 * (forward + backward);
            let time = SegmentTime {
                forward: Seconds(forward),
                backward: Seconds(backward),
                step_phase: Seconds((total - passes).max(0.0)),
                ..SegmentTime::default()
            };
            let smallest = segments.hull(spec, context, in_flight, Some(Bytes(0)));
            let bytes = smallest.last().map_or(fastest.bytes, |solved| solved.bytes);
            Arc::new(SolvedSegment { time, bytes, ..SolvedSegment::clone(fastest) })
        };
        EmbeddingAndHead {
            embedding: relaxed(
                &self.embedding,
                SegmentKind::Embedding,
                in_flight_in_chunk(context, 0, 0),
            ),
            head: relaxed(&self.head, SegmentKind::Head, head_in_flight(context)),
            ..self.clone()
        }
    }

    /// Bytes of embedding and head on a stage while the blocks keep most.
    pub(crate) fn bytes(&self, context: &Context, stage: usize) -> Bytes {
        let mut bytes = Bytes(0);
        if stage == 0 {
            bytes += self.embedding.bytes.total(in_flight_in_chunk(context, stage, 0));
        }
        if stage as u64 + 1 == context.mesh.pipeline {
            bytes += self.head.bytes.resident + self.kept_by_head(context);
        }
        bytes
    }

    /// The part of the last stage's bytes that the head keeps, between its forward and its backward pass.
    pub(crate) fn kept_by_head(&self, context: &Context) -> Bytes {
        self.head.bytes.kept * head_in_flight(context).kept
    }

    /// Bytes of the head at most that the last stage counts while the blocks keep most, and does not need once the head's backward
    /// pass has ended: all but the least weights and optimizer states of a head with these layouts.
    pub(crate) fn freed_by_head(&self, segments: &SegmentSolver, context: &Context) -> Bytes {
        let smallest = self.vertices(segments, context, SegmentKind::Head, InFlight::default());
        let resident_min = smallest.last().map_or(Bytes(0), |head| head.bytes.resident);
        (self.head.bytes.resident + self.kept_by_head(context)).saturating_sub(resident_min)
    }

    /// The smallest embedding with the head that is smallest while the blocks keep most, and with that which is smallest during
    /// their passes.
    pub(crate) fn smallest(
        &self,
        segments: &SegmentSolver,
        context: &Context,
    ) -> Vec<EmbeddingAndHead> {
        let smallest = |kind, in_flight| self.vertices(segments, context, kind, in_flight).pop();
        let embedding = smallest(SegmentKind::Embedding, in_flight_in_chunk(context, 0, 0));
        let in_flight = [head_in_flight(context), InFlight::default()];
        let heads = in_flight.map(|in_flight| smallest(SegmentKind::Head, in_flight));
        let mut heads: Vec<Arc<SolvedSegment>> = heads.into_iter().flatten().collect();
        heads.dedup_by(|a, b| a.choice == b.choice);
        let pair = |(embedding, head)| EmbeddingAndHead { embedding, head, ..self.clone() };
        embedding.into_iter().flat_map(|of| iter::repeat(of).zip(heads.clone())).map(pair).collect()
    }

    /// Hull vertices of the embedding or the head, the fastest first.
    fn vertices(
        &self,
        segments: &SegmentSolver,
        context: &Context,
        kind: SegmentKind,
        in_flight: InFlight,
    ) -> Vec<Arc<SolvedSegment>> {
        let spec = SegmentSpec::embedding_or_head(kind, self.boundary, self.tied_weight);
        segments.hull(spec, context, in_flight, None)
    }

    /// All pairs of hull vertices of embedding and head: the fastest first, the smallest last.
    pub(crate) fn hull_pairs(
        &self,
        segments: &SegmentSolver,
        context: &Context,
    ) -> Vec<EmbeddingAndHead> {
        let microbatches = context.workload.microbatches(&context.mesh);
        let total = |pair: &EmbeddingAndHead| {
            pair.embedding.time.total(microbatches).0 + pair.head.time.total(microbatches).0
        };
        let embeddings = self.vertices(
            segments,
            context,
            SegmentKind::Embedding,
            in_flight_in_chunk(context, 0, 0),
        );
        let mut heads =
            self.vertices(segments, context, SegmentKind::Head, head_in_flight(context));
        // Blocks may need most during their passes, when the head keeps nothing.
        if let Some(other) = self.smallest(segments, context).get(1) {
            heads.insert(heads.len() - 1, other.head.clone());
        }
        let mut pairs = vec![];
        for embedding in &embeddings {
            for head in &heads {
                let (embedding, head) = (embedding.clone(), head.clone());
                let mut pair = EmbeddingAndHead { embedding, head, ..self.clone() };
                let more = total(&pair) - total(self);
                pair.bound.0 += more.max(0.0) / context.mesh.pipeline as f64;
                pairs.push(pair);
            }
        }
        // Both hulls end with their smallest vertex.
        let smallest = pairs.pop();
        pairs.sort_by(|a, b| total(a).total_cmp(&total(b)));
        pairs.extend(smallest);
        pairs
    }
}
