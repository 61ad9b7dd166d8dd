//! Templates of the ops, one file for each kind: forward, backward and recomputation.

mod attention;
mod bias;
mod crossing;
mod elementwise;
mod embedding;
mod latent;
mod linear;
mod norm;
mod qk_norm;
mod rotary;
mod row_parameters;

use crate::context::Context;
use crate::graph::{Op, OpId, OpNode, Segment, SegmentKind};
use crate::program::{Action, Extent, FusedOp};
use crate::strategy::OpChoice;
use crate::{DType, Dim, Layout};

use super::{InstrTemplate, OperandSlot, TemplateOperand};

/// Emits the templates of an op under its choice.
struct OpEmitter<'a> {
    segment: &'a Segment,
    id: OpId,
    node: &'a OpNode,
    choice: &'a OpChoice,
    context: &'a Context,
}

/// Templates of the forward pass of an op.
pub fn op_forward(
    segment: &Segment,
    id: OpId,
    choice: &OpChoice,
    context: &Context,
) -> Vec<InstrTemplate> {
    let emitter = OpEmitter::new(segment, id, choice, context);
    match &emitter.node.op {
        Op::Embedding { .. } => embedding::gather(&emitter),
        Op::Norm { width, .. } => norm::forward(&emitter, *width),
        Op::Linear(linear) => linear::forward(&emitter, linear),
        Op::Bias(bias) => bias::forward(&emitter, bias),
        Op::GateBias { .. } => vec![bias::add(&emitter)],
        Op::QkNorm(norm) => qk_norm::forward(&emitter, norm),
        Op::Latent(latent) => latent::forward(&emitter, latent),
        Op::Attention(op) => vec![attention::forward(&emitter, op)],
        Op::GatedProduct { product, .. } => {
            vec![elementwise::forward(&emitter, FusedOp::GatedProduct { product: *product })]
        }
        Op::Add { .. } | Op::Cross { .. } => vec![elementwise::forward(&emitter, FusedOp::Add)],
        Op::LatentNorm { width, activation, .. } => crossing::norm(&emitter, *width, *activation),
        Op::TensorGate { a, b, .. } => crossing::gate(&emitter, *a, *b),
        Op::Loss { .. } => embedding::loss(&emitter),
    }
}

/// Templates of the recomputation of an op. Statistics are always kept, so a recomputed norm needs no
/// collective.
pub fn op_recompute(
    segment: &Segment,
    id: OpId,
    choice: &OpChoice,
    context: &Context,
) -> Vec<InstrTemplate> {
    let emitter = OpEmitter::new(segment, id, choice, context);
    match &emitter.node.op {
        Op::Norm { width, .. } => norm::recompute(&emitter, *width),
        _ => op_forward(segment, id, choice, context),
    }
}

/// Templates of the backward pass of an op. The gradient of an input is accumulated onto the contributions
/// of other consumers, unless this op is the last consumer and so the first to contribute.
pub fn op_backward(
    segment: &Segment,
    id: OpId,
    choice: &OpChoice,
    context: &Context,
) -> Vec<InstrTemplate> {
    let emitter = OpEmitter::new(segment, id, choice, context);
    match &emitter.node.op {
        Op::Embedding { .. } => embedding::scatter(&emitter),
        Op::Norm { width, .. } => norm::backward(&emitter, *width),
        Op::Linear(linear) => linear::backward(&emitter, linear),
        Op::Bias(bias) => bias::backward(&emitter, bias),
        Op::GateBias { .. } => vec![bias::sum_gradient(&emitter)],
        Op::QkNorm(norm) => qk_norm::backward(&emitter, norm),
        Op::Latent(latent) => latent::backward(&emitter, latent),
        Op::Attention(op) => vec![attention::backward(&emitter, op)],
        Op::GatedProduct { product, .. } => {
            vec![elementwise::gated_product_backward(&emitter, *product)]
        }
        Op::Add { .. } | Op::Cross { .. } => elementwise::sum_backward(&emitter),
        Op::LatentNorm { width, activation, .. } => {
            crossing::norm_backward(&emitter, *width, *activation)
        }
        Op::TensorGate { a, b, .. } => crossing::gate_backward(&emitter, *a, *b),
        // The forward pass of the loss has replaced the logits by their gradient.
        Op::Loss { .. } => vec![],
    }
}

impl<'a> OpEmitter<'a> {
    fn new(segment: &'a Segment, id: OpId, choice: &'a OpChoice, context: &'a Context) -> Self {
        OpEmitter { segment, id, node: segment.op(id), choice, context }
    }

    fn width(&self, slot: OperandSlot) -> u64 {
        let value = match slot {
            OperandSlot::Input(port) | OperandSlot::InputGradient(port) => {
                self.node.inputs[port as usize]
            }
            OperandSlot::Output(port) | OperandSlot::OutputGradient(port) => {
                self.node.outputs[port as usize]
            }
            _ => return 1,
        };
        self.segment.value(value).width()
    }

    fn layout(&self, slot: OperandSlot) -> Layout {
        match slot {
            OperandSlot::Input(port) => self.choice.inputs[port as usize].forward,
            OperandSlot::InputGradient(port) => self.choice.inputs[port as usize].backward,
            OperandSlot::Output(port) => self.choice.outputs[port as usize].forward,
            OperandSlot::OutputGradient(port) => self.choice.outputs[port as usize].backward,
            _ => self.choice.inputs.first().map_or(Layout::Replicated, |edge| edge.forward),
        }
    }

    /// An activation or its gradient at a port, in the layout of the strategy.
    fn activation(&self, slot: OperandSlot) -> TemplateOperand {
        let layout = self.layout(slot);
        let extent = super::reshard::activation(self.width(slot), layout, self.context);
        TemplateOperand { slot, extent }
    }

    /// The activations at all input ports, with the slot of each.
    fn inputs(&self, slot: impl Fn(u8) -> OperandSlot) -> Vec<TemplateOperand> {
        (0..self.node.inputs.len()).map(|port| self.activation(slot(port as u8))).collect()
    }

    /// The activations at all output ports, with the slot of each.
    fn outputs(&self, slot: impl Fn(u8) -> OperandSlot) -> Vec<TemplateOperand> {
        (0..self.node.outputs.len()).map(|port| self.activation(slot(port as u8))).collect()
    }

    /// `count` fp32 elements per token, for the tokens of the first input on this device.
    fn statistic(&self, slot: OperandSlot, count: u64) -> TemplateOperand {
        let rows = self.context.rows(self.layout(slot));
        TemplateOperand { slot, extent: Extent { rows, columns: count, dtype: DType::F32 } }
    }

    /// Whether the gradient of an input is accumulated onto the contributions of other consumers.
    fn accumulates(&self, port: usize) -> bool {
        self.segment.accumulates(self.id, port)
    }

    /// Whether a GEMM writes the weight gradients of one microbatch, whose reduced parts the replicas accumulate.
    fn has_microbatch_gradients(&self) -> bool {
        self.segment.kind == SegmentKind::Block && self.context.shards_gradients()
    }

    /// The gradient of an input as a write of an instruction; also pushed to its reads when accumulated.
    fn input_gradient(&self, port: usize, reads: &mut Vec<TemplateOperand>) -> TemplateOperand {
        let gradient = self.activation(OperandSlot::InputGradient(port as u8));
        if self.accumulates(port) {
            reads.push(gradient);
        }
        gradient
    }

    /// Features on this device of a tensor of this width in the layout of the first input.
    fn shard(&self, width: u64) -> u64 {
        match self.choice.inputs.first().map(|edge| edge.forward) {
            Some(Layout::Sharded(Dim::Feature)) => width / self.context.tensor_size(),
            _ => width,
        }
    }
}

fn fused(op: FusedOp, reads: Vec<TemplateOperand>, writes: Vec<TemplateOperand>) -> InstrTemplate {
    InstrTemplate { action: Action::Fused(op), reads, writes }
}
