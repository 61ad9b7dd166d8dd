//! Fused ops: the kernel of each.

use narrows_plan::Axis;
use narrows_plan::program::FusedOp;
use narrows_runtime::ScheduledInstruction;

use super::copies::ShardCopyKind;
use super::{
    copies, elementwise, latent, latent_crossing, optimizer, qk_norm, rms_norm, vocabulary,
};
use crate::abort::StopReason;
use crate::device::CpuDevice;

pub(crate) fn run(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
    op: FusedOp,
) -> Result<(), StopReason> {
    use FusedOp::*;
    match op {
        NormForward | NormStatistic | NormApply | NormOnline | NormScale => {
            rms_norm::forward(device, scheduled, op)
        }
        NormBackward | NormBackwardStatistic | NormBackwardApply | NormOnlineBackward => {
            rms_norm::backward(device, scheduled, op)
        }
        LatentForward { activation } => latent::forward(device, scheduled, activation),
        LatentRecover { activation } => latent::recover(device, scheduled, activation),
        LatentBackward { activation } => latent::backward(device, scheduled, activation),
        LatentRecoverBackward { activation } => {
            latent::recover_backward(device, scheduled, activation)
        }
        LatentNorm { activation } => latent_crossing::norm(device, scheduled, activation),
        LatentNormBackward { activation } => {
            latent_crossing::norm_backward(device, scheduled, activation)
        }
        TensorGate { a, b } => latent_crossing::tensor_gate(device, scheduled, (a, b)),
        TensorGateBackward { a, b } => {
            latent_crossing::tensor_gate_backward(device, scheduled, (a, b))
        }
        Bias => elementwise::bias(device, scheduled),
        BiasBackward => elementwise::bias_backward(device, scheduled),
        QkNorm(heads) => qk_norm::forward(device, scheduled, heads),
        QkNormBackward(heads) => qk_norm::backward(device, scheduled, heads),
        Rope { .. } => elementwise::rope(device, scheduled),
        RopeBackward { .. } => elementwise::rope_backward(device, scheduled),
        GatedProduct { product } => elementwise::gated_product(device, scheduled, product),
        GatedProductBackward { product } => {
            elementwise::gated_product_backward(device, scheduled, product)
        }
        Add => elementwise::add(device, scheduled),
        AddInto => elementwise::add_into(device, scheduled),
        Cast => Err(device.unsupported(scheduled, "this backend stores f32 only")),
        Fill => elementwise::fill(device, scheduled),
        Gather => vocabulary::gather(device, scheduled),
        ScatterAdd => vocabulary::scatter_add(device, scheduled),
        LossMaximum | LossSum | LossGradient => vocabulary::loss(device, scheduled, op),
        Pack { dim, axis } => copies::run(device, scheduled, (dim, axis), ShardCopyKind::Pack),
        Unpack { dim, axis } => copies::run(device, scheduled, (dim, axis), ShardCopyKind::Unpack),
        Slice { dim } => copies::run(device, scheduled, (dim, Axis::Tensor), ShardCopyKind::Slice),
        SquareSum => optimizer::square_sum(device, scheduled),
        AdamW => optimizer::adamw(device, scheduled),
    }
}
