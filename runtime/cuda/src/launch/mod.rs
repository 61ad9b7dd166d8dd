//! Fused ops and attention as kernel launches.
//!
//! [`kernel_launches`] reads an instruction as the CPU backend does (`cpu/src/execute/`) and returns the kernels,
//! grids and arguments that execute it. Pointers are offsets into the memory spaces of one device: the arena,
//! scratch memory shared by the launches of one instruction, and a few tables of the session. Nothing is
//! executed or read here.

mod attention;
mod attention_kernels;
mod bias;
mod crossing;
mod elementwise;
mod embedding;
mod fused_attention;
mod gated;
mod grid;
mod latent;
mod layout;
mod loss;
mod norm;
mod operand;
mod optimizer;
mod qk_norm;
mod ring_attention;
mod ring_sums;
mod rotary;
mod site;

use narrows_plan::Axis;
use narrows_plan::program::{Action, FusedOp};
use narrows_runtime::ScheduledInstruction;

use layout::CopyKind;
use operand::LaunchResult;
use site::InstrSite;

pub(crate) use fused_attention::ATTENTION_ALIGNMENT;
pub use fused_attention::{AttentionKey, AttentionTensor, FusedAttention};
pub use operand::{Argument, ByteRows, MemoryAccess, MemorySpace};
pub use optimizer::{OPTIMIZER_COEFFICIENTS, optimizer_coefficients};
pub use ring_attention::{RingAttention, RingShift, RingStep};
pub use rotary::rotary_table;
pub use site::{Launch, LaunchContext, Launches};

/// Error of an instruction that has no kernel.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no CUDA kernel for `{instruction}` of {origin}: {reason}")]
pub struct UnsupportedInstr {
    /// Name of the instruction.
    pub instruction: &'static str,
    /// Op that the instruction belongs to.
    pub origin: String,
    /// Which property of the instruction is not supported.
    pub reason: String,
}

impl UnsupportedInstr {
    /// Advice for the user.
    pub fn hint(&self) -> &'static str {
        "the CPU backend, `--backend cpu`, or a plan with other choices for this op"
    }

    /// The error for this instruction.
    pub(crate) fn new(scheduled: &ScheduledInstruction, reason: impl Into<String>) -> Self {
        UnsupportedInstr {
            instruction: scheduled.instr.action.name(),
            origin: scheduled.instr.origin.to_string(),
            reason: reason.into(),
        }
    }
}

/// The launches of an instruction that is a fused op or attention of one device.
///
/// # Errors
/// An [`UnsupportedInstr`] for any other action, for operands in formats or counts that no lowered program has,
/// and for sizes beyond a kernel's limits.
pub fn kernel_launches(
    device: &LaunchContext,
    scheduled: &ScheduledInstruction,
) -> Result<Launches, UnsupportedInstr> {
    let launches = match &scheduled.instr.action {
        Action::Fused(op) => fused_op(&InstrSite { device, scheduled, op: *op }),
        Action::Attention(op) if op.rotation().is_some() => {
            Err("ring attention is more than launches".into())
        }
        Action::Attention(op) => attention::launches(&InstrSite { device, scheduled, op }),
        other => Err(format!("`{}` is neither a fused op nor attention", other.name())),
    };
    launches.map_err(|reason| UnsupportedInstr::new(scheduled, reason))
}

/// The launches and shifts of an instruction that is ring attention; `None` for any other.
///
/// # Errors
/// As [`kernel_launches`].
pub fn ring_attention(
    device: &LaunchContext,
    scheduled: &ScheduledInstruction,
) -> Result<Option<RingAttention>, UnsupportedInstr> {
    let Action::Attention(op) = &scheduled.instr.action else { return Ok(None) };
    let Some(group) = op.rotation() else { return Ok(None) };
    let ring = ring_attention::ring_attention(&InstrSite { device, scheduled, op }, group);
    ring.map(Some).map_err(|reason| UnsupportedInstr::new(scheduled, reason))
}

/// The fused form of an instruction that is attention; `None` for any other, and where there is none.
///
/// # Errors
/// As [`kernel_launches`].
pub fn fused_attention(
    device: &LaunchContext,
    scheduled: &ScheduledInstruction,
) -> Result<Option<FusedAttention>, UnsupportedInstr> {
    let Action::Attention(op) = &scheduled.instr.action else { return Ok(None) };
    // cuDNN's graph has the queries of whole sequences.
    if op.query_parts > 1 {
        return Ok(None);
    }
    let fused = fused_attention::fused(&InstrSite { device, scheduled, op });
    fused.map_err(|reason| UnsupportedInstr::new(scheduled, reason))
}

fn fused_op(site: &InstrSite) -> LaunchResult<Launches> {
    use FusedOp::*;
    match site.op {
        NormForward | NormStatistic | NormApply | NormOnline | NormScale => norm::forward(site),
        NormBackwardStatistic => norm::backward_statistic(site),
        NormBackward | NormBackwardApply | NormOnlineBackward => norm::backward(site),
        LatentForward { activation } => latent::forward(site, activation, false),
        LatentRecover { activation } => latent::forward(site, activation, true),
        LatentBackward { activation } => latent::backward(site, activation),
        LatentRecoverBackward { activation } => latent::recover_backward(site, activation),
        GatedProduct { product } => gated::forward(site, product),
        GatedProductBackward { product } => gated::backward(site, product),
        LatentNorm { activation } => crossing::layer_norm(site, activation),
        LatentNormBackward { activation } => crossing::layer_norm_backward(site, activation),
        TensorGate { a, b } => crossing::tensor_gate(site, (a, b)),
        TensorGateBackward { a, b } => crossing::tensor_gate_backward(site, (a, b)),
        Bias => bias::forward(site),
        BiasBackward => bias::backward(site),
        QkNorm(heads) => qk_norm::forward(site, heads),
        QkNormBackward(heads) => qk_norm::backward(site, heads),
        Rope { head_dim } => rotary::rope(site, head_dim, 1.0),
        RopeBackward { head_dim } => rotary::rope(site, head_dim, -1.0),
        Add => elementwise::add(site),
        AddInto => elementwise::add_into(site),
        Cast => elementwise::cast(site),
        Fill => elementwise::fill(site),
        Gather => embedding::gather(site),
        ScatterAdd => embedding::scatter_add(site),
        LossMaximum => loss::maximum(site),
        LossSum => loss::sum(site),
        LossGradient => loss::gradient(site),
        Pack { dim, axis } => layout::copy(site, (dim, axis), CopyKind::Pack),
        Unpack { dim, axis } => layout::copy(site, (dim, axis), CopyKind::Unpack),
        Slice { dim } => layout::copy(site, (dim, Axis::Tensor), CopyKind::Slice),
        SquareSum => optimizer::square_sum(site),
        AdamW => optimizer::adamw(site),
    }
}
