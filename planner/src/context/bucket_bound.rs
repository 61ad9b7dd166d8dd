//! Lower bound on a step whose gradient reductions or gathers of weights take longer than the pass that they overlap with.
//!
//! On one stage, the reductions begin when the head's backward pass has ended, and run one after the other. While they
//! overlap, a reduction takes k times as long and computation c times. Let R be the time of the reductions, F and B the
//! times of a microbatch's passes, and H the part of B that the head takes. Then the last reduction ends at
//!
//! ```text
//! m·F + (m − 1)·B + H + R + c·(1 − 1/k)·(B − H)
//! ```
//! or later: all computation after H overlaps with reductions or runs between two of them, and the latter costs more as
//! long as c·(1 − 1/k) is below 1. The gathers mirror that: the first forward pass ends with the part H that follows all of
//! them, and takes at least G + H + c·(1 − 1/k)·(F − H) for gathers of G seconds. Where passes run two microbatches, F, B and H
//! are times of two, and m is the number of pairs.

use narrows_plan::Context;
use narrows_plan::graph::SegmentKind;
use narrows_plan::strategy::{BoundaryLayout, TiedWeightLayout};

use super::lower_bound::min_microbatch_time;
use crate::segment::{SegmentSolver, SegmentSpec};

type Layouts = (BoundaryLayout, Option<TiedWeightLayout>);

/// Least times of a model on one stage, in seconds.
struct LeastTimes {
    /// A forward and a backward pass.
    passes: [f64; 2],
    /// The parts of these passes that belong to the head.
    of_head: [f64; 2],
    /// Gathers during a forward pass and reductions during a backward pass.
    collectives: [f64; 2],
    /// The step phase, with the least time that these collectives add to a step.
    step_phase: f64,
    /// c·(1 − 1/k), at most 1.
    overlapped: f64,
    /// Least time that a hidden collective adds to a step, over its time alone.
    hidden_cost: f64,
}

impl LeastTimes {
    /// `None` without buckets that overlap with a pass, and with several stages.
    fn new(
        segments: &SegmentSolver,
        context: &Context,
        (boundary, tied_weight): Layouts,
    ) -> Option<LeastTimes> {
        let slowdown = segments.prices(context).overlap_slowdown()?;
        let has_buckets = context.overlap_grad_reduce || context.gathers_in_forward();
        (has_buckets && context.mesh.pipeline == 1).then_some(())?;
        let end = |kind| SegmentSpec::embedding_or_head(kind, boundary, tied_weight);
        let (embedding, head) = (end(SegmentKind::Embedding), end(SegmentKind::Head));
        let shapes = (0..segments.shape_count()).map(|shape| {
            let blocks = segments.layer_shapes().iter().filter(|other| **other == shape).count();
            (SegmentSpec::block(shape, boundary), blocks)
        });
        let of_head = segments.min_pass_times(head, context);
        let mut times = LeastTimes {
            passes: [0.0; 2],
            of_head: [of_head.forward, of_head.backward],
            collectives: [0.0; 2],
            step_phase: 0.0,
            overlapped: slowdown.hidden_computation_cost(),
            hidden_cost: slowdown.hidden_cost(),
        };
        let in_pass = context.pass_microbatches() as f64;
        times.of_head = times.of_head.map(|head| in_pass * head);
        for (spec, count) in shapes.chain([(embedding, 1), (head, 1)]) {
            let count = count as f64;
            let least = segments.min_pass_times(spec, context);
            times.passes[0] += in_pass * count * least.forward;
            times.passes[1] += in_pass * count * least.backward;
            times.collectives[0] += count * segments.gathered_min(spec, context);
            times.collectives[1] += count * segments.overlapped_min(spec, context);
            times.step_phase += count * segments.step_phase_range(spec, context)[0];
        }
        Some(times)
    }

    /// Time that the collectives of the first forward (0) or the last backward pass (1) add where they take longer than the
    /// pass, beyond their hidden cost and the overlapped part of the pass.
    fn added(&self, at: usize) -> f64 {
        self.collectives[at] * (1.0 - self.hidden_cost) + (1.0 - self.overlapped) * self.of_head[at]
    }
}

/// Lower bound in seconds on the plans of a context with these layouts; 0 without buckets that overlap with a pass, and with
/// several stages.
pub(super) fn bucket_bound(segments: &SegmentSolver, context: &Context, layouts: Layouts) -> f64 {
    let Some(times) = LeastTimes::new(segments, context, layouts) else { return 0.0 };
    let in_pass = context.pass_microbatches() as f64;
    let microbatch_time = min_microbatch_time(segments, context, layouts.0).unwrap_or(0.0);
    let (both_passes, passes) = (in_pass * microbatch_time, context.passes() as f64);
    // The collectives of the first forward and of the last backward pass either take longer than the pass, of which the
    // overlapped part counts, or are hidden.
    let bound = |is_longer: [bool; 2]| {
        let part = is_longer.map(|longer| if longer { times.overlapped } else { 1.0 });
        let common = part[0].min(part[1]);
        let ends: f64 = [0, 1]
            .map(|at| {
                let added = if is_longer[at] { times.added(at) } else { 0.0 };
                (part[at] - common) * times.passes[at] + added
            })
            .iter()
            .sum();
        (passes - 1.0 + common) * both_passes + ends + times.step_phase
    };
    let cases = [[true, true], [true, false], [false, true]];
    cases.map(bound).into_iter().fold(0.0, f64::max)
}

/// Lower bound in seconds on the time by which gathers delay the first forward pass beyond their hidden cost, for a bound
/// that counts the least time of this pass; 0 without gathers that overlap with it, and with several stages.
pub(super) fn uncounted_gathers(
    segments: &SegmentSolver,
    context: &Context,
    layouts: Layouts,
) -> f64 {
    let Some(times) = LeastTimes::new(segments, context, layouts) else { return 0.0 };
    (times.added(0) - (1.0 - times.overlapped) * times.passes[0]).max(0.0)
}
