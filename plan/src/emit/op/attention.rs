//! Causal flash attention in linear memory: forward saves the log-sum-exp of each row.

use crate::context::Context;
use crate::graph::AttentionOp;
use crate::kernel::{Attention, Direction};
use crate::program::Action;
use crate::ring::RingScratch;
use crate::strategy::Strategy;
use crate::{Axis, Dim, Layout};

use super::{InstrTemplate, OpEmitter, OperandSlot, TemplateOperand};

pub(super) fn forward(emitter: &OpEmitter, op: &AttentionOp) -> InstrTemplate {
    let reads = emitter.inputs(OperandSlot::Input);
    let mut writes = vec![emitter.activation(OperandSlot::Output(0)), log_sum_exp(emitter, op)];
    let attention = kernel(emitter, op, Direction::Forward);
    writes.extend(scratch(&attention));
    InstrTemplate { action: Action::Attention(attention), reads, writes }
}

pub(super) fn backward(emitter: &OpEmitter, op: &AttentionOp) -> InstrTemplate {
    let mut reads = emitter.inputs(OperandSlot::Input);
    reads.extend([
        emitter.activation(OperandSlot::Output(0)),
        log_sum_exp(emitter, op),
        emitter.activation(OperandSlot::OutputGradient(0)),
    ]);
    let mut writes = emitter.inputs(OperandSlot::InputGradient);
    let attention = kernel(emitter, op, Direction::Backward);
    writes.extend(scratch(&attention));
    InstrTemplate { action: Action::Attention(attention), reads, writes }
}

/// The scratch memory of ring attention.
fn scratch(attention: &Attention) -> impl Iterator<Item = TemplateOperand> + use<> {
    let scratch = attention.ring_scratch().map(|RingScratch { parts, sums }| [parts, sums]);
    let operand = |(n, extent)| TemplateOperand { slot: OperandSlot::Temporary(n), extent };
    (0..).zip(scratch.into_iter().flatten()).map(operand)
}

/// Query heads and KV heads on one device.
fn heads(emitter: &OpEmitter, op: &AttentionOp) -> (u64, u64) {
    let Context { mesh, context_attention, .. } = emitter.context;
    let devices = context_attention.head_parts(mesh);
    match emitter.choice.strategy {
        Strategy::Heads => (op.heads / devices, op.kv_heads / devices),
        // The number of devices is a multiple of the KV heads, so the query heads of a device share one KV head.
        Strategy::SharedKv => (op.heads / devices, 1),
        _ => (op.heads, op.kv_heads),
    }
}

fn log_sum_exp(emitter: &OpEmitter, op: &AttentionOp) -> TemplateOperand {
    emitter.statistic(OperandSlot::Statistic, heads(emitter, op).0)
}

fn kernel(emitter: &OpEmitter, op: &AttentionOp, direction: Direction) -> Attention {
    let devices = emitter.context.tensor_size();
    let workload = &emitter.context.workload;
    let sequences = match emitter.layout(OperandSlot::Output(0)) {
        Layout::Sharded(Dim::Sequence) => workload.micro_batch / devices,
        _ => workload.micro_batch,
    };
    let (heads, kv_heads) = heads(emitter, op);
    let mesh = &emitter.context.mesh;
    let parts = if emitter.context.has_zigzag_positions() { mesh.context } else { 1 };
    Attention {
        direction,
        sequences,
        length: workload.sequence_length,
        heads,
        kv_heads,
        head_dim: op.head_dim,
        input: emitter.context.compute_dtype(),
        window: op.mask.window(workload.sequence_length),
        query_parts: parts,
        ring: emitter.context.rotates_keys().then(|| mesh.group(Axis::Context)),
    }
}
