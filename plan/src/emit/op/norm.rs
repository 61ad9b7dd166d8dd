//! RMSNorm in its variants (DESIGN §3.3).
//!
//! Whole rows: one kernel per direction. Sharded features, *sync*: the row sums s = Σx² (forward) and
//! t = Σ dy⊙γ⊙x (backward) are all-reduced. *Online*: s is reduced in the launch of the latents'
//! all-reduce, and the backward pass needs no collective, because the replicated latents give ds.

use crate::DType;
use crate::emit::reshard::all_reduce_statistic;
use crate::program::FusedOp;
use crate::strategy::Strategy;

use super::{InstrTemplate, OpEmitter, OperandSlot, TemplateOperand, fused, row_parameters};

pub(super) fn forward(emitter: &OpEmitter, width: u64) -> Vec<InstrTemplate> {
    let x = emitter.activation(OperandSlot::Input(0));
    let y = emitter.activation(OperandSlot::Output(0));
    let scale = scale(emitter, width);
    let statistic = emitter.statistic(OperandSlot::Statistic, 1);
    match emitter.choice.strategy {
        Strategy::Sync => vec![
            fused(FusedOp::NormStatistic, vec![x], vec![statistic]),
            all_reduce_statistic(statistic, emitter.context),
            fused(FusedOp::NormApply, vec![x, scale, statistic], vec![y]),
        ],
        Strategy::Online => vec![fused(FusedOp::NormOnline, vec![x, scale], vec![y, statistic])],
        _ => vec![fused(FusedOp::NormForward, vec![x, scale], vec![y, statistic])],
    }
}

pub(super) fn recompute(emitter: &OpEmitter, width: u64) -> Vec<InstrTemplate> {
    let x = emitter.activation(OperandSlot::Input(0));
    let y = emitter.activation(OperandSlot::Output(0));
    let scale = scale(emitter, width);
    match emitter.choice.strategy {
        Strategy::Online => vec![fused(FusedOp::NormScale, vec![x, scale], vec![y])],
        _ => {
            let statistic = emitter.statistic(OperandSlot::Statistic, 1);
            vec![fused(FusedOp::NormApply, vec![x, scale, statistic], vec![y])]
        }
    }
}

pub(super) fn backward(emitter: &OpEmitter, width: u64) -> Vec<InstrTemplate> {
    let dy = emitter.activation(OperandSlot::OutputGradient(0));
    let x = emitter.activation(OperandSlot::Input(0));
    let statistic = emitter.statistic(OperandSlot::Statistic, 1);
    let scale_gradient = row_parameters::parameter_row(
        OperandSlot::WeightGradient(0),
        emitter.shard(width),
        DType::F32,
    );
    let mut reads = vec![dy, x, scale(emitter, width)];
    match emitter.choice.strategy {
        Strategy::Sync => {
            let partial = emitter.statistic(OperandSlot::Temporary(0), 1);
            let sums = fused(FusedOp::NormBackwardStatistic, reads.clone(), vec![partial]);
            reads.extend([statistic, partial, scale_gradient]);
            let dx = emitter.input_gradient(0, &mut reads);
            vec![
                sums,
                all_reduce_statistic(partial, emitter.context),
                fused(FusedOp::NormBackwardApply, reads, vec![dx, scale_gradient]),
            ]
        }
        Strategy::Online => {
            reads
                .extend([emitter.statistic(OperandSlot::NormStatisticGradient, 1), scale_gradient]);
            let dx = emitter.input_gradient(0, &mut reads);
            vec![fused(FusedOp::NormOnlineBackward, reads, vec![dx, scale_gradient])]
        }
        _ => {
            reads.extend([statistic, scale_gradient]);
            let dx = emitter.input_gradient(0, &mut reads);
            vec![fused(FusedOp::NormBackward, reads, vec![dx, scale_gradient])]
        }
    }
}

fn scale(emitter: &OpEmitter, width: u64) -> TemplateOperand {
    let dtype = emitter.context.compute_dtype();
    row_parameters::parameter_row(OperandSlot::Weight(0), emitter.shard(width), dtype)
}
