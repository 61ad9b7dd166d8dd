//! Templates of the step phase of a parameter.
//!
//! Partial gradients are all-reduced over the tensor axis, then all gradients over the data axis
//! (ZeRO-1: reduce-scattered), beside the last backward pass where `Context::overlap_grad_reduce` is set. Squares are
//! summed for clipping, AdamW is applied, and with ZeRO-1 the new weights are all-gathered.

use crate::context::{Context, Zero};
use crate::extent::Extent;
use crate::graph::SegmentKind;
use crate::mesh::Axis;
use crate::model::WeightId;
use crate::program::{Action, CollectiveFunction, CollectiveOp, FusedOp, Reduction};
use crate::strategy::OpParameters;
use crate::{Bytes, DType, Dim, Layout, Precision};

use super::{InstrTemplate, OperandSlot, TemplateOperand};

/// The resident buffers of an op's parameters: weight, gradient and optimizer states.
pub(crate) fn parameter_buffers(
    parameters: &OpParameters,
    context: &Context,
) -> Vec<TemplateOperand> {
    let mut buffers = vec![weight(parameters, context), gradient(parameters, context)];
    buffers.extend(optimizer_states(parameters, context));
    buffers
}

/// Reductions of a parameter's gradient, and the addition of its square to the square sum.
pub fn reduce_gradient(parameters: &OpParameters, context: &Context) -> Vec<InstrTemplate> {
    let gradient = gradient(parameters, context);
    let mut templates = vec![];
    if parameters.gradient_partial {
        templates.push(reduce(
            Axis::Tensor,
            CollectiveFunction::AllReduce(Reduction::Sum),
            gradient,
            context,
        ));
    }
    if context.mesh.data > 1 {
        let kind = match context.zero {
            Zero::Off => CollectiveFunction::AllReduce(Reduction::Sum),
            Zero::One => CollectiveFunction::ReduceScatter,
        };
        templates.push(reduce(Axis::Data, kind, gradient, context));
    }
    let square_sum =
        TemplateOperand { slot: OperandSlot::SquareSum, extent: Extent::flat(1, DType::F32) };
    templates.push(InstrTemplate {
        action: Action::Fused(FusedOp::SquareSum),
        reads: vec![updated_part(gradient, parameters, context), square_sum],
        writes: vec![square_sum],
    });
    templates
}

/// The step phase of a gradient before the update.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GradientReductions {
    /// The reduction over the data axis, where it may run beside the last backward pass.
    pub overlapped: Option<InstrTemplate>,
    /// The other reductions, and the addition of its square to the square sum.
    pub rest: Vec<InstrTemplate>,
}

impl GradientReductions {
    /// All instructions, for gradients that are reduced after the last backward pass.
    pub fn into_all(self) -> impl Iterator<Item = InstrTemplate> {
        self.overlapped.into_iter().chain(self.rest)
    }
}

/// As [`reduce_gradient`], for a parameter of a segment of this kind. The square of a tied weight on two stages is
/// counted on the stage of the head only.
///
/// Gradients that are partial over the tensor axis are reduced over it first, so nothing of theirs overlaps. The
/// gradients of the embedding and of a tied weight are complete when the backward pass has ended.
pub fn reduce_owned_gradient(
    kind: SegmentKind,
    parameters: &OpParameters,
    tied: bool,
    context: &Context,
) -> GradientReductions {
    let mut rest = reduce_gradient(parameters, context);
    if tied && kind == SegmentKind::Embedding {
        rest.retain(|template| template.action != Action::Fused(FusedOp::SquareSum));
    }
    let is_tied = tied && parameters.members.iter().any(|member| member.weight == WeightId::Head);
    let is_complete_early = kind != SegmentKind::Embedding && !is_tied;
    let overlaps = context.overlap_grad_reduce
        && context.mesh.data > 1
        && is_complete_early
        && !parameters.gradient_partial;
    // Without a reduction over the tensor axis, the one over the data axis comes first.
    let overlapped = overlaps.then(|| rest.remove(0));
    GradientReductions { overlapped, rest }
}

/// AdamW on a parameter and, with ZeRO-1, the all-gather of the new weights.
pub fn update_parameter(parameters: &OpParameters, context: &Context) -> Vec<InstrTemplate> {
    let (weight, gradient) = (weight(parameters, context), gradient(parameters, context));
    let weight_part = updated_part(weight, parameters, context);
    let states = optimizer_states(parameters, context);
    let mut reads = vec![updated_part(gradient, parameters, context)];
    reads.extend(&states);
    if context.precision == Precision::Fp32 {
        reads.push(weight_part);
    }
    // The whole gradient is zeroed: the parts that other replicas update have summands of this replica.
    let mut writes = vec![weight_part, gradient];
    writes.extend(states);
    let mut templates =
        vec![InstrTemplate { action: Action::Fused(FusedOp::AdamW), reads, writes }];
    if context.zero == Zero::One && context.mesh.data > 1 {
        templates.push(gather_weights(weight, context));
    }
    templates
}

fn weight(parameters: &OpParameters, context: &Context) -> TemplateOperand {
    TemplateOperand { slot: OperandSlot::Weight(0), extent: parameters.weight_extent(context) }
}

fn gradient(parameters: &OpParameters, context: &Context) -> TemplateOperand {
    let extent = parameters.gradient_extent(context);
    TemplateOperand { slot: OperandSlot::WeightGradient(0), extent }
}

fn optimizer_states(parameters: &OpParameters, context: &Context) -> Vec<TemplateOperand> {
    let extent = parameters.state_extent(context);
    let mut slots = vec![OperandSlot::FirstMoment(0), OperandSlot::SecondMoment(0)];
    if context.precision == Precision::MixedBf16 {
        slots.push(OperandSlot::Master(0));
    }
    slots.into_iter().map(|slot| TemplateOperand { slot, extent }).collect()
}

/// The part of a buffer that this device updates.
fn updated_part(
    whole: TemplateOperand,
    parameters: &OpParameters,
    context: &Context,
) -> TemplateOperand {
    let columns = parameters.updated_elements(context);
    TemplateOperand { extent: Extent { columns, ..whole.extent }, ..whole }
}

fn reduce(
    axis: Axis,
    function: CollectiveFunction,
    gradient: TemplateOperand,
    context: &Context,
) -> InstrTemplate {
    let to = match function {
        CollectiveFunction::ReduceScatter => Layout::Sharded(Dim::Feature),
        _ => Layout::Replicated,
    };
    collective(axis, function, (Layout::Partial, to), gradient, context)
}

fn gather_weights(weight: TemplateOperand, context: &Context) -> InstrTemplate {
    let layouts = (Layout::Sharded(Dim::Feature), Layout::Replicated);
    collective(Axis::Data, CollectiveFunction::AllGather, layouts, weight, context)
}

fn collective(
    axis: Axis,
    function: CollectiveFunction,
    (from, to): (Layout, Layout),
    operand: TemplateOperand,
    context: &Context,
) -> InstrTemplate {
    let op = CollectiveOp {
        function,
        axis,
        from,
        to,
        payload: operand.extent.bytes(),
        statistic: Bytes(0),
        group: context.mesh.group(axis),
    };
    InstrTemplate { action: Action::Collective(op), reads: vec![operand], writes: vec![operand] }
}
