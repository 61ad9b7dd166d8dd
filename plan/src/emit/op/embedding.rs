//! The embedding, and the loss with its gradient.
//!
//! A vocabulary-parallel loss all-reduces two statistics of each row: the maximum, then Σexp packed with
//! the logit of the target. The kernel of the gradient reads the logits and replaces them.

use crate::emit::reshard::all_reduce_statistic;
use crate::graph::Op;
use crate::program::{Action, CollectiveFunction, CollectiveOp, Extent, FusedOp, Reduction};
use crate::strategy::Strategy;
use crate::{DType, Layout};

use super::{InstrTemplate, OpEmitter, OperandSlot, TemplateOperand, fused};

pub(super) fn gather(emitter: &OpEmitter) -> Vec<InstrTemplate> {
    let output = emitter.activation(OperandSlot::Output(0));
    let reads = vec![
        tokens(OperandSlot::Tokens, output.extent.rows),
        table(emitter, OperandSlot::Weight(0)),
    ];
    vec![fused(FusedOp::Gather, reads, vec![output])]
}

pub(super) fn scatter(emitter: &OpEmitter) -> Vec<InstrTemplate> {
    let gradient = emitter.activation(OperandSlot::OutputGradient(0));
    let table = table(emitter, OperandSlot::WeightGradient(0));
    let reads = vec![tokens(OperandSlot::Tokens, gradient.extent.rows), table, gradient];
    vec![fused(FusedOp::ScatterAdd, reads, vec![table])]
}

pub(super) fn loss(emitter: &OpEmitter) -> Vec<InstrTemplate> {
    let logits = emitter.activation(OperandSlot::Input(0));
    let rows = logits.extent.rows;
    let maximum = emitter.statistic(OperandSlot::Temporary(0), 1);
    let packed = emitter.statistic(OperandSlot::Temporary(1), 2);
    let targets = tokens(OperandSlot::Targets, rows);
    let loss = TemplateOperand {
        slot: OperandSlot::Loss,
        extent: Extent { rows: 1, columns: 1, dtype: DType::F32 },
    };
    let sharded = emitter.choice.strategy == Strategy::Vocabulary;
    let mut templates = vec![fused(FusedOp::LossMaximum, vec![logits], vec![maximum])];
    if sharded {
        templates.push(all_reduce_maximum(maximum, emitter));
    }
    templates.push(fused(FusedOp::LossSum, vec![logits, maximum, targets], vec![packed]));
    if sharded {
        templates.push(all_reduce_statistic(packed, emitter.context));
    }
    let gradient = TemplateOperand { slot: OperandSlot::InputGradient(0), ..logits };
    let reads = vec![logits, maximum, packed, targets];
    templates.push(fused(FusedOp::LossGradient, reads, vec![gradient, loss]));
    templates
}

/// All-reduces row maxima of the vocabulary shards over the tensor axis, in place.
fn all_reduce_maximum(maximum: TemplateOperand, emitter: &OpEmitter) -> InstrTemplate {
    let all_reduce = CollectiveOp {
        function: CollectiveFunction::AllReduce(Reduction::Maximum),
        axis: crate::Axis::Tensor,
        from: Layout::Partial,
        to: Layout::Replicated,
        payload: crate::Bytes(0),
        statistic: maximum.extent.bytes(),
        group: emitter.context.mesh.group(crate::Axis::Tensor),
    };
    let action = Action::Collective(all_reduce);
    InstrTemplate { action, reads: vec![maximum], writes: vec![maximum] }
}

fn tokens(slot: OperandSlot, rows: u64) -> TemplateOperand {
    TemplateOperand { slot, extent: Extent { rows, columns: 1, dtype: DType::U32 } }
}

fn table(emitter: &OpEmitter, slot: OperandSlot) -> TemplateOperand {
    let Op::Embedding { vocab, width } = emitter.node.op else {
        unreachable!("only the embedding has a table")
    };
    let devices = emitter.context.tensor_size();
    let (rows, columns) = match emitter.choice.strategy {
        Strategy::Vocabulary => (vocab / devices, width),
        Strategy::Column => (vocab, width / devices),
        _ => (vocab, width),
    };
    let dtype =
        if slot == OperandSlot::Weight(0) { emitter.context.compute_dtype() } else { DType::F32 };
    TemplateOperand { slot, extent: Extent { rows, columns, dtype } }
}
