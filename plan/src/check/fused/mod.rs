//! Transfer functions of fused ops.

mod bias;
mod crossing;
mod embedding_and_loss;
mod latent;
mod norm;
mod qk_norm;
mod row;
mod row_parameters;

use crate::program::FusedOp;

use super::error::{CheckResult, fault};
use super::lattice::{OperandWrite, PackedParts};
use super::operands::InstrOperands;

pub(super) fn transfer(
    operands: &mut InstrOperands,
    op: FusedOp,
) -> CheckResult<Vec<OperandWrite>> {
    use FusedOp::*;
    match op {
        NormForward | NormStatistic | NormApply | NormOnline | NormScale => {
            norm::forward(operands, op)
        }
        NormBackward | NormBackwardStatistic | NormBackwardApply | NormOnlineBackward => {
            norm::backward(operands, op)
        }
        LatentForward { activation } => latent::forward(operands, activation),
        LatentRecover { activation } => latent::recover(operands, activation),
        LatentBackward { activation } => latent::backward(operands, activation),
        LatentRecoverBackward { activation } => latent::recover_backward(operands, activation),
        LatentNorm { .. } | TensorGate { .. } => crossing::forward(operands, op),
        LatentNormBackward { .. } | TensorGateBackward { .. } => crossing::backward(operands, op),
        Bias => bias::forward(operands),
        BiasBackward => bias::backward(operands),
        QkNorm(heads) => qk_norm::forward(operands, heads),
        QkNormBackward(heads) => qk_norm::backward(operands, heads),
        Rope { head_dim } => row::rope(operands, head_dim),
        RopeBackward { head_dim } => row::rope_backward(operands, head_dim),
        GatedProduct { product } => row::gated(operands, product),
        GatedProductBackward { product } => row::gated_backward(operands, product),
        Add => row::add(operands),
        AddInto => row::add_into(operands),
        Fill => row::fill(operands),
        Pack { dim, axis } => row::pack(operands, PackedParts { dim, axis }),
        Unpack { dim, axis } => row::unpack(operands, PackedParts { dim, axis }),
        Slice { dim } => row::slice(operands, dim),
        Gather => embedding_and_loss::gather(operands),
        ScatterAdd => embedding_and_loss::scatter(operands),
        LossMaximum => embedding_and_loss::loss_maximum(operands),
        LossSum => embedding_and_loss::loss_sum(operands),
        LossGradient => embedding_and_loss::loss_gradient(operands),
        Cast => fault("changes the format of a tensor other than a gradient to be reduced"),
        SquareSum | AdamW => fault("belongs to the step phase"),
    }
}
