//! Templates of a stage outside its segments: transfers between stages, and the part of the step
//! phase that belongs to no op.

use crate::context::Context;
use crate::graph::BoundaryTensor;
use crate::mesh::{Axis, DeviceGroup};
use crate::program::{
    Action, CollectiveFunction, CollectiveOp, Extent, FusedOp, P2pTransfer, Reduction,
};
use crate::strategy::BoundaryLayout;
use crate::{Bytes, EdgeLayout, Layout};

use super::parameters::{all_reduce, square_sum};
use super::reshard::activation;
use super::{InstrTemplate, OperandSlot, TemplateOperand};

/// Tensors that one stage sends to the next, with their layouts.
pub struct StageBoundary<'a> {
    /// The tensors, the hidden state first.
    pub tensors: &'a [BoundaryTensor],
    /// Their layouts.
    pub layout: BoundaryLayout,
}

impl StageBoundary<'_> {
    fn operands(
        &self,
        layout: impl Fn(EdgeLayout) -> Layout,
        context: &Context,
    ) -> Vec<TemplateOperand> {
        let tensors = self.tensors.iter().enumerate();
        tensors
            .map(|(index, tensor)| TemplateOperand {
                slot: OperandSlot::BoundaryTensor(index as u8),
                extent: activation(tensor.width, layout(self.layout.edge(index)), context),
            })
            .collect()
    }

    fn transfer(&self, peer: u64, context: &Context) -> P2pTransfer {
        let carries = self.tensors.iter().map(|tensor| tensor.id).collect();
        P2pTransfer {
            tensors: carries,
            peer_stage: peer as u32,
            group: context.mesh.group(Axis::Pipeline),
        }
    }

    fn send(
        &self,
        peer: u64,
        layout: impl Fn(EdgeLayout) -> Layout,
        context: &Context,
    ) -> InstrTemplate {
        let action = Action::Send(self.transfer(peer, context));
        InstrTemplate { action, reads: self.operands(layout, context), writes: vec![] }
    }

    fn receive(
        &self,
        peer: u64,
        layout: impl Fn(EdgeLayout) -> Layout,
        context: &Context,
    ) -> InstrTemplate {
        let action = Action::Receive(self.transfer(peer, context));
        InstrTemplate { action, reads: vec![], writes: self.operands(layout, context) }
    }
}

/// The transfers of one microbatch through a virtual stage: (forward pass, backward pass). `before` is the boundary to
/// the previous virtual stage, `after` that to the next.
pub fn stage_transfers(
    before: &StageBoundary,
    after: &StageBoundary,
    virtual_stage: usize,
    context: &Context,
) -> (Vec<InstrTemplate>, Vec<InstrTemplate>) {
    let stage_of = |virtual_stage: usize| context.stage_and_chunk(virtual_stage).0 as u64;
    let (mut forward, mut backward) = (vec![], vec![]);
    if virtual_stage > 0 {
        let peer = stage_of(virtual_stage - 1);
        forward.push(before.receive(peer, |edge| edge.forward, context));
        backward.push(before.send(peer, |edge| edge.backward, context));
    }
    if virtual_stage + 1 < context.virtual_stages() {
        let peer = stage_of(virtual_stage + 1);
        forward.push(after.send(peer, |edge| edge.forward, context));
        backward.insert(0, after.receive(peer, |edge| edge.backward, context));
    }
    (forward, backward)
}

/// Zeroes the square sum at the begin of the step phase.
pub fn clear_square_sum() -> InstrTemplate {
    let writes = vec![square_sum()];
    InstrTemplate { action: Action::Fused(FusedOp::Fill), reads: vec![], writes }
}

/// All-reduces the square sum over every axis along which devices have different gradients.
pub fn reduce_square_sum(context: &Context) -> Vec<InstrTemplate> {
    let mesh = &context.mesh;
    [mesh.group(Axis::Tensor), context.shard_group(), mesh.group(Axis::Pipeline)]
        .into_iter()
        .filter(|group| group.size > 1)
        .map(|group| all_reduce_statistic(group, square_sum()))
        .collect()
}

/// All-reduces the gradient of a tied weight between the first and the last stage.
pub fn reduce_tied_gradient(gradient: Extent, context: &Context) -> InstrTemplate {
    let operand = TemplateOperand { slot: OperandSlot::WeightGradient(0), extent: gradient };
    let pipeline = context.mesh.group(Axis::Pipeline);
    let stride = pipeline.stride * (context.mesh.pipeline - 1);
    all_reduce(DeviceGroup { size: 2, stride, ..pipeline }, operand)
}

fn all_reduce_statistic(group: DeviceGroup, operand: TemplateOperand) -> InstrTemplate {
    let collective = CollectiveOp {
        function: CollectiveFunction::AllReduce(Reduction::Sum),
        axis: group.axis,
        from: Layout::Partial,
        to: Layout::Replicated,
        payload: Bytes(0),
        statistic: operand.extent.bytes(),
        group,
    };
    InstrTemplate {
        action: Action::Collective(collective),
        reads: vec![operand],
        writes: vec![operand],
    }
}
