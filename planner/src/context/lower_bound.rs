//! Lower bounds on the step time of a context, before its blocks are divided.

use narrows_plan::emit::{InstrTemplate, reduce_gradient, update_parameter};
use narrows_plan::graph::SegmentKind;
use narrows_plan::model::{WeightId, WeightShape};
use narrows_plan::strategy::{BoundaryLayout, OpParameters};
use narrows_plan::{Context, Seconds, WeightSplit};

use crate::infeasible::{Infeasible, MemoryEvidence};
use crate::predict::model_flops;
use crate::request::Request;
use crate::segment::{SegmentSolver, SegmentSpec};

/// Lower bound on the step time of a context.
///
/// # Errors
/// The reason why the context has no plan.
pub(crate) fn lower_bound(
    request: &Request,
    segments: &SegmentSolver,
    context: &Context,
) -> Result<Seconds, Infeasible> {
    if let Some(infeasible) = too_large(request, context) {
        return Err(infeasible);
    }
    let mesh = context.mesh;
    let microbatch_time = segments
        .boundary_layouts(context)
        .into_iter()
        .filter_map(|boundary| min_microbatch_time(segments, context, boundary))
        .min_by(f64::total_cmp)
        .ok_or(Infeasible::NoStrategy)?;
    let microbatches = context.workload.microbatches(&mesh) as f64;
    let stages = mesh.pipeline as f64;
    let filled = 1.0 - (1.0 - 1.0 / microbatches).powi(mesh.pipeline as i32);
    let even = microbatches * microbatch_time / stages + min_step_time(request, segments, context);
    Ok(Seconds(even.max(microbatch_time / filled)))
}

/// Lower bound that needs no solver: the model's FLOPs at the devices' peak.
///
/// # Errors
/// The reason why the context has no plan.
pub(crate) fn flops_bound(request: &Request, context: &Context) -> Result<Seconds, Infeasible> {
    if let Some(infeasible) = too_large(request, context) {
        return Err(infeasible);
    }
    let flops = model_flops(&request.model, request.sequence_length);
    let peak =
        request.profile.total_peak_flops_per_s(context.mesh.devices(), context.compute_dtype());
    Ok(Seconds(flops * request.global_batch as f64 / peak))
}

/// Lower bound on the step phase of a stage of average size: its share of the gradients reduced in one
/// collective over the data axis, and AdamW over the parameters it updates.
///
/// Zero where prices are corrected by measurements: one large collective may then cost more than several small
/// ones.
fn min_step_time(request: &Request, segments: &SegmentSolver, context: &Context) -> f64 {
    if request.profile.file().measured.is_some() {
        return 0.0;
    }
    let parameters = average_stage(request, context);
    let prices = segments.prices();
    let price = |template: &InstrTemplate| prices.kernel_time(&template.kernel()).0;
    let hidden_cost = match prices.overlap_slowdown() {
        Some(slowdown) if context.overlap_grad_reduce => slowdown.hidden_cost(),
        _ => 1.0,
    };
    let reductions: f64 = reduce_gradient(&parameters, context).iter().map(price).sum();
    let updates: f64 = update_parameter(&parameters, context).iter().map(price).sum();
    hidden_cost * reductions + updates
}

/// Lower bound on forward plus backward time of one microbatch over the whole model.
pub(super) fn min_microbatch_time(
    segments: &SegmentSolver,
    context: &Context,
    boundary: BoundaryLayout,
) -> Option<f64> {
    let time = |spec| segments.min_microbatch_time(spec, context);
    let mut by_shape = vec![None; segments.shape_count()];
    for &shape in segments.layer_shapes() {
        if by_shape[shape].is_none() {
            by_shape[shape] = Some(time(SegmentSpec::block(shape, boundary))?);
        }
    }
    let blocks: f64 = segments.layer_shapes().iter().filter_map(|shape| by_shape[*shape]).sum();
    let end = |kind| time(SegmentSpec::embedding_or_head(kind, boundary, None));
    Some(blocks + end(SegmentKind::Embedding)? + end(SegmentKind::Head)?)
}

/// The parameters of a device on a stage of average size: all of them, split evenly.
fn average_stage(request: &Request, context: &Context) -> OpParameters {
    let mesh = context.mesh;
    let elements = request.model.parameters() / (mesh.tensor * mesh.pipeline);
    OpParameters {
        members: vec![WeightShape::new(WeightId::Head, mesh.tensor, elements)],
        split: WeightSplit::Columns,
        gradient_partial: false,
    }
}

/// Whether weights and optimizer states exceed the memory even when split evenly.
fn too_large(request: &Request, context: &Context) -> Option<Infeasible> {
    let needed = average_stage(request, context).resident_bytes(context);
    let limit = request.arena_limit();
    let evidence = MemoryEvidence::AllPlans;
    (needed > limit).then_some(Infeasible::Memory { stage: None, needed, limit, evidence })
}
