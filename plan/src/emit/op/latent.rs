//! φ on the latents, and the division by the root mean square that an online norm still owes.
//!
//! Forward y = φ(z), z = ρ·h. Without φ it works in place, or costs nothing where nothing is owed.
//! Backward, owed: dz = dy⊙φ'(z), du = ρ·dz, ds −= (ρ²/2d)·Σ dz⊙z, summed over the latents of the
//! norm.

use crate::graph::{LatentOp, Op};
use crate::model::Activation;
use crate::program::FusedOp;
use crate::strategy::Strategy;

use super::{InstrTemplate, OpEmitter, OperandSlot, pass};

pub(super) fn forward(site: &OpEmitter, latent: &LatentOp) -> Vec<InstrTemplate> {
    let activation = latent.activation;
    let h = site.activation(OperandSlot::Input(0));
    let z = site.outputs(OperandSlot::Output);
    if site.choice.strategy == Strategy::Recover {
        let statistic = site.statistic(OperandSlot::NormStatistic, 1);
        return vec![pass(FusedOp::LatentRecover { activation }, vec![h, statistic], z)];
    }
    if nothing_to_do(site, latent) {
        return vec![];
    }
    vec![pass(FusedOp::LatentForward { activation }, vec![h], z)]
}

pub(super) fn backward(site: &OpEmitter, latent: &LatentOp) -> Vec<InstrTemplate> {
    let activation = latent.activation;
    let mut reads = site.outputs(OperandSlot::OutputGradient);
    let dh = site.activation(OperandSlot::InputGradient(0));
    // φ' is read off its input; without φ the closed form needs z = ρ·h, which stands in h's place.
    match latent.activation {
        Activation::Silu => reads.push(site.activation(OperandSlot::Input(0))),
        Activation::Identity if site.choice.strategy == Strategy::Recover => {
            reads.extend(site.outputs(OperandSlot::Output));
        }
        Activation::Identity => {}
    }
    if site.choice.strategy == Strategy::Recover {
        let gradient = site.statistic(OperandSlot::NormStatisticGradient, 1);
        reads.push(site.statistic(OperandSlot::NormStatistic, 1));
        if !contributes_first(site, latent) {
            reads.push(gradient);
        }
        return vec![pass(
            FusedOp::LatentRecoverBackward { activation },
            reads,
            vec![dh, gradient],
        )];
    }
    if nothing_to_do(site, latent) {
        return vec![];
    }
    vec![pass(FusedOp::LatentBackward { activation }, reads, vec![dh])]
}

/// Without φ and with one output the latent passes through: its output is its input's storage.
fn nothing_to_do(site: &OpEmitter, latent: &LatentOp) -> bool {
    latent.activation == Activation::Identity && site.node.outputs.len() == 1
}

/// The last latent of a norm is the first of the backward pass: it writes the statistic's gradient,
/// the others add to it.
fn contributes_first(site: &OpEmitter, latent: &LatentOp) -> bool {
    let last = site.segment.op_ids().rev().find(
        |id| matches!(&site.segment.op(*id).op, Op::Latent(other) if other.norm == latent.norm),
    );
    last == Some(site.id)
}
