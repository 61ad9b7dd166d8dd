//! The fused passes and attention, by the part of the model they belong to.

pub(super) mod attention;
mod crossing;
mod ends;
mod latent;
mod norm;
mod row;

use crate::program::PassOp;

use super::error::{Checked, fault};
use super::site::{Site, Written};

pub(super) fn transfer(site: &mut Site, op: PassOp) -> Checked<Vec<Written>> {
    use PassOp::*;
    match op {
        NormForward | NormStatistic | NormApply | NormOnline | NormScale => norm::forward(site, op),
        NormBackward | NormBackwardStatistic | NormBackwardApply | NormOnlineBackward => {
            norm::backward(site, op)
        }
        LatentForward => latent::forward(site),
        LatentRecover => latent::recover(site),
        LatentBackward => latent::backward(site),
        LatentRecoverBackward => latent::recover_backward(site),
        LatentNorm { .. } | TensorGate { .. } => crossing::forward(site, op),
        LatentNormBackward { .. } | TensorGateBackward { .. } => crossing::backward(site, op),
        Rope => row::rope(site),
        RopeBackward => row::rope_backward(site),
        GatedProduct => row::gated(site),
        GatedProductBackward => row::gated_backward(site),
        Add => row::add(site),
        AddInto => row::add_into(site),
        Fill => row::fill(site),
        Pack | Unpack => row::pack(site, op),
        Slice => row::slice(site),
        Gather => ends::gather(site),
        ScatterAdd => ends::scatter(site),
        LossMaximum => ends::loss_maximum(site),
        LossSum => ends::loss_sum(site),
        LossGradient => ends::loss_gradient(site),
        SquareSum | AdamW => fault("belongs to the step phase"),
    }
}
