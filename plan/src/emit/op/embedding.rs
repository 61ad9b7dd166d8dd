//! The two ends of the model: the embedding, and the loss with its gradient.
//!
//! A vocabulary-parallel loss all-reduces two small statistics: the row maximum, then Σexp packed
//! with the target's logit. The gradient replaces the logits in the same pass that reads them.

use crate::emit::reshard::all_reduce_statistic;
use crate::graph::Op;
use crate::kernel::CollectiveKind;
use crate::program::{Action, CollectiveOp, Extent, FusedOp, Reduction};
use crate::strategy::Strategy;
use crate::{DType, Layout};

use super::{InstrTemplate, OpEmitter, OperandSlot, TemplateOperand, pass};

pub(super) fn gather(site: &OpEmitter) -> Vec<InstrTemplate> {
    let output = site.activation(OperandSlot::Output(0));
    let reads =
        vec![tokens(OperandSlot::Tokens, output.extent.rows), table(site, OperandSlot::Weight(0))];
    vec![pass(FusedOp::Gather, reads, vec![output])]
}

pub(super) fn scatter(site: &OpEmitter) -> Vec<InstrTemplate> {
    let gradient = site.activation(OperandSlot::OutputGradient(0));
    let table = table(site, OperandSlot::WeightGradient(0));
    let reads = vec![tokens(OperandSlot::Tokens, gradient.extent.rows), table, gradient];
    vec![pass(FusedOp::ScatterAdd, reads, vec![table])]
}

pub(super) fn loss(site: &OpEmitter) -> Vec<InstrTemplate> {
    let logits = site.activation(OperandSlot::Input(0));
    let rows = logits.extent.rows;
    let maximum = site.statistic(OperandSlot::Temporary(0), 1);
    let packed = site.statistic(OperandSlot::Temporary(1), 2);
    let targets = tokens(OperandSlot::Targets, rows);
    let loss = TemplateOperand {
        slot: OperandSlot::Loss,
        extent: Extent { rows: 1, columns: 1, dtype: DType::F32 },
    };
    let shared = site.choice.strategy == Strategy::Vocabulary;
    let mut made = vec![pass(FusedOp::LossMaximum, vec![logits], vec![maximum])];
    if shared {
        made.push(all_reduce_maximum(maximum, site));
    }
    made.push(pass(FusedOp::LossSum, vec![logits, maximum, targets], vec![packed]));
    if shared {
        made.push(all_reduce_statistic(packed, site.context));
    }
    let gradient = TemplateOperand { slot: OperandSlot::InputGradient(0), ..logits };
    let reads = vec![logits, maximum, packed, targets];
    made.push(pass(FusedOp::LossGradient, reads, vec![gradient, loss]));
    made
}

/// A maximum is not a sum: the values before it are each device's own, not summands.
fn all_reduce_maximum(maximum: TemplateOperand, site: &OpEmitter) -> InstrTemplate {
    let exchange = CollectiveOp {
        kind: CollectiveKind::AllReduce,
        axis: crate::Axis::Tensor,
        from: Layout::Partial,
        to: Layout::Replicated,
        payload: crate::Bytes(0),
        statistic: maximum.extent.bytes(),
        reduction: Reduction::Maximum,
        group: site.context.mesh.group(crate::Axis::Tensor),
    };
    let action = Action::Collective(exchange);
    InstrTemplate { action, reads: vec![maximum], writes: vec![maximum] }
}

fn tokens(slot: OperandSlot, rows: u64) -> TemplateOperand {
    TemplateOperand { slot, extent: Extent { rows, columns: 1, dtype: DType::U32 } }
}

fn table(site: &OpEmitter, slot: OperandSlot) -> TemplateOperand {
    let Op::Embedding { vocab, width } = site.node.op else {
        unreachable!("only the embedding has a table")
    };
    let devices = site.context.tensor_size();
    let (rows, columns) = match site.choice.strategy {
        Strategy::Vocabulary => (vocab / devices, width),
        Strategy::Column => (vocab, width / devices),
        _ => (vocab, width),
    };
    let dtype =
        if slot == OperandSlot::Weight(0) { site.context.compute_dtype() } else { DType::F32 };
    TemplateOperand { slot, extent: Extent { rows, columns, dtype } }
}
