//! Transfer functions of fused passes and attention, by the part of the model they belong to.

pub(super) mod attention;
mod crossing;
mod ends;
mod latent;
mod norm;
mod row;

use crate::program::FusedOp;

use super::error::{CheckResult, fault};
use super::site::{InstrOperands, OperandWrite};

pub(super) fn transfer(site: &mut InstrOperands, op: FusedOp) -> CheckResult<Vec<OperandWrite>> {
    use FusedOp::*;
    match op {
        NormForward | NormStatistic | NormApply | NormOnline | NormScale => norm::forward(site, op),
        NormBackward | NormBackwardStatistic | NormBackwardApply | NormOnlineBackward => {
            norm::backward(site, op)
        }
        LatentForward { activation } => latent::forward(site, activation),
        LatentRecover { activation } => latent::recover(site, activation),
        LatentBackward { activation } => latent::backward(site, activation),
        LatentRecoverBackward { activation } => latent::recover_backward(site, activation),
        LatentNorm { .. } | TensorGate { .. } => crossing::forward(site, op),
        LatentNormBackward { .. } | TensorGateBackward { .. } => crossing::backward(site, op),
        Rope { head_dim } => row::rope(site, head_dim),
        RopeBackward { head_dim } => row::rope_backward(site, head_dim),
        GatedProduct { product } => row::gated(site, product),
        GatedProductBackward { product } => row::gated_backward(site, product),
        Add => row::add(site),
        AddInto => row::add_into(site),
        Fill => row::fill(site),
        Pack { dim } => row::pack(site, dim),
        Unpack { dim } => row::unpack(site, dim),
        Slice { dim } => row::slice(site, dim),
        Gather => ends::gather(site),
        ScatterAdd => ends::scatter(site),
        LossMaximum => ends::loss_maximum(site),
        LossSum => ends::loss_sum(site),
        LossGradient => ends::loss_gradient(site),
        SquareSum | AdamW => fault("belongs to the step phase"),
    }
}
