//! Causal flash attention in linear memory: forward saves the log-sum-exp of each row.

use crate::graph::AttentionOp;
use crate::kernel::{Attention, Direction};
use crate::program::Action;
use crate::strategy::Strategy;
use crate::{Dim, Layout};

use super::{InstrTemplate, OpEmitter, OperandSlot, TemplateOperand};

pub(super) fn forward(site: &OpEmitter, op: &AttentionOp) -> InstrTemplate {
    let reads = site.inputs(OperandSlot::Input);
    let writes = vec![site.activation(OperandSlot::Output(0)), log_sum_exp(site, op)];
    InstrTemplate { action: Action::Attention(kernel(site, op, Direction::Forward)), reads, writes }
}

pub(super) fn backward(site: &OpEmitter, op: &AttentionOp) -> InstrTemplate {
    let mut reads = site.inputs(OperandSlot::Input);
    reads.extend([
        site.activation(OperandSlot::Output(0)),
        log_sum_exp(site, op),
        site.activation(OperandSlot::OutputGradient(0)),
    ]);
    let writes = site.inputs(OperandSlot::InputGradient);
    InstrTemplate {
        action: Action::Attention(kernel(site, op, Direction::Backward)),
        reads,
        writes,
    }
}

/// Query heads and key/value heads one device computes.
fn heads(site: &OpEmitter, op: &AttentionOp) -> (u64, u64) {
    let devices = site.context.tensor_size();
    match site.choice.strategy {
        Strategy::Heads => (op.heads / devices, op.kv_heads / devices),
        // Devices are a multiple of the key heads, so each device's queries share one of them.
        Strategy::SharedKv => (op.heads / devices, 1),
        _ => (op.heads, op.kv_heads),
    }
}

fn log_sum_exp(site: &OpEmitter, op: &AttentionOp) -> TemplateOperand {
    site.statistic(OperandSlot::Statistic, heads(site, op).0)
}

fn kernel(site: &OpEmitter, op: &AttentionOp, direction: Direction) -> Attention {
    let devices = site.context.tensor_size();
    let workload = &site.context.workload;
    let sequences = match site.layout(OperandSlot::Output(0)) {
        Layout::Sharded(Dim::Sequence) => workload.micro_batch / devices,
        _ => workload.micro_batch,
    };
    let (heads, kv_heads) = heads(site, op);
    Attention {
        direction,
        sequences,
        length: workload.sequence_length,
        heads,
        kv_heads,
        head_dim: op.head_dim,
        input: site.context.compute_dtype(),
    }
}
