//! φ on the latents, and the division by the root mean square that an online norm still owes.
//!
//! Forward y = φ(z), z = ρ·h. Without φ it works in place, or costs nothing where nothing is owed.
//! Backward, owed: dz = dy⊙φ'(z), du = ρ·dz, ds −= (ρ²/2d)·Σ dz⊙z, summed over the latents of the
//! norm.

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
    // φ' is read off its input; without φ the closed form needs z = ρ·h, which stands in h's place.
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

/// Without φ and with one output the latent passes through: its output is its input's storage.
fn is_alias(emitter: &OpEmitter, latent: &LatentOp) -> bool {
    latent.activation == Activation::Identity && emitter.node.outputs.len() == 1
}

/// The last latent of a norm is the first of the backward pass: it writes the statistic's gradient,
/// the others add to it.
fn writes_statistic_gradient(emitter: &OpEmitter, latent: &LatentOp) -> bool {
    let last = emitter.segment.op_ids().rev().find(
        |id| matches!(&emitter.segment.op(*id).op, Op::Latent(other) if other.norm == latent.norm),
    );
    last == Some(emitter.id)
}
