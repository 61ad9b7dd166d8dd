//! What no step in a context is shorter than, before its blocks are divided.

use narrows_cost_model::Prices;
use narrows_plan::Seconds;
use narrows_plan::emit::{
    OpParameters, ParameterRole, WeightSplit, parameter_reduce, parameter_update,
};
use narrows_plan::graph::SegmentKind;
use narrows_plan::strategy::{BoundaryLayout, Context};

use crate::divide::block_part;
use crate::fit::{Infeasible, MemoryEvidence};
use crate::predict::model_flops;
use crate::request::Request;
use crate::segments::{SegmentSolver, SegmentSpec};

/// A lower bound on the step time in a context, or why nothing can exist there.
pub(crate) fn bound(
    request: &Request,
    segments: &SegmentSolver,
    context: &Context,
) -> Result<Seconds, Infeasible> {
    if let Some(refusal) = too_large(request, context) {
        return Err(refusal);
    }
    let mesh = context.mesh;
    let turn = segments
        .borders(context)
        .into_iter()
        .filter_map(|border| least_turn(segments, context, border))
        .min_by(f64::total_cmp)
        .ok_or(Infeasible::NoStrategy)?;
    let microbatches = context.workload.microbatches(&mesh) as f64;
    let stages = mesh.pipeline as f64;
    let filled = 1.0 - (1.0 - 1.0 / microbatches).powi(mesh.pipeline as i32);
    let evenly = microbatches * turn / stages + least_step(request, context);
    Ok(Seconds(evenly.max(turn / filled)))
}

/// A bound without solving anything: the model's FLOPs at the devices' peak.
pub(crate) fn quick_bound(request: &Request, context: &Context) -> Result<Seconds, Infeasible> {
    if let Some(refusal) = too_large(request, context) {
        return Err(refusal);
    }
    let flops = model_flops(&request.model, request.sequence_length);
    let peak = request.profile.peak_flops_per_s_of(context.mesh.devices(), context.compute());
    Ok(Seconds(flops * request.global_batch as f64 / peak))
}

/// The least a stage of average size spends once a step: its share of the gradients reduced in one
/// collective over the data axis, and AdamW over what it updates.
///
/// Corrected by measurements, one large collective may be dearer than the small ones it stands for:
/// then nothing is known.
fn least_step(request: &Request, context: &Context) -> f64 {
    if request.profile.file().measured.is_some() {
        return 0.0;
    }
    let parameter = average_stage(request, context);
    let prices = Prices::new(&request.profile, request.executor, &context.mesh);
    parameter_reduce(&parameter, context)
        .iter()
        .chain(&parameter_update(&parameter, context))
        .map(|template| prices.kernel(&template.kernel()).0)
        .sum()
}

/// The least forward and backward time of a microbatch over the whole model.
fn least_turn(segments: &SegmentSolver, context: &Context, border: BoundaryLayout) -> Option<f64> {
    let turn = |part| segments.least_turn(part, context);
    let mut shape_turns = vec![None; segments.shapes()];
    for &shape in segments.layer_shapes() {
        if shape_turns[shape].is_none() {
            shape_turns[shape] = Some(turn(block_part(shape, border))?);
        }
    }
    let blocks: f64 = segments.layer_shapes().iter().filter_map(|shape| shape_turns[*shape]).sum();
    let end = |kind| turn(SegmentSpec::end(kind, border, None));
    Some(blocks + end(SegmentKind::Embedding)? + end(SegmentKind::Head)?)
}

/// All parameters, split perfectly: the share of a device on a stage of average size.
fn average_stage(request: &Request, context: &Context) -> OpParameters {
    let mesh = context.mesh;
    let elements = request.model.parameters() / (mesh.tensor * mesh.pipeline);
    OpParameters {
        role: ParameterRole::Matrix,
        members: vec![("all".into(), mesh.tensor, elements)],
        split: WeightSplit::Columns,
        gradient_partial: false,
    }
}

/// Even perfectly sharded, weights and optimizer states must fit.
fn too_large(request: &Request, context: &Context) -> Option<Infeasible> {
    let needed = average_stage(request, context).resident_bytes(context);
    let limit = request.memory_bytes();
    (needed > limit).then_some(Infeasible::Memory {
        stage: None,
        needed,
        limit,
        of: MemoryEvidence::Every,
    })
}
