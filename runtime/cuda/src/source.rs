//! The kernels' text, for whoever compiles it: NVRTC for a GPU, a C++ compiler for the shim.

/// Kernels that are compiled together: one file of `kernels/`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
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
pub struct Header {
    /// As in `#include "name"`.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
}

/// What the kernels include.
pub const HEADERS: [Header; 8] = [
    Header { name: "activation.cuh", text: include_str!("kernels/activation.cuh") },
    Header { name: "attention.cuh", text: include_str!("kernels/attention.cuh") },
    Header { name: "attention_backward.cuh", text: include_str!("kernels/attention_backward.cuh") },
    Header { name: "attention_forward.cuh", text: include_str!("kernels/attention_forward.cuh") },
    Header { name: "attention_plain.cuh", text: include_str!("kernels/attention_plain.cuh") },
    Header { name: "device.cuh", text: include_str!("kernels/device.cuh") },
    Header { name: "mma.cuh", text: include_str!("kernels/mma.cuh") },
    Header { name: "reduce.cuh", text: include_str!("kernels/reduce.cuh") },
];

/// What a C++ compiler needs besides, with `NARROWS_SHIM` defined.
pub const SHIM: [Header; 3] = [
    Header { name: "shim.h", text: include_str!("shim/shim.h") },
    Header { name: "shim_mma.h", text: include_str!("shim/shim_mma.h") },
    Header { name: "fiber.h", text: include_str!("shim/fiber.h") },
];

/// What NVRTC is told besides the architecture. Lambdas are taken for host code otherwise.
pub const NVRTC_OPTIONS: [&str; 2] = ["--std=c++17", "-default-device"];

impl Family {
    /// All of them.
    pub const ALL: [Family; 11] = [
        Family::Norm,
        Family::Latent,
        Family::Crossing,
        Family::Rotary,
        Family::Attention,
        Family::Gated,
        Family::Embedding,
        Family::Loss,
        Family::Layout,
        Family::Optimizer,
        Family::Elementwise,
    ];

    /// The file's name, without its ending.
    pub fn name(self) -> &'static str {
        match self {
            Family::Norm => "norm",
            Family::Latent => "latent",
            Family::Crossing => "crossing",
            Family::Rotary => "rotary",
            Family::Attention => "attention",
            Family::Gated => "gated",
            Family::Embedding => "embedding",
            Family::Loss => "loss",
            Family::Layout => "layout",
            Family::Optimizer => "optimizer",
            Family::Elementwise => "elementwise",
        }
    }

    /// The file's text.
    pub fn text(self) -> &'static str {
        match self {
            Family::Norm => include_str!("kernels/norm.cu"),
            Family::Latent => include_str!("kernels/latent.cu"),
            Family::Crossing => include_str!("kernels/crossing.cu"),
            Family::Rotary => include_str!("kernels/rotary.cu"),
            Family::Attention => include_str!("kernels/attention.cu"),
            Family::Gated => include_str!("kernels/gated.cu"),
            Family::Embedding => include_str!("kernels/embedding.cu"),
            Family::Loss => include_str!("kernels/loss.cu"),
            Family::Layout => include_str!("kernels/layout.cu"),
            Family::Optimizer => include_str!("kernels/optimizer.cu"),
            Family::Elementwise => include_str!("kernels/elementwise.cu"),
        }
    }
}
