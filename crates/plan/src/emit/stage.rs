//! What a stage runs besides its segments: transfers to its neighbours, and the once-a-step work
//! that belongs to no op.

use crate::kernel::CollectiveKind;
use crate::mesh::Axis;
use crate::program::{Action, Exchange, Extent, Hop, PassOp, Reduction};
use crate::strategy::{Context, Zero};
use crate::{Bytes, DType, EdgeLayout, Layout};

use super::reshard::activation;
use super::{Operand, Slot, Template};

/// Sends (`Before`) the hidden state or its gradient to a neighbouring stage.
pub fn send(width: u64, layout: Layout, stage: u32, context: &Context) -> Template {
    let operand = Operand { slot: Slot::Before, extent: activation(width, layout, context) };
    let hop = Hop { stage, group: context.mesh.group(Axis::Pipeline) };
    Template { action: Action::Send(hop), reads: vec![operand], writes: vec![] }
}

/// Receives (`After`) the hidden state or its gradient from a neighbouring stage.
pub fn receive(width: u64, layout: Layout, stage: u32, context: &Context) -> Template {
    let operand = Operand { slot: Slot::After, extent: activation(width, layout, context) };
    let hop = Hop { stage, group: context.mesh.group(Axis::Pipeline) };
    Template { action: Action::Receive(hop), reads: vec![], writes: vec![operand] }
}

/// The transfers of one microbatch on a stage: (forward pass, backward pass).
pub fn hops(
    width: u64,
    border: EdgeLayout,
    stage: u64,
    context: &Context,
) -> (Vec<Template>, Vec<Template>) {
    let (mut forward, mut backward) = (vec![], vec![]);
    if stage > 0 {
        let before = stage as u32 - 1;
        forward.push(receive(width, border.forward, before, context));
        backward.push(send(width, border.backward, before, context));
    }
    if stage + 1 < context.mesh.pipeline {
        let after = stage as u32 + 1;
        forward.push(send(width, border.forward, after, context));
        backward.insert(0, receive(width, border.backward, after, context));
    }
    (forward, backward)
}

/// Begins the step phase: zeroes the sum of squared gradients.
pub fn step_begin() -> Template {
    let writes = vec![square_sum()];
    Template { action: Action::Pass(PassOp::Fill), reads: vec![], writes }
}

/// Sums the squared gradients over every axis on which parts of them lie on different devices.
pub fn step_norm(context: &Context) -> Vec<Template> {
    let data_parts = context.zero == Zero::One;
    [(Axis::Tensor, true), (Axis::Data, data_parts), (Axis::Pipeline, true)]
        .into_iter()
        .filter(|(axis, split)| *split && context.size(*axis) > 1)
        .map(|(axis, _)| all_reduce(axis, square_sum(), context))
        .collect()
}

/// The gradient buffer of a parameter, as [`tied_reduce`] sees it.
pub fn gradient_extent(parameter: &super::OpParameter, context: &Context) -> Option<Extent> {
    super::parameter_extents(parameter, context)
        .into_iter()
        .find(|(slot, _)| *slot == Slot::WeightGradient(0))
        .map(|(_, extent)| extent)
}

/// Adds the gradients of a tied embedding over the first and last stage, which both hold it.
pub fn tied_reduce(gradient: Extent, context: &Context) -> Template {
    let operand = Operand { slot: Slot::WeightGradient(0), extent: gradient };
    let mut template = all_reduce(Axis::Pipeline, operand, context);
    if let Action::Collective(exchange) = &mut template.action {
        // Only the first and the last stage take part.
        exchange.group.size = 2;
        exchange.group.stride *= context.mesh.pipeline - 1;
        exchange.payload = gradient.bytes();
        exchange.statistic = Bytes(0);
    }
    template
}

fn square_sum() -> Operand {
    Operand { slot: Slot::SquareSum, extent: Extent { rows: 1, columns: 1, dtype: DType::F32 } }
}

fn all_reduce(axis: Axis, operand: Operand, context: &Context) -> Template {
    let exchange = Exchange {
        kind: CollectiveKind::AllReduce,
        axis,
        from: Layout::Partial,
        to: Layout::Replicated,
        payload: Bytes(0),
        statistic: operand.extent.bytes(),
        reduction: Reduction::Sum,
        group: context.mesh.group(axis),
    };
    Template { action: Action::Collective(exchange), reads: vec![operand], writes: vec![operand] }
}
