//! Causal attention in linear memory, by tiles (as FlashAttention).
//!
//! For one head, with k, v `[length, w]`, q `[queries, w]` of all positions or of some, and scale w^-½: S = scale·q·kᵀ
//! where query − window < key ≤ query, P = softmax(S), out = P·v, and lse = ln Σ exp(S) of each row. A tile is some
//! queries by some keys; its two GEMMs are [`matmul`](super::matrix::matmul), and tiles without a visible key are
//! skipped. Forward keeps a running maximum and sum of each row where the keys take more than one tile.
//!
//! Backward recomputes P = exp(S − lse) of each tile. With D = Σ dout⊙out of each row:
//! dv += Pᵀ·dout, dS = scale·P⊙(dout·vᵀ − D), dq += dS·k, dk += dSᵀ·q.
//!
//! A GEMM whose operands are both contiguous along the contracted features packs one of them. k, and
//! in backward v, are therefore transposed once a head instead of packed once a tile.
//!
//! Query head h reads key head h·kv_heads/heads. Sequences follow each other. Shapes: q, out and their gradients
//! `[sequences·queries, heads·w]`; k, v and their gradients `[sequences·length, kv_heads·w]`; lse `[sequences·queries,
//! heads]`. Each is a view, so q, k and v can be columns of one matrix.

mod backward;
mod cached;
mod forward;
mod merge;
#[cfg(test)]
mod tests;
mod tiles;

pub use backward::{AttentionGradients, AttentionSaved, attention_backward};
pub use cached::{CachedAttention, attention_cached, cached_attention_scratch_elements};
pub use forward::attention_forward;
pub use merge::merge_outputs;
pub use tiles::AttentionShape;
