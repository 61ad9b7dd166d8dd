//! Templates of the reshards between the producer and the consumers of a value, forward and backward.

use crate::Layout;
use crate::context::Context;
use crate::graph::{Op, OpId, Segment, SegmentKind, Value, ValueId};
use crate::program::Action;
use crate::strategy::{Flow, Save, SegmentChoice};

use super::{InstrTemplate, gradient_fill, gradient_sum, reshard};

/// The reshard that computes copy `copy` of a value from the producer's, in the forward pass.
pub fn copy_forward(
    value: &Value,
    flow: &Flow,
    copy: usize,
    context: &Context,
) -> Vec<InstrTemplate> {
    let statistic = flow.producer.norm_pending && value.carries_statistic_of.is_some();
    copy_from_first(value, flow, copy, statistic, context)
}

/// The same reshard in the backward pass, where the statistic is reduced already.
pub fn copy_recompute(
    value: &Value,
    flow: &Flow,
    copy: usize,
    context: &Context,
) -> Vec<InstrTemplate> {
    copy_from_first(value, flow, copy, false, context)
}

fn copy_from_first(
    value: &Value,
    flow: &Flow,
    copy: usize,
    statistic: bool,
    context: &Context,
) -> Vec<InstrTemplate> {
    if copy == 0 {
        return vec![];
    }
    let to = flow.copies()[copy];
    reshard(value.width(), flow.producer.forward, to, statistic, context).unwrap_or_default()
}

/// The instructions that bring the gradient contributions of one layout to the producer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GradientPath {
    /// The layout of the contributions.
    pub layout: Layout,
    /// Zeroes the sum before the first contribution; `None` where the last consumer writes the sum.
    pub fill: Option<InstrTemplate>,
    /// Reshards the sum to the producer's layout.
    pub reshard: Vec<InstrTemplate>,
    /// Adds the result to that of the first path.
    pub sum: Option<InstrTemplate>,
}

/// The paths of a gradient to the producer, in the order of [`Flow::gradients`].
pub(crate) fn gradient_paths(value: &Value, flow: &Flow, context: &Context) -> Vec<GradientPath> {
    let layouts = flow.gradients().into_iter().enumerate();
    layouts.map(|(index, layout)| gradient_path(value, flow, (index, layout), context)).collect()
}

fn gradient_path(
    value: &Value,
    flow: &Flow,
    (index, layout): (usize, Layout),
    context: &Context,
) -> GradientPath {
    let width = value.width();
    let target = flow.producer.backward;
    GradientPath {
        layout,
        fill: (index > 0).then(|| gradient_fill(width, layout, context)),
        reshard: reshard(width, layout, target, false, context).unwrap_or_default(),
        sum: (index > 0).then(|| gradient_sum(width, target, context)),
    }
}

/// The linear whose weight-gradient GEMM overlaps with the collective that reshards a value's gradient: the consumer that
/// contributes last. `None` where the gradient has no such collective, or contributions in two layouts.
pub fn overlapped_weight_gradient(
    segment: &Segment,
    id: ValueId,
    flow: &Flow,
    context: &Context,
) -> Option<OpId> {
    let value = segment.value(id);
    let &(consumer, _) = value.consumers.first()?;
    let is_linear = matches!(segment.op(consumer).op, Op::Linear(_));
    if !context.overlap_tensor_collectives || !is_linear || flow.gradients().len() > 1 {
        return None;
    }
    let templates = gradient_backward(value, flow, 0, context);
    let has_collective =
        templates.iter().any(|template| matches!(template.action, Action::Collective(_)));
    has_collective.then_some(consumer)
}

/// Whether the weight-gradient GEMM of an op may run in a pass of its own, after the backward pass: a linear of a block
/// whose GEMM does not overlap with a collective, and whose output gradient is not overwritten. If a linear adds to the
/// hidden state or crosses into another block, later gradients are added to the buffer of its output gradient. The operands
/// of the head's GEMM are too large to be kept. Sharded gradients are reduced in the backward pass.
pub fn is_weight_gradient_deferrable(
    segment: &Segment,
    op: OpId,
    choice: &SegmentChoice,
    context: &Context,
) -> bool {
    let is_overlapped = |value: &ValueId| {
        let flow = &choice.flows[value.0 as usize];
        overlapped_weight_gradient(segment, *value, flow, context) == Some(op)
    };
    may_defer_weight_gradient(segment, op, context)
        && !segment.op(op).inputs.iter().any(is_overlapped)
}

/// Whether the weight-gradient GEMM of an op may run in a pass of its own where it does not overlap with a collective.
pub fn may_defer_weight_gradient(segment: &Segment, op: OpId, context: &Context) -> bool {
    let node = segment.op(op);
    segment.kind == SegmentKind::Block
        && !context.shards_gradients()
        && matches!(node.op, Op::Linear(_))
        && !node.outputs.iter().any(|output| shares_gradient(segment, *output))
}

/// Whether the gradient of a value may be that of a sum: additions pass it on as it is, and so may latents.
fn shares_gradient(segment: &Segment, value: ValueId) -> bool {
    segment.value(value).consumers.iter().any(|(consumer, _)| {
        let consumer = segment.op(*consumer);
        match consumer.op {
            Op::Add { .. } | Op::Cross { .. } => true,
            Op::Latent(_) => {
                consumer.outputs.iter().any(|output| shares_gradient(segment, *output))
            }
            Op::Embedding { .. }
            | Op::Norm { .. }
            | Op::Linear(_)
            | Op::Bias(_)
            | Op::QkNorm(_)
            | Op::Attention(_)
            | Op::GatedProduct { .. }
            | Op::GateBias { .. }
            | Op::TensorGate { .. }
            | Op::LatentNorm { .. }
            | Op::Loss { .. } => false,
        }
    })
}

/// All instructions of a flow in the forward pass.
pub fn flow_forward(value: &Value, flow: &Flow, context: &Context) -> Vec<InstrTemplate> {
    (1..flow.copies().len()).flat_map(|copy| copy_forward(value, flow, copy, context)).collect()
}

/// The reshards that recompute copies in the backward pass.
pub fn flow_recompute(value: &Value, flow: &Flow, context: &Context) -> Vec<InstrTemplate> {
    (1..flow.copies().len())
        .filter(|copy| flow.saves[*copy] == Save::Recomputed)
        .flat_map(|copy| copy_recompute(value, flow, copy, context))
        .collect()
}

/// The instructions that bring the gradient contributions of one layout, an index into [`Flow::gradients`], to the
/// producer.
pub fn gradient_backward(
    value: &Value,
    flow: &Flow,
    gradient: usize,
    context: &Context,
) -> Vec<InstrTemplate> {
    let layout = flow.gradients()[gradient];
    let path = gradient_path(value, flow, (gradient, layout), context);
    path.fill.into_iter().chain(path.reshard).chain(path.sum).collect()
}

/// All instructions of a flow in the backward pass, without recomputation.
pub fn flow_backward(value: &Value, flow: &Flow, context: &Context) -> Vec<InstrTemplate> {
    let gradients = 0..flow.gradients().len();
    gradients.flat_map(|gradient| gradient_backward(value, flow, gradient, context)).collect()
}
