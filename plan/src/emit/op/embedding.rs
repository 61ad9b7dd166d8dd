//! The two ends of the model: the embedding, and the loss with its gradient.
//!
//! A vocabulary-parallel loss all-reduces two small statistics: the row maximum, then Σexp packed
//! with the target's logit. The gradient replaces the logits in the same pass that reads them.

use crate::emit::reshard::all_reduce_statistic;
use crate::graph::Op;
use crate::kernel::CollectiveKind;
use crate::program::{Action, Exchange, Extent, PassOp, Reduction};
use crate::strategy::Strategy;
use crate::{DType, Layout};

use super::{Operand, Site, Slot, Template, pass};

pub(super) fn gather(site: &Site) -> Vec<Template> {
    let output = site.activation(Slot::Output(0));
    let reads = vec![tokens(Slot::Tokens, output.extent.rows), table(site, Slot::Weight(0))];
    vec![pass(PassOp::Gather, reads, vec![output])]
}

pub(super) fn scatter(site: &Site) -> Vec<Template> {
    let gradient = site.activation(Slot::OutputGradient(0));
    let table = table(site, Slot::WeightGradient(0));
    let reads = vec![tokens(Slot::Tokens, gradient.extent.rows), table, gradient];
    vec![pass(PassOp::ScatterAdd, reads, vec![table])]
}

pub(super) fn loss(site: &Site) -> Vec<Template> {
    let logits = site.activation(Slot::Input(0));
    let rows = logits.extent.rows;
    let maximum = site.statistic(Slot::Temporary(0), 1);
    let packed = site.statistic(Slot::Temporary(1), 2);
    let targets = tokens(Slot::Targets, rows);
    let loss =
        Operand { slot: Slot::Loss, extent: Extent { rows: 1, columns: 1, dtype: DType::F32 } };
    let shared = site.choice.strategy == Strategy::Vocabulary;
    let mut made = vec![pass(PassOp::LossMaximum, vec![logits], vec![maximum])];
    if shared {
        made.push(all_reduce_maximum(maximum, site));
    }
    made.push(pass(PassOp::LossSum, vec![logits, maximum, targets], vec![packed]));
    if shared {
        made.push(all_reduce_statistic(packed, site.context));
    }
    let gradient = Operand { slot: Slot::InputGradient(0), ..logits };
    let reads = vec![logits, maximum, packed, targets];
    made.push(pass(PassOp::LossGradient, reads, vec![gradient, loss]));
    made
}

/// A maximum is not a sum: the values before it are each device's own, not summands.
fn all_reduce_maximum(maximum: Operand, site: &Site) -> Template {
    let exchange = Exchange {
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
    Template { action, reads: vec![maximum], writes: vec![maximum] }
}

fn tokens(slot: Slot, rows: u64) -> Operand {
    Operand { slot, extent: Extent { rows, columns: 1, dtype: DType::U32 } }
}

fn table(site: &Site, slot: Slot) -> Operand {
    let Op::Embedding { vocab, width } = site.node.op else {
        unreachable!("only the embedding has a table")
    };
    let devices = site.context.tensor();
    let (rows, columns) = match site.choice.strategy {
        Strategy::Vocabulary => (vocab / devices, width),
        Strategy::Column => (vocab, width / devices),
        _ => (vocab, width),
    };
    let dtype = if slot == Slot::Weight(0) { site.context.compute() } else { DType::F32 };
    Operand { slot, extent: Extent { rows, columns, dtype } }
}
