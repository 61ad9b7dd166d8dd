//! Lower bound on a step whose gradient reductions take longer than the backward pass that they overlap with.
//!
//! On one stage, the reductions begin when the head's backward pass has ended, and run one after the other. While they
//! overlap, a reduction takes k times as long and computation c times. Let R be the time of the reductions, F and B the
//! times of a microbatch's passes, and H the part of B that the head takes. Then the last reduction ends at
//!
//! ```text
//! m·F + (m − 1)·B + H + R + c·(1 − 1/k)·(B − H)
//! ```
//! or later: all computation after H overlaps with reductions or runs between two of them, and the latter costs more as
//! long as c·(1 − 1/k) is below 1.

use narrows_plan::Context;
use narrows_plan::graph::SegmentKind;
use narrows_plan::strategy::{BoundaryLayout, TiedWeightLayout};

use super::lower_bound::min_microbatch_time;
use crate::segment::{SegmentSolver, SegmentSpec};

/// Lower bound in seconds on the plans of a context with this boundary layout; 0 without reductions that
/// overlap with the backward pass, and with several stages.
pub(super) fn reduction_bound(
    segments: &SegmentSolver,
    context: &Context,
    (boundary, tied_weight): (BoundaryLayout, Option<TiedWeightLayout>),
) -> f64 {
    let Some(slowdown) = segments.prices().overlap_slowdown() else { return 0.0 };
    if !context.overlap_grad_reduce || context.mesh.pipeline > 1 {
        return 0.0;
    }
    let overlapped = (slowdown.compute * (1.0 - 1.0 / slowdown.collective)).min(1.0);
    let end = |kind| SegmentSpec::embedding_or_head(kind, boundary, tied_weight);
    let (embedding, head) = (end(SegmentKind::Embedding), end(SegmentKind::Head));
    let shapes = (0..segments.shape_count()).map(|shape| {
        let blocks = segments.layer_shapes().iter().filter(|other| **other == shape).count();
        (SegmentSpec::block(shape, boundary), blocks)
    });
    let (mut forward, mut step_phase) = (0.0, 0.0);
    for (spec, count) in shapes.chain([(embedding, 1), (head, 1)]) {
        forward += count as f64 * segments.min_pass_times(spec, context).forward;
        // The step phase counts the time that a hidden reduction adds; here reductions count in full.
        let [step_phase_min, _] = segments.step_phase_range(spec, context);
        let reductions = segments.overlapped_min(spec, context);
        step_phase += count as f64 * (step_phase_min + reductions * (1.0 - slowdown.hidden_cost()));
    }
    let head_backward = segments.min_pass_times(head, context).backward;
    let microbatch_time = min_microbatch_time(segments, context, boundary).unwrap_or(0.0);
    let microbatches = context.workload.microbatches(&context.mesh) as f64;
    (microbatches - 1.0 + overlapped) * microbatch_time
        + (1.0 - overlapped) * (forward + head_backward)
        + step_phase
}
