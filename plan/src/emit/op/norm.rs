//! RMSNorm in its variants (DESIGN §3.3).
//!
//! Whole rows: one pass each way. Features sharded, *sync*: the row sums s = Σx² (forward) and
//! t = Σ dy⊙γ⊙x (backward) are all-reduced. *Online*: s rides with the latents' all-reduce and the
//! backward pass needs no collective, because ds comes from the replicated latents.

use crate::DType;
use crate::emit::reshard::all_reduce_statistic;
use crate::program::{Extent, FusedOp};
use crate::strategy::Strategy;

use super::{InstrTemplate, OpEmitter, OperandSlot, TemplateOperand, pass};

pub(super) fn forward(site: &OpEmitter, width: u64) -> Vec<InstrTemplate> {
    let x = site.activation(OperandSlot::Input(0));
    let y = site.activation(OperandSlot::Output(0));
    let scale = scale(site, width);
    let statistic = site.statistic(OperandSlot::Statistic, 1);
    match site.choice.strategy {
        Strategy::Sync => vec![
            pass(FusedOp::NormStatistic, vec![x], vec![statistic]),
            all_reduce_statistic(statistic, site.context),
            pass(FusedOp::NormApply, vec![x, scale, statistic], vec![y]),
        ],
        Strategy::Online => vec![pass(FusedOp::NormOnline, vec![x, scale], vec![y, statistic])],
        _ => vec![pass(FusedOp::NormForward, vec![x, scale], vec![y, statistic])],
    }
}

pub(super) fn redo(site: &OpEmitter, width: u64) -> Vec<InstrTemplate> {
    let x = site.activation(OperandSlot::Input(0));
    let y = site.activation(OperandSlot::Output(0));
    let scale = scale(site, width);
    match site.choice.strategy {
        Strategy::Online => vec![pass(FusedOp::NormScale, vec![x, scale], vec![y])],
        _ => {
            let statistic = site.statistic(OperandSlot::Statistic, 1);
            vec![pass(FusedOp::NormApply, vec![x, scale, statistic], vec![y])]
        }
    }
}

pub(super) fn backward(site: &OpEmitter, width: u64) -> Vec<InstrTemplate> {
    let dy = site.activation(OperandSlot::OutputGradient(0));
    let x = site.activation(OperandSlot::Input(0));
    let statistic = site.statistic(OperandSlot::Statistic, 1);
    let scale_gradient = TemplateOperand {
        slot: OperandSlot::WeightGradient(0),
        extent: Extent { rows: 1, columns: site.shard(width), dtype: DType::F32 },
    };
    let mut reads = vec![dy, x, scale(site, width)];
    match site.choice.strategy {
        Strategy::Sync => {
            let partial = site.statistic(OperandSlot::Temporary(0), 1);
            let sums = pass(FusedOp::NormBackwardStatistic, reads.clone(), vec![partial]);
            reads.extend([statistic, partial, scale_gradient]);
            let dx = site.input_gradient(0, &mut reads);
            vec![
                sums,
                all_reduce_statistic(partial, site.context),
                pass(FusedOp::NormBackwardApply, reads, vec![dx, scale_gradient]),
            ]
        }
        Strategy::Online => {
            reads.extend([site.statistic(OperandSlot::NormStatisticGradient, 1), scale_gradient]);
            let dx = site.input_gradient(0, &mut reads);
            vec![pass(FusedOp::NormOnlineBackward, reads, vec![dx, scale_gradient])]
        }
        _ => {
            reads.extend([statistic, scale_gradient]);
            let dx = site.input_gradient(0, &mut reads);
            vec![pass(FusedOp::NormBackward, reads, vec![dx, scale_gradient])]
        }
    }
}

fn scale(site: &OpEmitter, width: u64) -> TemplateOperand {
    let extent =
        Extent { rows: 1, columns: site.shard(width), dtype: site.context.compute_dtype() };
    TemplateOperand { slot: OperandSlot::Weight(0), extent }
}
