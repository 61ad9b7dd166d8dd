//! The kernels' text, for whoever compiles it: NVRTC for a GPU, a C++ compiler for the shim.

/// Kernels that are compiled together: one file of `kernels/`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum KernelFamily {
    /// RMSNorm in its variants.
    Norm,
    /// φ on latents, with what an online norm owes them.
    Latent,
    /// What a latent that crosses between blocks passes through.
    Crossing,
    /// The rotary embedding.
    Rotary,
    /// Causal attention.
    Attention,
    /// The product of gate and up.
    Gated,
    /// The embedding, and the sum of its gradients.
    Embedding,
    /// Cross-entropy over a shard of the vocabulary.
    Loss,
    /// Copies around reshards.
    Layout,
    /// The norm of gradients, and AdamW.
    Optimizer,
    /// Sums, zeros, changes of format, and the sum of what blocks left.
    Elementwise,
}

/// A file that kernels include, by the name they include it under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelHeader {
    /// As in `#include "name"`.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
}

/// What the kernels include.
pub const HEADERS: [KernelHeader; 8] = [
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
    KernelHeader { name: "attention_plain.cuh", text: include_str!("kernels/attention_plain.cuh") },
    KernelHeader { name: "device.cuh", text: include_str!("kernels/device.cuh") },
    KernelHeader { name: "mma.cuh", text: include_str!("kernels/mma.cuh") },
    KernelHeader { name: "reduce.cuh", text: include_str!("kernels/reduce.cuh") },
];

/// What a C++ compiler needs besides, with `NARROWS_SHIM` defined.
pub const SHIM: [KernelHeader; 3] = [
    KernelHeader { name: "shim.h", text: include_str!("shim/shim.h") },
    KernelHeader { name: "shim_mma.h", text: include_str!("shim/shim_mma.h") },
    KernelHeader { name: "fiber.h", text: include_str!("shim/fiber.h") },
];

/// What NVRTC is told besides the architecture. Lambdas are taken for host code otherwise.
pub const NVRTC_OPTIONS: [&str; 2] = ["--std=c++17", "-default-device"];

impl KernelFamily {
    /// All of them.
    pub const ALL: [KernelFamily; 11] = [
        KernelFamily::Norm,
        KernelFamily::Latent,
        KernelFamily::Crossing,
        KernelFamily::Rotary,
        KernelFamily::Attention,
        KernelFamily::Gated,
        KernelFamily::Embedding,
        KernelFamily::Loss,
        KernelFamily::Layout,
        KernelFamily::Optimizer,
        KernelFamily::Elementwise,
    ];

    /// The file's name, without its ending.
    pub fn name(self) -> &'static str {
        match self {
            KernelFamily::Norm => "norm",
            KernelFamily::Latent => "latent",
            KernelFamily::Crossing => "crossing",
            KernelFamily::Rotary => "rotary",
            KernelFamily::Attention => "attention",
            KernelFamily::Gated => "gated",
            KernelFamily::Embedding => "embedding",
            KernelFamily::Loss => "loss",
            KernelFamily::Layout => "layout",
            KernelFamily::Optimizer => "optimizer",
            KernelFamily::Elementwise => "elementwise",
        }
    }

    /// The file's text.
    pub fn text(self) -> &'static str {
        match self {
            KernelFamily::Norm => include_str!("kernels/norm.cu"),
            KernelFamily::Latent => include_str!("kernels/latent.cu"),
            KernelFamily::Crossing => include_str!("kernels/crossing.cu"),
            KernelFamily::Rotary => include_str!("kernels/rotary.cu"),
            KernelFamily::Attention => include_str!("kernels/attention.cu"),
            KernelFamily::Gated => include_str!("kernels/gated.cu"),
            KernelFamily::Embedding => include_str!("kernels/embedding.cu"),
            KernelFamily::Loss => include_str!("kernels/loss.cu"),
            KernelFamily::Layout => include_str!("kernels/layout.cu"),
            KernelFamily::Optimizer => include_str!("kernels/optimizer.cu"),
            KernelFamily::Elementwise => include_str!("kernels/elementwise.cu"),
        }
    }
}
