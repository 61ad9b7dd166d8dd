//! φ on latents, and the pending division by the root mean square of an online norm.
//!
//! Forward: y = φ(z), z = ρ·h, with ρ = 1 where no division is pending. Without φ it works in place, and
//! without a division it is no instruction at all. Backward, with a pending division: dz = dy⊙φ'(z),
//! dh = ρ·dz, ds −= (ρ²/2d)·Σ dz⊙z, summed over the latents of the norm.

use crate::graph::{LatentOp, Op};
use crate::model::Activation;
use crate::program::FusedOp;
use crate::strategy::Strategy;

use super::{InstrTemplate, OpEmitter, OperandSlot, fused};

pub(super) fn forward(emitter: &OpEmitter, latent: &LatentOp) -> Vec<InstrTemplate> {
    let activation = latent.activation;
    let h = emitter.activation(OperandSlot::Input(0));
    let z = emitter.outputs(OperandSlot::Output);
    if emitter.choice.strategy == Strategy::Recover {
        let statistic = emitter.statistic(OperandSlot::NormStatistic, 1);
        return vec![fused(FusedOp::LatentRecover { activation }, vec![h, statistic], z)];
    }
    if is_alias(emitter, latent) {
        return vec![];
    }
    vec![fused(FusedOp::LatentForward { activation }, vec![h], z)]
}

pub(super) fn backward(emitter: &OpEmitter, latent: &LatentOp) -> Vec<InstrTemplate> {
    let activation = latent.activation;
    let mut reads = emitter.outputs(OperandSlot::OutputGradient);
    let dh = emitter.activation(OperandSlot::InputGradient(0));
    // φ' is evaluated on h. Without φ, the gradient of the statistic needs z = ρ·h, which has replaced h.
    match latent.activation {
        Activation::Silu => reads.push(emitter.activation(OperandSlot::Input(0))),
        Activation::Identity if emitter.choice.strategy == Strategy::Recover => {
            reads.extend(emitter.outputs(OperandSlot::Output));
        }
        Activation::Identity => {}
    }
    if emitter.choice.strategy == Strategy::Recover {
        let gradient = emitter.statistic(OperandSlot::NormStatisticGradient, 1);
        reads.push(emitter.statistic(OperandSlot::NormStatistic, 1));
        if !writes_statistic_gradient(emitter, latent) {
            reads.push(gradient);
        }
        return vec![fused(
            FusedOp::LatentRecoverBackward { activation },
            reads,
            vec![dh, gradient],
        )];
    }
    if is_alias(emitter, latent) {
        return vec![];
    }
    vec![fused(FusedOp::LatentBackward { activation }, reads, vec![dh])]
}

/// Whether the output is the input itself: one output without φ, in the same buffer.
fn is_alias(emitter: &OpEmitter, latent: &LatentOp) -> bool {
    latent.activation == Activation::Identity && emitter.node.outputs.len() == 1
}

/// Whether this latent writes the gradient of its norm's statistic: the last latent of a norm is the first
/// of the backward pass. The others accumulate.
fn writes_statistic_gradient(emitter: &OpEmitter, latent: &LatentOp) -> bool {
    let last = emitter.segment.op_ids().rev().find(
        |id| matches!(&emitter.segment.op(*id).op, Op::Latent(other) if other.norm == latent.norm),
    );
    last == Some(emitter.id)
}
