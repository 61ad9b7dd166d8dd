//! Fused ops: memory-bound work, element by element or reduced over rows, in one launch.
//!
//! `emit` gives an op its operands, `check` states what it requires of them, and each backend executes it.

use super::update::READS_OF_UPDATE;
use crate::extent::Extent;
use crate::kernel::{FusedKernel, FusedKind};
use crate::mesh::Axis;
use crate::model::{Activation, GatedProduct};
use crate::{Bytes, Dim};

/// The fused ops.
///
/// A norm of rows x of width d saves only s = Σx²; every op that divides recomputes ρ = (s/d + ε)^-½ from
/// it. All forms of the norm have the same s, so [`NormApply`](FusedOp::NormApply) recomputes the output
/// of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FusedOp {
    /// x, γ → x·ρ·γ, s of the whole row.
    NormForward,
    /// x → s of the row shard.
    NormStatistic,
    /// x, γ, s → x·ρ·γ.
    NormApply,
    /// x, γ → x⊙γ, s of the row shard (online RMSNorm).
    NormOnline,
    /// x, γ → x⊙γ (recomputation of an online RMSNorm).
    NormScale,
    /// dy, x, γ, s → dx, dγ.
    NormBackward,
    /// dy, x, γ → t = Σ dy⊙γ⊙x of the row shard.
    NormBackwardStatistic,
    /// dy, x, γ, s, t → dx, dγ.
    NormBackwardApply,
    /// g, x, γ, ds → dx = γ⊙g + 2x·ds, dγ = Σ x⊙g (online RMSNorm).
    NormOnlineBackward,
    /// h → φ(h), a result for each of several latents side by side.
    LatentForward {
        /// φ.
        activation: Activation,
    },
    /// h, s → φ(ρ·h). Without φ and with one result, in place.
    LatentRecover {
        /// φ.
        activation: Activation,
    },
    /// dz, h → dz⊙φ'(h); without φ h is not read.
    LatentBackward {
        /// φ.
        activation: Activation,
    },
    /// dz, h (without φ: z), s → ρ·dz⊙φ', ds accumulated.
    LatentRecoverBackward {
        /// φ.
        activation: Activation,
    },
    /// v, scale and bias → φ(LayerNorm(v)).
    LatentNorm {
        /// φ.
        activation: Activation,
    },
    /// dz, v, scale and bias → dv, their gradient accumulated. Mean and variance are recomputed.
    LatentNormBackward {
        /// φ.
        activation: Activation,
    },
    /// h, U and V → Uᵀ·H·V, where H is h of a·b features reshaped to a×b in row-major order.
    TensorGate {
        /// Rows of H.
        a: u64,
        /// Columns of H.
        b: u64,
    },
    /// dg, h, U and V → dh, the gradient of U and V accumulated.
    TensorGateBackward {
        /// Rows of H.
        a: u64,
        /// Columns of H.
        b: u64,
    },
    /// x, b → x + b, with b added to every row.
    Bias,
    /// dy, db → db with the sum of the rows of dy added.
    BiasBackward,
    /// x, scales → x with every head of queries and keys divided by its root mean square and multiplied by a scale. The
    /// heads of queries come first, then those of keys, then what is copied. The scales are those of queries and of
    /// keys side by side, where there are any.
    QkNorm(QkHeads),
    /// dy, x, scales, dscales → dx, and dscales with the gradient of the scales added.
    QkNormBackward(QkHeads),
    /// Rotates q and k in place: of the first w features of a head, feature i with feature i + w/2, by the
    /// token's position in its sequence, with w and the frequencies of the model constants. The operand
    /// is the first features of each row.
    Rope {
        /// Features of a head.
        head_dim: u64,
    },
    /// Rotates the gradients of q and k back in place.
    RopeBackward {
        /// Features of a head.
        head_dim: u64,
    },
    /// gate, up → product.
    GatedProduct {
        /// Plain or SwiGLU.
        product: GatedProduct,
    },
    /// d(product), gate, up → d(gate), d(up), in place of gate and up or not.
    GatedProductBackward {
        /// Plain or SwiGLU.
        product: GatedProduct,
    },
    /// x, y → x + y.
    Add,
    /// a, b → a + b, in place of b and in its format.
    AddInto,
    /// x → x in the format of the result, rounded to nearest even.
    Cast,
    /// Zeros.
    Fill,
    /// tokens, table → rows of the table.
    Gather,
    /// tokens, dy → table gradient, deterministic.
    ScatterAdd,
    /// logits → row maximum of the vocabulary shard.
    LossMaximum,
    /// logits, maximum, targets → Σexp and the target's logit, packed.
    LossSum,
    /// logits, maximum, packed → gradient in place of the logits, loss.
    LossGradient,
    /// Copies the equal parts along a dim one after the other, for a collective that sends part i to
    /// device i. A part of the features has a part of every section of the buffer.
    Pack {
        /// The sharded dim.
        dim: Dim,
        /// The axis of the collective.
        axis: Axis,
    },
    /// Inverse of `Pack`: copies parts that a collective received, part i from device i, to their places
    /// along a dim.
    Unpack {
        /// The dim that was sharded.
        dim: Dim,
        /// The axis of the collective.
        axis: Axis,
    },
    /// Copies the part of this device along a dim from a replicated tensor.
    Slice {
        /// The sharded dim.
        dim: Dim,
    },
    /// gradients, sum → sum + Σg² of one gradient after the other. The sum is reduced afterwards, so only the first device
    /// of the tensor axis counts a gradient that is replicated over the axis.
    SquareSum,
    /// gradient, moments, master → weight, gradient, moments, master, for each of several parameters
    /// ([`Instr::parameter_updates`](super::Instr::parameter_updates)). Zeroes the whole gradient, including the parts that
    /// other replicas update. The gradient is no result where the next step overwrites it.
    AdamW,
}

/// The heads of a row that [`FusedOp::QkNorm`] norms, on one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct QkHeads {
    /// Features of a head.
    pub head_dim: u64,
    /// Heads of queries.
    pub queries: u64,
    /// Heads of keys.
    pub keys: u64,
}

impl QkHeads {
    /// Number of scales: those of queries and those of keys, where there are any.
    pub fn scale_count(self) -> u64 {
        u64::from(self.norm_count()) * self.head_dim
    }

    /// Number of norms: that of queries and that of keys, where there are any.
    fn norm_count(self) -> u32 {
        u32::from(self.queries > 0) + u32::from(self.keys > 0)
    }
}

impl FusedOp {
    /// The name in programs, and the kind under which predictions group its time.
    pub fn describe(self) -> (&'static str, FusedKind) {
        use FusedOp::*;
        match self {
            NormForward => ("norm", FusedKind::Norm),
            NormStatistic => ("norm_statistic", FusedKind::Norm),
            NormApply => ("norm_apply", FusedKind::Norm),
            NormOnline => ("norm_online", FusedKind::Norm),
            NormScale => ("norm_scale", FusedKind::Norm),
            NormBackward => ("norm_backward", FusedKind::Norm),
            NormBackwardStatistic => ("norm_backward_statistic", FusedKind::Norm),
            NormBackwardApply => ("norm_backward_apply", FusedKind::Norm),
            NormOnlineBackward => ("norm_online_backward", FusedKind::Norm),
            LatentForward { .. } => ("latent", FusedKind::Latent),
            LatentRecover { .. } => ("latent_recover", FusedKind::Latent),
            LatentBackward { .. } => ("latent_backward", FusedKind::Latent),
            LatentRecoverBackward { .. } => ("latent_recover_backward", FusedKind::Latent),
            LatentNorm { .. } => ("latent_norm", FusedKind::Latent),
            LatentNormBackward { .. } => ("latent_norm_backward", FusedKind::Latent),
            TensorGate { .. } => ("tensor_gate", FusedKind::Latent),
            TensorGateBackward { .. } => ("tensor_gate_backward", FusedKind::Latent),
            Bias => ("bias", FusedKind::Add),
            BiasBackward => ("bias_backward", FusedKind::Add),
            QkNorm { .. } => ("qk_norm", FusedKind::Norm),
            QkNormBackward { .. } => ("qk_norm_backward", FusedKind::Norm),
            Rope { .. } => ("rope", FusedKind::Rope),
            RopeBackward { .. } => ("rope_backward", FusedKind::Rope),
            GatedProduct { .. } => ("gated_product", FusedKind::GatedProduct),
            GatedProductBackward { .. } => ("gated_product_backward", FusedKind::GatedProduct),
            Add => ("add", FusedKind::Add),
            AddInto => ("add_into", FusedKind::Add),
            Fill => ("fill", FusedKind::Add),
            Gather => ("gather", FusedKind::Embedding),
            ScatterAdd => ("scatter_add", FusedKind::Embedding),
            LossMaximum => ("loss_maximum", FusedKind::Loss),
            LossSum => ("loss_sum", FusedKind::Loss),
            LossGradient => ("loss_gradient", FusedKind::Loss),
            Pack { .. } => ("pack", FusedKind::Copy),
            Unpack { .. } => ("unpack", FusedKind::Copy),
            Slice { .. } => ("slice", FusedKind::Copy),
            Cast => ("cast", FusedKind::Copy),
            SquareSum => ("square_sum", FusedKind::Optimizer),
            AdamW => ("adamw", FusedKind::Optimizer),
        }
    }

    /// Whether the op updates parameters, as all ops of the optimizer but the sum of squares do.
    pub fn updates_parameters(self) -> bool {
        self.describe().1 == FusedKind::Optimizer && self != FusedOp::SquareSum
    }

    /// Cost on an executor without fusion: (traffic as a multiple of the fused kernel's, launches), counted
    /// from the operators of the published eager implementations.
    ///
    /// Libraries have one kernel for RMSNorm on whole rows, and a kernel and a sum for its gradients; the heads of
    /// queries and those of keys are two such norms. A norm over a shard of the features is composed of casts to
    /// fp32, a square and a sum: 28 bytes per element beside the local norm of the library when the statistic is
    /// reduced with the latents, 18 and 22 when it is reduced on its own; and of the operators that autograd derives
    /// from these.
    fn unfused(self) -> (u64, u32) {
        use FusedOp::*;
        match self {
            NormForward | NormScale => (1, 1),
            NormBackward => (1, 2),
            QkNorm(heads) => (1, heads.norm_count()),
            QkNormBackward(heads) => (1, 2 * heads.norm_count()),
            NormOnline => (8, 5),
            NormOnlineBackward => (8, 9),
            NormStatistic => (9, 3),
            NormApply => (6, 4),
            NormBackwardStatistic => (13, 7),
            NormBackwardApply => (8, 7),
            LatentRecover { .. } | LatentRecoverBackward { .. } => (2, 3),
            // PyTorch has one kernel for LayerNorm forward and three backward, and one for φ. The tensor
            // gate is two batched GEMMs.
            LatentNorm { .. } => (2, 2),
            LatentNormBackward { .. } => (2, 4),
            TensorGate { .. } => (2, 2),
            TensorGateBackward { .. } => (2, 4),
            Rope { .. } | RopeBackward { .. } => (4, 8),
            GatedProduct { .. } => (2, 2),
            GatedProductBackward { .. } => (2, 3),
            LossMaximum | LossSum | LossGradient => (3, 4),
            SquareSum => (2, 3),
            LatentForward { .. } | LatentBackward { .. } | Bias | BiasBackward => (1, 1),
            Add | AddInto | Cast | Fill | Gather | ScatterAdd => (1, 1),
            Pack { .. } | Unpack { .. } | Slice { .. } | AdamW => (1, 1),
        }
    }

    /// The kernel of this op on operands of these extents.
    pub(super) fn kernel(self, reads: &[Extent], writes: &[Extent]) -> FusedKernel {
        let written: Bytes = writes.iter().map(Extent::bytes).sum();
        let traffic = match self {
            // Only the gathered rows are read: as many bytes as the result has.
            FusedOp::Gather => written * 2,
            FusedOp::ScatterAdd => reads.last().map_or(Bytes(0), Extent::bytes) * 3,
            _ => written + reads.iter().map(Extent::bytes).sum(),
        };
        let parameters = match self {
            FusedOp::SquareSum => reads.len().saturating_sub(1),
            FusedOp::AdamW => reads.len() / READS_OF_UPDATE,
            _ => 1,
        };
        self.kernel_of_traffic(traffic, parameters as u64)
    }

    /// The kernel of this op on operands of this many bytes, read and written together, of so many parameters. An executor
    /// without fusion launches its operators for each of them.
    pub(crate) fn kernel_of_traffic(self, traffic: Bytes, parameters: u64) -> FusedKernel {
        let (factor, launches) = self.unfused();
        FusedKernel {
            kind: self.describe().1,
            traffic,
            unfused_traffic: traffic * factor,
            unfused_launches: launches,
            parameters: parameters.max(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Frameworks norm the heads of queries and those of keys each as the rows of a matrix.
    #[test]
    fn norms_of_heads_without_fusion_are_norms_of_queries_and_of_keys() {
        let launches = |op: FusedOp| op.kernel(&[], &[]).unfused_launches;
        let [forward, backward] = [FusedOp::NormForward, FusedOp::NormBackward].map(launches);
        for (queries, keys, norms) in [(8, 2, 2), (8, 0, 1), (0, 2, 1)] {
            let heads = QkHeads { head_dim: 4, queries, keys };
            assert_eq!(launches(FusedOp::QkNorm(heads)), norms * forward, "{heads:?}");
            assert_eq!(launches(FusedOp::QkNormBackward(heads)), norms * backward, "{heads:?}");
        }
    }
}
