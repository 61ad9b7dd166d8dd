//! A stage of average size: least memory of its weights and optimizer states, and least time of its step phase.

use narrows_plan::emit::{CoalescedCollective, MultiTensorOp, update_parameter};
use narrows_plan::model::{WeightId, WeightShape};
use narrows_plan::program::Action;
use narrows_plan::strategy::OpParameters;
use narrows_plan::{Bytes, Context, WeightSplit};

use crate::infeasible::{Infeasible, MemoryEvidence};
use crate::request::Request;
use crate::segment::SegmentSolver;

/// Lower bounds on the step phase of a stage of average size, in seconds: its share of the gradients reduced in one
/// collective over the data axis, and AdamW over the parameters it updates.
#[derive(Default)]
pub(super) struct StepPhaseMin {
    /// The reductions.
    pub reductions: f64,
    /// The least time that the reductions add to a step where they overlap with computation.
    pub counted_reductions: f64,
    /// The updates, with the least time that the gathers of updated weights add to a step.
    pub updates: f64,
}

/// Zero where prices are corrected by measurements: one large collective may then cost more than several small
/// ones.
pub(super) fn min_step_phase(
    request: &Request,
    segments: &SegmentSolver,
    context: &Context,
) -> StepPhaseMin {
    if request.profile.file().measured.is_some() {
        return StepPhaseMin::default();
    }
    let parameters = average_stage(segments.parameters(), context);
    let prices = segments.prices(context);
    let collective = |collective: CoalescedCollective| {
        let operand = collective.operand(&parameters, context)?;
        let action = Action::Collective(collective.op(operand.extent.bytes(), context));
        Some(prices.kernel_time(&action.kernel(&[], &[])).0)
    };
    let hidden_cost = match prices.overlap_slowdown() {
        Some(slowdown) if context.overlap_grad_reduce => slowdown.hidden_cost(),
        _ => 1.0,
    };
    let reductions = CoalescedCollective::REDUCTIONS.into_iter().filter_map(collective).sum();
    // Of the gradients that no GEMM overwrites, this leaves out that they are zeroed.
    let is_overwritten = !context.accumulates_gradients;
    let update = update_parameter(&parameters, is_overwritten, context);
    let update = prices.kernel_time(&MultiTensorOp::AdamW.kernel(update.traffic(), 1)).0;
    let gather_cost = match prices.overlap_slowdown() {
        Some(slowdown) if context.gathers_in_forward() => slowdown.hidden_cost(),
        _ => 1.0,
    };
    let gather = collective(CoalescedCollective::AllGather).unwrap_or(0.0);
    let updates = update + gather_cost * gather;
    StepPhaseMin { reductions, counted_reductions: hidden_cost * reductions, updates }
}

/// The parameters of a device on a stage of average size, of a model with this many: all of them, split evenly.
fn average_stage(parameters: u64, context: &Context) -> OpParameters {
    evenly_split(parameters / context.mesh.pipeline, context)
}

/// A device's share of this many parameters. They count as parameters of blocks, of which ZeRO shards no less than of
/// embedding and head.
fn evenly_split(elements: u64, context: &Context) -> OpParameters {
    let tensor = context.mesh.tensor;
    OpParameters {
        members: vec![WeightShape::new(WeightId::Norm1, tensor, elements / tensor)],
        split: WeightSplit::Columns,
        gradient_partial: false,
    }
}

/// Lower bound on the memory of the fullest stage that needs no solver, for a model with this many parameters: weights and
/// optimizer states, split evenly.
pub(crate) fn resident_bytes_min(parameters: u64, context: &Context) -> Bytes {
    average_stage(parameters, context).resident_bytes(context)
}

/// Lower bound on the bytes of the weights and optimizer states of this many parameters on a device.
pub(super) fn evenly_split_bytes(elements: u64, context: &Context) -> Bytes {
    evenly_split(elements, context).resident_bytes(context)
}

/// Whether weights and optimizer states of a model with this many parameters exceed the limit even when split evenly.
pub(super) fn too_large(parameters: u64, context: &Context, limit: Bytes) -> Option<Infeasible> {
    let needed = resident_bytes_min(parameters, context);
    let evidence = MemoryEvidence::AllPlans;
    (needed > limit).then_some(Infeasible::Memory { stage: None, needed, limit, evidence })
}
