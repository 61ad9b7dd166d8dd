//! GEMMs as cublasLtMatmul calls.
//!
//! For every member b of a batch, cublasLtMatmul computes
//!
//! ```text
//! C = op(A)·op(B) + β·C,   op(A): m×k, op(B): k×n, C: m×n,
//! ```
//!
//! on column-major matrices: the element in row i and column j of member b is at index `b·stride + j·ld + i`.
//! Buffers of a program are row-major, so cuBLASLt sees their transposes, and the factors swap:
//! Y = L·R becomes Yᵀ = Rᵀ·Lᵀ, with A = R and B = L in place.
//!
//! | GEMM | A | B | C | m, n, k |
//! |---|---|---|---|---|
//! | Y = X·W | W | X | Y | d_out, tokens, d_in |
//! | dX = dY·Wᵀ | W, transposed | dY | dX | d_in, tokens, d_out |
//! | dW += Xᵀ·dY | dY | X, transposed | dW | d_out, d_in, tokens |
//!
//! The weight of a tied head is the embedding table, which stores Wᵀ, so its first two GEMMs flip the
//! transposition of A. Its gradient is dWᵀ += dYᵀ·X: A is X, B is dY transposed, m is d_in, n is d_out.
//!
//! Members of a batch lie side by side in the columns: `ld` is the width of all of them and `stride` that of one.
//! Operands are bf16 or f32, accumulation is always f32, and the result is bf16 or f32. Algorithms that split k
//! must therefore reduce in f32 (`CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE`).
//!
//! Nothing is executed here. A [`MatmulKey`] is everything but the addresses: matmuls of one key share their
//! descriptors and their fastest algorithm, which an [`AlgorithmStore`] keeps between runs.

mod algorithm_store;
mod key;
mod lower;

pub(crate) use algorithm_store::{AlgorithmStore, MatmulAlgorithm, Platform};
pub use key::{Matmul, MatmulKey, MatrixAddress, StoredMatrix, Transpose};
pub use lower::{MatmulContext, lower_gemm, recommended_workspace};
