//! Source text of the kernels, for NVRTC and for the shim's C++ compiler.

/// A group of kernels that are compiled together: one file of `kernels/`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum KernelFamily {
    /// RMSNorm in its variants.
    Norm,
    /// Activation of latents, with the deferred scaling of an online norm.
    Latent,
    /// LayerNorm and tensor gate of latent crossings.
    Crossing,
    /// Rotary position embedding.
    Rotary,
    /// Causal attention.
    Attention,
    /// Sums and copies of ring attention.
    Ring,
    /// Gated product of the MLP.
    Gated,
    /// Embedding gather, and the scatter-add of its gradients.
    Embedding,
    /// Cross-entropy over a shard of the vocabulary.
    Loss,
    /// Packing and unpacking around reshards.
    Layout,
    /// Gradient norm and AdamW.
    Optimizer,
    /// Sums and fills of flat arrays, and the reduction of partial sums.
    Elementwise,
}

/// A header that kernels include.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelHeader {
    /// The name in `#include "name"`.
    pub name: &'static str,
    /// Contents of the header.
    pub text: &'static str,
}

/// Headers of the kernels.
pub const KERNEL_HEADERS: [KernelHeader; 8] = [
    KernelHeader { name: "activation.cuh", text: include_str!("kernels/activation.cuh") },
    KernelHeader { name: "attention.cuh", text: include_str!("kernels/attention.cuh") },
    KernelHeader {
        name: "attention_backward.cuh",
        text: include_str!("kernels/attention_backward.cuh"),
    },
    KernelHeader {
        name: "attention_forward.cuh",
        text: include_str!("kernels/attention_forward.cuh"),
    },
    KernelHeader {
        name: "attention_scalar.cuh",
        text: include_str!("kernels/attention_scalar.cuh"),
    },
    KernelHeader { name: "device.cuh", text: include_str!("kernels/device.cuh") },
    KernelHeader { name: "mma.cuh", text: include_str!("kernels/mma.cuh") },
    KernelHeader { name: "reduce.cuh", text: include_str!("kernels/reduce.cuh") },
];

/// NVRTC options besides the architecture. Without `-default-device`, lambdas would be host code.
pub const NVRTC_OPTIONS: [&str; 2] = ["--std=c++17", "-default-device"];

impl KernelFamily {
    /// All families.
    pub const ALL: [KernelFamily; 12] = [
        KernelFamily::Norm,
        KernelFamily::Latent,
        KernelFamily::Crossing,
        KernelFamily::Rotary,
        KernelFamily::Attention,
        KernelFamily::Ring,
        KernelFamily::Gated,
        KernelFamily::Embedding,
        KernelFamily::Loss,
        KernelFamily::Layout,
        KernelFamily::Optimizer,
        KernelFamily::Elementwise,
    ];

    /// Name of the source file, without `.cu`.
    pub fn name(self) -> &'static str {
        match self {
            KernelFamily::Norm => "norm",
            KernelFamily::Latent => "latent",
            KernelFamily::Crossing => "crossing",
            KernelFamily::Rotary => "rotary",
            KernelFamily::Attention => "attention",
            KernelFamily::Ring => "ring",
            KernelFamily::Gated => "gated",
            KernelFamily::Embedding => "embedding",
            KernelFamily::Loss => "loss",
            KernelFamily::Layout => "layout",
            KernelFamily::Optimizer => "optimizer",
            KernelFamily::Elementwise => "elementwise",
        }
    }

    /// Contents of the source file.
    pub fn source(self) -> &'static str {
        match self {
            KernelFamily::Norm => include_str!("kernels/norm.cu"),
            KernelFamily::Latent => include_str!("kernels/latent.cu"),
            KernelFamily::Crossing => include_str!("kernels/crossing.cu"),
            KernelFamily::Rotary => include_str!("kernels/rotary.cu"),
            KernelFamily::Attention => include_str!("kernels/attention.cu"),
            KernelFamily::Ring => include_str!("kernels/ring.cu"),
            KernelFamily::Gated => include_str!("kernels/gated.cu"),
            KernelFamily::Embedding => include_str!("kernels/embedding.cu"),
            KernelFamily::Loss => include_str!("kernels/loss.cu"),
            KernelFamily::Layout => include_str!("kernels/layout.cu"),
            KernelFamily::Optimizer => include_str!("kernels/optimizer.cu"),
            KernelFamily::Elementwise => include_str!("kernels/elementwise.cu"),
        }
    }
}
