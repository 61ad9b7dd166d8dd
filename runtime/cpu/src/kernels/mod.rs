//! Kernels of one device: GEMMs, attention, and the fused ops on its own shard, in f32. GEMMs can round their
//! operands to bf16 ([`GemmMode`]).
//!
//! A kernel is a pure function on [`MatrixView`]s of row-major memory and on slices. It knows shapes,
//! not programs or buffers; a tensor with several sections side by side is passed as views of its
//! columns. No kernel allocates (GEMMs pack operands into memory of the thread): where a
//! kernel needs scratch memory, a function beside it returns the size, and the caller passes the
//! memory.
//!
//! A kernel takes a [`Parallel`] and divides its rows, or its heads, among that many tasks of rayon's
//! current thread pool. Inner loops are plain Rust over slices of equal length, compiled for the
//! widest vectors of the machine (`simd.rs`).
//!
//! This module is public for the tests of other backends, which compare their kernels with these,
//! and for benchmarks.

mod activation;
mod attention;
#[cfg(target_arch = "x86_64")]
mod bf16_matrix;
mod bias;
mod elementwise;
mod embedding;
mod gated_product;
mod gemm;
mod gemm_mode;
mod latent;
mod layer_norm;
mod loss;
mod matrix;
mod optimizer;
mod parallel;
mod qk_norm;
mod reshard;
mod rms_norm;
mod rope;
mod simd;
mod tensor_gate;
#[cfg(test)]
mod testing;

pub use attention::{
    AttentionGradients, AttentionSaved, AttentionShape, CachedAttention, attention_backward,
    attention_cached, attention_forward, cached_attention_scratch_elements, merge_outputs,
};
pub use bias::{bias_backward, bias_forward};
pub use elementwise::add;
pub(crate) use elementwise::{add_into, copy, fill_zero, fill_zero_view};
pub use embedding::{LookupTokens, embedding_gather, embedding_scatter_add};
pub use gated_product::{gated_product_backward, gated_product_forward};
pub use gemm::{gemm_forward, gemm_input_gradient, gemm_weight_gradient};
pub use gemm_mode::{GemmMode, supports_bf16};
pub(crate) use latent::latent_recover_in_place;
pub use latent::{
    LatentRecoverSaved, latent_backward, latent_forward, latent_recover, latent_recover_backward,
};
pub use layer_norm::{
    LayerNorm, LayerNormGradients, LayerNormSaved, layer_norm_backward, layer_norm_forward,
};
pub use loss::{ReducedStatistics, loss_gradient, loss_maximum, loss_sum};
pub use matrix::{MatrixView, MatrixViewMut, StridedMatrix, WriteMode};
pub use optimizer::{
    AdamWStep, ParameterState, adamw_update, adamw_update_and_zero, gradient_square_sum,
};
pub use parallel::Parallel;
pub use qk_norm::{QkNorm, qk_norm_backward, qk_norm_forward};
pub use reshard::{PartitionShape, pack_shards, slice_shard, unpack_shards};
pub use rms_norm::{
    RmsNorm, RmsNormGradients, RmsNormSaved, rms_norm_apply, rms_norm_backward,
    rms_norm_backward_apply, rms_norm_backward_statistic, rms_norm_forward, rms_norm_online,
    rms_norm_online_backward, rms_norm_scale, rms_norm_statistic,
};
pub use rope::{RopeTable, rope_backward, rope_forward};
pub use tensor_gate::{TensorGate, TensorGateGradients, tensor_gate_backward, tensor_gate_forward};
