//! The ops of a segment. Sizes are those of the whole model, before any sharding.

use crate::model::{Activation, AttentionMask, GatedProduct, LinearKind, WeightId};

use super::OpId;

/// The function that an op computes.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// Gathers rows of the embedding table.
    Embedding {
        /// Tokens in the vocabulary.
        vocab: u64,
        /// Width of the hidden state.
        width: u64,
    },
    /// RMSNorm with a learned scale.
    Norm {
        /// Width of the hidden state.
        width: u64,
        /// The scale.
        scale: WeightId,
    },
    /// One or several GEMMs with weights.
    Linear(LinearOp),
    /// Adds biases to the outputs of q, k and v, and rotates queries and keys.
    Bias(QkvHeads),
    /// RMSNorm of every head of queries and keys (QK-norm), and their rotation. Values beside them are copied.
    QkNorm(QkvHeads),
    /// φ on a latent, with the division by the norm's root mean square where it is pending.
    Latent(LatentOp),
    /// Causal attention.
    Attention(AttentionOp),
    /// Gate times up.
    GatedProduct {
        /// d_ff.
        width: u64,
        /// Plain or SwiGLU.
        product: GatedProduct,
    },
    /// The residual addition.
    Add {
        /// Width of the hidden state.
        width: u64,
    },
    /// Adds the gated latent of the previous block to this block's (LaX).
    Cross {
        /// Width of the latent.
        width: u64,
    },
    /// Adds the bias of an affine gate to the gated latent.
    GateBias {
        /// The linear whose latent crosses.
        linear: LinearKind,
        /// Width of the latent.
        width: u64,
    },
    /// A gate of two small matrices on a crossing latent: g = Uᵀ·H·V, where H is the latent reshaped
    /// to a×b.
    TensorGate {
        /// The linear whose latent crosses.
        linear: LinearKind,
        /// Rows of H, and of the square U.
        a: u64,
        /// Columns of H, and of the square V.
        b: u64,
    },
    /// LayerNorm with scale and bias over a crossed latent, then φ: the released form of LaX.
    LatentNorm {
        /// The linear whose latent crosses.
        linear: LinearKind,
        /// Width of the latent.
        width: u64,
        /// φ.
        activation: Activation,
    },
    /// Mean cross-entropy over the tokens of the step, with its gradient.
    Loss {
        /// Tokens in the vocabulary.
        vocab: u64,
    },
}

/// One weight of a [`LinearOp`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinearMember {
    /// The parameter within the segment.
    pub parameter: WeightId,
    /// Input features.
    pub d_in: u64,
    /// Output features.
    pub d_out: u64,
}

/// Execution mode of the members of a [`LinearOp`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearForm {
    /// One GEMM on a shared input, with the weights side by side.
    Concatenated,
    /// One batched GEMM of equal shapes, each on its own section of the input.
    Batched,
}

/// One or several linears that run as one GEMM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinearOp {
    /// The weights, at least one.
    pub members: Vec<LinearMember>,
    /// Execution mode of several members; a single member is `Concatenated`.
    pub form: LinearForm,
    /// Features of a head when the output is made of attention heads: a feature shard must then
    /// hold whole heads.
    pub head_dim: Option<u64>,
    /// Output sections that the rotary embedding is applied to in place (q and k).
    pub rotary_sections: Vec<usize>,
    /// The norm whose division may be pending on the input, when the output is a latent.
    pub norm: Option<OpId>,
}

/// Outputs of q, k and v, or of some of them, side by side and divided into heads, as an op after these linears reads them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QkvHeads {
    /// The linears, with the width of each; queries come before keys, and keys before values.
    pub members: Vec<(LinearKind, u64)>,
    /// Features of a head.
    pub head_dim: u64,
    /// Sections that the rotary embedding is applied to in place, after the op.
    pub rotary_sections: Vec<usize>,
}

impl QkvHeads {
    /// Number of heads of this linear; 0 where it is none of the members.
    pub fn heads_of(&self, linear: LinearKind) -> u64 {
        let widths =
            self.members.iter().filter(|(kind, _)| *kind == linear).map(|(_, width)| width);
        widths.sum::<u64>() / self.head_dim
    }

    /// Whether the heads of every linear can be divided among this many devices.
    pub fn divide_among(&self, devices: u64) -> bool {
        let mut widths = self.members.iter().map(|(_, width)| width);
        widths.all(|width| (width / self.head_dim).is_multiple_of(devices))
    }

    /// Width of the rotated sections.
    pub fn rotated_width(&self) -> u64 {
        self.rotary_sections.iter().map(|section| self.members[*section].1).sum()
    }

    /// The linears whose heads [`Op::QkNorm`] norms. Each has a scale of `head_dim` elements.
    pub fn normed(&self) -> impl Iterator<Item = LinearKind> {
        let kinds = self.members.iter().map(|(kind, _)| *kind);
        kinds.filter(|kind| matches!(kind, LinearKind::Q | LinearKind::K))
    }
}

/// φ on one or several latents side by side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LatentOp {
    /// Widths of the latents in the input.
    pub sections: Vec<u64>,
    /// φ, the same for all sections.
    pub activation: Activation,
    /// The norm whose division may be pending on the input.
    pub norm: Option<OpId>,
}

/// Causal attention; inputs are q, k, v in one, two or three values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttentionOp {
    /// Query heads.
    pub heads: u64,
    /// Key and value heads.
    pub kv_heads: u64,
    /// Features of a head.
    pub head_dim: u64,
    /// The keys that a query attends to.
    pub mask: AttentionMask,
}

impl LinearOp {
    /// Whether the op computes latents: the first factors of pairs.
    pub(crate) fn is_first_factor(&self) -> bool {
        matches!(self.members[0].parameter, WeightId::FactorA(_))
    }
}
