//! What one device computes: products, attention and fused passes on its own shard, in f32.
//!
//! Pure functions on [`MatrixView`]s of row-major memory and on slices. They know shapes and numbers, no
//! programs and no buffers; a value that holds several sections side by side is split into views of
//! its columns. None allocates (the `gemm` crate packs into memory of its own): where a kernel needs
//! scratch memory, a function beside it says how much, and the caller lends it.
//!
//! A kernel takes a [`Parallel`] and divides its rows, or its heads, among that many tasks of
//! rayon's current pool. Inner loops are plain Rust over equal slices, compiled for the widest
//! vectors of the machine ([`simd`]).

pub mod attention;
pub mod elementwise;
pub mod embedding;
pub mod gated;
pub mod latent;
pub mod layer_norm;
pub mod layout;
pub mod loss;
pub mod matrix;
pub mod norm;
pub mod optimizer;
pub mod parallel;
pub mod product;
pub mod rotary;
pub mod simd;
pub mod tensor_gate;
#[cfg(test)]
mod testing;

pub use matrix::{MatrixView, MatrixViewMut};
pub use parallel::Parallel;

/// What becomes of the numbers that are there before a kernel writes its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteMode {
    /// They are overwritten, whatever they are.
    Replace,
    /// The result is added to them.
    Add,
}
