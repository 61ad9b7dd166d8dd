//! Templates of the step phase of a parameter, and the collectives of a sharded one within passes.
//!
//! Partial gradients are all-reduced over the tensor axis, then all gradients over the data axis: reduce-scattered over
//! the shard group of ZeRO, and all-reduced over the replicas that hold the same shard, during the last backward pass
//! where `Context::overlap_grad_reduce` is set. Squares are summed for clipping, AdamW is applied, and with ZeRO the
//! new weights are all-gathered, during the next forward pass where `Context::gathers_in_forward` holds. A segment sums
//! the squares of all of its gradients in one instruction, and updates all of its parameters in one ([`MultiTensorOp`]).
//! Over the data axis, it has one collective of each kind for all of its parameters ([`CoalescedCollective`]), and a
//! second one where only some of them overlap with a pass. With ZeRO-2 the passes
//! reduce-scatter the gradients of blocks, and with ZeRO-3 they gather their weights; the step phase then has neither
//! collective.
//!
//! Where `Context::grad_reduce_dtype` is bf16, the step phase reduces a rounded copy of each gradient over the data axis, and
//! widens the result for the norm and the update. With ZeRO-2 and ZeRO-3 the gradients of a microbatch are rounded, for
//! linears by the GEMM that computes them, and their reduced parts are added to the fp32 sum over microbatches.

use crate::context::Context;
use crate::extent::Extent;
use crate::graph::{Op, SegmentKind};
use crate::kernel::Kernel;
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

/// A collective of the step phase over the data axis, one for several parameters of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CoalescedCollective {
    /// Reduces gradients to the parts that the members of the shard group update.
    ReduceScatter,
    /// Reduces gradients, or their parts, over the replicas that update the same elements.
    AllReduce,
    /// Gathers the updated weights.
    AllGather,
}

impl CoalescedCollective {
    /// The reductions of gradients, in their order.
    pub const REDUCTIONS: [CoalescedCollective; 2] =
        [CoalescedCollective::ReduceScatter, CoalescedCollective::AllReduce];

    /// The operand of a parameter, in place: its gradient, rounded where gradients are reduced in bf16, or its weight. `None`
    /// where the parameter does not need the collective.
    pub fn operand(self, parameters: &OpParameters, context: &Context) -> Option<TemplateOperand> {
        let (is_needed, operand) = match self {
            CoalescedCollective::ReduceScatter => (
                context.shard_size > 1 && !parameters.has_sharded_gradient(context),
                reduced_gradient(parameters, context),
            ),
            CoalescedCollective::AllReduce => (
                context.replica_group().size > 1,
                updated_part(reduced_gradient(parameters, context), parameters, context),
            ),
            CoalescedCollective::AllGather => (
                context.shard_size > 1 && !parameters.has_sharded_weight(context),
                weight(parameters, context),
            ),
        };
        is_needed.then_some(operand)
    }

    /// The collective of operands of this many bytes together.
    pub fn op(self, payload: Bytes, context: &Context) -> CollectiveOp {
        match self {
            CoalescedCollective::ReduceScatter => reduce_scatter(payload, context),
            CoalescedCollective::AllReduce => all_reduce_op(payload, context.replica_group()),
            CoalescedCollective::AllGather => all_gather(payload, context),
        }
    }
}

/// A fused op of the step phase, one for several parameters of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MultiTensorOp {
    /// Adds the squares of gradients to the square sum, which is its last operand.
    SquareSum,
    /// Updates parameters.
    AdamW,
}

/// Operands of one parameter in a [`MultiTensorOp`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterOperands {
    /// Operands read.
    pub reads: Vec<TemplateOperand>,
    /// Operands written.
    pub writes: Vec<TemplateOperand>,
}

impl ParameterOperands {
    /// Bytes read and written.
    pub fn traffic(&self) -> Bytes {
        self.reads.iter().chain(&self.writes).map(|operand| operand.extent.bytes()).sum()
    }
}

impl MultiTensorOp {
    /// The fused op.
    pub fn fused_op(self) -> FusedOp {
        match self {
            MultiTensorOp::SquareSum => FusedOp::SquareSum,
            MultiTensorOp::AdamW => FusedOp::AdamW,
        }
    }

    /// The operand that all parameters share, read and written.
    pub fn shared_operand(self) -> Option<TemplateOperand> {
        match self {
            MultiTensorOp::SquareSum => Some(square_sum()),
            MultiTensorOp::AdamW => None,
        }
    }

    /// The kernel on so many parameters, whose operands have this traffic together.
    pub fn kernel(self, traffic: Bytes, parameters: u64) -> Kernel {
        let shared = self.shared_operand().map_or(Bytes(0), |operand| operand.extent.bytes() * 2);
        Kernel::Fused(self.fused_op().kernel_of_traffic(traffic + shared, parameters))
    }
}

/// The all-reduce over the tensor axis of a gradient that is partial over it.
pub fn reduce_over_tensor(parameters: &OpParameters, context: &Context) -> Option<InstrTemplate> {
    let group = context.mesh.group(Axis::Tensor);
    parameters.gradient_partial.then(|| all_reduce(group, gradient(parameters, context)))
}

/// Rounds a gradient for its reductions over the data axis. `None` where it is reduced in fp32, or not at all.
pub fn round_gradient(parameters: &OpParameters, context: &Context) -> Option<InstrTemplate> {
    let gradient = gradient(parameters, context);
    is_rounded(parameters, context).then(|| cast(gradient, rounded(gradient)))
}

/// Widens the reduced part of a rounded gradient. `None` where the gradient is not rounded.
pub fn widen_gradient(parameters: &OpParameters, context: &Context) -> Option<InstrTemplate> {
    let gradient = gradient(parameters, context);
    let part = |whole| updated_part(whole, parameters, context);
    is_rounded(parameters, context).then(|| cast(part(rounded(gradient)), part(gradient)))
}

fn is_rounded(parameters: &OpParameters, context: &Context) -> bool {
    let reductions = CoalescedCollective::REDUCTIONS.into_iter();
    context.rounds_gradients()
        && reductions.filter_map(|reduction| reduction.operand(parameters, context)).count() > 0
}

/// The gradient whose square is added to the square sum. `None` for the embedding's copy of a tied weight, whose square the
/// head counts.
pub fn count_square(
    kind: SegmentKind,
    parameters: &OpParameters,
    tied: bool,
    context: &Context,
) -> Option<ParameterOperands> {
    let counted = updated_part(gradient(parameters, context), parameters, context);
    let operands = ParameterOperands { reads: vec![counted], writes: vec![] };
    (!tied || kind != SegmentKind::Embedding).then_some(operands)
}

/// Whether the reductions of a gradient over the data axis may run during the last backward pass.
///
/// Gradients that are partial over the tensor axis are reduced over it first, so nothing of theirs overlaps. The
/// gradients of the embedding and of a tied weight are complete when the backward pass has ended. Where passes have
/// collectives over the shard group, whole gradients are reduced over it in the step phase: one communicator serves one
/// stream at a time.
pub fn is_reduced_in_backward(
    kind: SegmentKind,
    parameters: &OpParameters,
    tied: bool,
    context: &Context,
) -> bool {
    let is_complete_early = kind != SegmentKind::Embedding && !is_tied_head(parameters, tied);
    let uses_other_group = !context.shards_gradients() || parameters.has_sharded_gradient(context);
    context.overlap_grad_reduce
        && is_complete_early
        && uses_other_group
        && !parameters.gradient_partial
}

/// Whether the updated weights of a parameter are gathered during the first forward pass of the next step. The pass begins
/// with the embedding, which may read a tied weight.
pub fn is_gathered_in_forward(
    kind: SegmentKind,
    parameters: &OpParameters,
    tied: bool,
    context: &Context,
) -> bool {
    context.gathers_in_forward()
        && kind != SegmentKind::Embedding
        && !is_tied_head(parameters, tied)
}

fn is_tied_head(parameters: &OpParameters, tied: bool) -> bool {
    tied && parameters.members.iter().any(|member| member.weight == WeightId::Head)
}

/// Whether the passes of a step overwrite the gradient of the last step: with one microbatch, what the GEMM of a linear
/// computes or a reduce-scatter writes is the sum. Other ops add to their gradients, which must be zero.
pub fn is_gradient_overwritten(op: &Op, parameters: &OpParameters, context: &Context) -> bool {
    match parameters.has_sharded_gradient(context) {
        true => !context.accumulates_parts(),
        false => matches!(op, Op::Linear(_)) && !context.accumulates_gradients,
    }
}

/// The operands of AdamW on a parameter: read are the gradient, the moments, and the master copy or an fp32 weight; written
/// are the weight, the gradient unless the next step overwrites it, the moments and the master copy.
pub fn update_parameter(
    parameters: &OpParameters,
    is_gradient_overwritten: bool,
    context: &Context,
) -> ParameterOperands {
    let (weight, gradient) = (weight(parameters, context), gradient(parameters, context));
    let weight_part = updated_part(weight, parameters, context);
    let states = optimizer_states(parameters, context);
    let mut reads = vec![updated_part(gradient, parameters, context)];
    reads.extend(&states);
    if context.precision == Precision::Fp32 {
        reads.push(weight_part);
    }
    // The whole gradient is zeroed: the parts that other replicas update have summands of this replica.
    let mut writes = vec![weight_part];
    writes.extend((!is_gradient_overwritten).then_some(gradient));
    writes.extend(states);
    ParameterOperands { reads, writes }
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

/// A gradient in the format of its reductions over the data axis.
fn reduced_gradient(parameters: &OpParameters, context: &Context) -> TemplateOperand {
    let gradient = gradient(parameters, context);
    if context.rounds_gradients() { rounded(gradient) } else { gradient }
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
    let slots = OperandSlot::optimizer_states(context.precision).iter();
    slots.map(|slot| TemplateOperand { slot: *slot, extent }).collect()
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

/// The square sum of the stage, a scalar.
pub(super) fn square_sum() -> TemplateOperand {
    TemplateOperand { slot: OperandSlot::SquareSum, extent: Extent::flat(1, DType::F32) }
}

/// The all-reduce of a gradient over a device group.
pub(super) fn all_reduce(group: DeviceGroup, operand: TemplateOperand) -> InstrTemplate {
    let op = all_reduce_op(operand.extent.bytes(), group);
    InstrTemplate { action: Action::Collective(op), reads: vec![operand], writes: vec![operand] }
}

fn all_reduce_op(payload: Bytes, group: DeviceGroup) -> CollectiveOp {
    let function = CollectiveFunction::AllReduce(Reduction::Sum);
    collective(function, (Layout::Partial, Layout::Replicated), payload, group)
}

fn collective(
    function: CollectiveFunction,
    (from, to): (Layout, Layout),
    payload: Bytes,
    group: DeviceGroup,
) -> CollectiveOp {
    CollectiveOp { function, axis: group.axis, from, to, payload, statistic: Bytes(0), group }
}
