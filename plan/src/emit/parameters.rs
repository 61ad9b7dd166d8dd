//! Templates of the step phase of a parameter, and the collectives of a sharded one within passes.
//!
//! Partial gradients are all-reduced over the tensor axis, then all gradients over the data axis: reduce-scattered over
//! the shard group of ZeRO, and all-reduced over the replicas that hold the same shard, during the last backward pass
//! where `Context::overlap_grad_reduce` is set. Squares are summed for clipping, AdamW is applied, and with ZeRO the
//! new weights are all-gathered. With ZeRO-2 the passes reduce-scatter the gradients of blocks, and with ZeRO-3 they
//! gather their weights; the step phase then has neither collective.
//!
//! Where `Context::grad_reduce_dtype` is bf16, the step phase reduces a rounded copy of each gradient over the data axis, and
//! widens the result for the norm and the update. With ZeRO-2 and ZeRO-3 the gradients of a microbatch are rounded, for
//! linears by the GEMM that computes them, and their reduced parts are added to the fp32 sum over microbatches.

use crate::context::Context;
use crate::extent::Extent;
use crate::graph::{Op, SegmentKind};
use crate::mesh::{Axis, DeviceGroup};
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
        templates.push(all_reduce(context.mesh.group(Axis::Tensor), gradient));
    }
    templates.extend(reduce_over_data(parameters, context));
    let square_sum =
        TemplateOperand { slot: OperandSlot::SquareSum, extent: Extent::flat(1, DType::F32) };
    templates.push(InstrTemplate {
        action: Action::Fused(FusedOp::SquareSum),
        reads: vec![updated_part(gradient, parameters, context), square_sum],
        writes: vec![square_sum],
    });
    templates
}

/// The reductions of a gradient over the data axis in the step phase, with the casts around them where they are in
/// bf16.
fn reduce_over_data(parameters: &OpParameters, context: &Context) -> Vec<InstrTemplate> {
    let gradient = gradient(parameters, context);
    let reduced = if context.rounds_gradients() { rounded(gradient) } else { gradient };
    let part = |whole| updated_part(whole, parameters, context);
    let mut templates = vec![];
    if context.shard_size > 1 && !parameters.has_sharded_gradient(context) {
        templates.push(in_place(reduce_scatter(reduced.extent.bytes(), context), reduced));
    }
    if context.replica_group().size > 1 {
        templates.push(all_reduce(context.replica_group(), part(reduced)));
    }
    if context.rounds_gradients() && !templates.is_empty() {
        templates.insert(0, cast(gradient, reduced));
        templates.push(cast(part(reduced), part(gradient)));
    }
    templates
}

/// The step phase of a gradient before the update.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GradientReductions {
    /// The reductions over the data axis, where they may run during the last backward pass.
    pub overlapped: Vec<InstrTemplate>,
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
/// gradients of the embedding and of a tied weight are complete when the backward pass has ended. Where passes have
/// collectives over the shard group, whole gradients are reduced over it in the step phase: one communicator serves one
/// stream at a time.
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
    let uses_other_group = !context.shards_gradients() || parameters.has_sharded_gradient(context);
    let overlaps = context.overlap_grad_reduce
        && is_complete_early
        && uses_other_group
        && !parameters.gradient_partial;
    // Without a reduction over the tensor axis, the reductions over the data axis come first.
    let overlapped = if overlaps { reduce_over_data(parameters, context).len() } else { 0 };
    GradientReductions { overlapped: rest.drain(..overlapped).collect(), rest }
}

/// AdamW on a parameter and, where ZeRO shards only its states and gradient, the all-gather of the new weights.
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
    if context.shard_size > 1 && !parameters.has_sharded_weight(context) {
        templates.push(in_place(all_gather(weight.extent.bytes(), context), weight));
    }
    templates
}

/// The all-gather of weights of this many bytes over the shard group.
pub fn all_gather(payload: Bytes, context: &Context) -> CollectiveOp {
    let layouts = (Layout::Sharded(Dim::Feature), Layout::Replicated);
    collective(CollectiveFunction::AllGather, layouts, payload, context.shard_group())
}

/// The reduce-scatter of gradients of this many bytes over the shard group.
pub fn reduce_scatter(payload: Bytes, context: &Context) -> CollectiveOp {
    let layouts = (Layout::Partial, Layout::Sharded(Dim::Feature));
    collective(CollectiveFunction::ReduceScatter, layouts, payload, context.shard_group())
}

/// Zeroes the gradient of a microbatch: ops other than linears add to it, and where it is padded to equal parts, the
/// padding counts in the gradient norm. `None` where the GEMM of a linear writes all of it.
pub fn zero_microbatch_gradient(
    op: &Op,
    parameters: &OpParameters,
    context: &Context,
) -> Option<InstrTemplate> {
    let is_padded = !parameters.elements(context).is_multiple_of(context.shard_size);
    let extent = microbatch_gradient_extent(op, parameters, context);
    let gradient = TemplateOperand { slot: OperandSlot::MicrobatchGradient(0), extent };
    let action = Action::Fused(FusedOp::Fill);
    let template = InstrTemplate { action, reads: vec![], writes: vec![gradient] };
    (is_padded || !matches!(op, Op::Linear(_))).then_some(template)
}

/// Extent of the gradient of a microbatch as the pass writes it. One GEMM writes that of a linear, in the format of its
/// reduction; other ops add to theirs in fp32.
pub(crate) fn microbatch_gradient_extent(
    op: &Op,
    parameters: &OpParameters,
    context: &Context,
) -> Extent {
    let whole = parameters.whole_gradient_extent(context);
    match op {
        Op::Linear(_) => Extent { dtype: context.grad_reduce_dtype.dtype(), ..whole },
        _ => whole,
    }
}

/// Rounds the gradient of a microbatch for its reduction. `None` where it has the format of its reduction.
pub fn round_microbatch_gradient(
    op: &Op,
    parameters: &OpParameters,
    context: &Context,
) -> Option<InstrTemplate> {
    let extent = microbatch_gradient_extent(op, parameters, context);
    let gradient = TemplateOperand { slot: OperandSlot::MicrobatchGradient(0), extent };
    let is_rounded = extent.dtype == context.grad_reduce_dtype.dtype();
    (!is_rounded).then(|| cast(gradient, rounded(gradient)))
}

/// Adds the reduced part of a microbatch's gradient to the accumulated one.
pub fn accumulate_gradient_part(parameters: &OpParameters, context: &Context) -> InstrTemplate {
    let sum = gradient(parameters, context);
    let extent = Extent { dtype: context.grad_reduce_dtype.dtype(), ..sum.extent };
    let part = TemplateOperand { slot: OperandSlot::MicrobatchGradient(0), extent };
    let action = Action::Fused(FusedOp::AddInto);
    InstrTemplate { action, reads: vec![part, sum], writes: vec![sum] }
}

fn weight(parameters: &OpParameters, context: &Context) -> TemplateOperand {
    TemplateOperand { slot: OperandSlot::Weight(0), extent: parameters.weight_extent(context) }
}

fn gradient(parameters: &OpParameters, context: &Context) -> TemplateOperand {
    let extent = parameters.gradient_extent(context);
    TemplateOperand { slot: OperandSlot::WeightGradient(0), extent }
}

/// The bf16 copy of a gradient.
fn rounded(gradient: TemplateOperand) -> TemplateOperand {
    let extent = Extent { dtype: DType::Bf16, ..gradient.extent };
    TemplateOperand { slot: OperandSlot::RoundedGradient(0), extent }
}

fn cast(from: TemplateOperand, to: TemplateOperand) -> InstrTemplate {
    let action = Action::Fused(FusedOp::Cast);
    InstrTemplate { action, reads: vec![from], writes: vec![to] }
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

/// The all-reduce of a gradient over a device group.
pub(super) fn all_reduce(group: DeviceGroup, operand: TemplateOperand) -> InstrTemplate {
    let function = CollectiveFunction::AllReduce(Reduction::Sum);
    let layouts = (Layout::Partial, Layout::Replicated);
    in_place(collective(function, layouts, operand.extent.bytes(), group), operand)
}

fn in_place(op: CollectiveOp, operand: TemplateOperand) -> InstrTemplate {
    InstrTemplate { action: Action::Collective(op), reads: vec![operand], writes: vec![operand] }
}

fn collective(
    function: CollectiveFunction,
    (from, to): (Layout, Layout),
    payload: Bytes,
    group: DeviceGroup,
) -> CollectiveOp {
    CollectiveOp { function, axis: group.axis, from, to, payload, statistic: Bytes(0), group }
}
