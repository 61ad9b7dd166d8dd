//! A matmul as cublasLtMatmul takes it.

use narrows_plan::DType;
use narrows_plan::program::BufferId;
use serde::{Deserialize, Serialize};

/// Whether a matrix is transposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Transpose {
    /// As stored, column-major.
    N,
    /// Transposed.
    T,
}

/// Storage of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredMatrix {
    /// Format of the elements.
    pub dtype: DType,
    /// Rows of a member of the batch, before any transposition.
    pub rows: u64,
    /// Columns of a member of the batch, before any transposition.
    pub columns: u64,
    /// Leading dimension: elements from the beginning of one column to the next.
    #[serde(rename = "leading")]
    pub leading_dimension: u64,
    /// Elements from the beginning of one member of the batch to the next; 0 for one member.
    pub batch_stride: u64,
    /// Alignment of the address of every member, in bytes: a power of two, at most 256. It assumes that the arena
    /// is aligned to 256 bytes, as all device memory is.
    pub alignment_bytes: u64,
}

/// A matmul without its addresses. The serialized form and the order are those of the algorithm files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MatmulKey {
    /// Rows of op(A) and of C.
    pub m: u64,
    /// Columns of op(B) and of C.
    pub n: u64,
    /// Columns of op(A) and rows of op(B).
    pub k: u64,
    /// Members of the batch.
    pub batch: u64,
    /// op of A.
    pub operation_a: Transpose,
    /// op of B.
    pub operation_b: Transpose,
    /// A.
    pub a: StoredMatrix,
    /// B.
    pub b: StoredMatrix,
    /// C, and the output D, which is stored alike.
    pub c: StoredMatrix,
    /// β: whether the result is added to C (1) or replaces it (0). α is 1.
    pub accumulate: bool,
    /// Maximum workspace of an algorithm.
    pub workspace_bytes: u64,
}

/// Start of a matrix in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatrixAddress {
    /// The buffer that contains it.
    pub buffer: BufferId,
    /// Offset of its first byte in the arena.
    pub offset: u64,
}

/// A call of cublasLtMatmul: bf16 or f32 operands, accumulation in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Matmul {
    /// Everything but the addresses.
    pub key: MatmulKey,
    /// A.
    pub a: MatrixAddress,
    /// B.
    pub b: MatrixAddress,
    /// C.
    pub c: MatrixAddress,
    /// D: C itself, or where a residual is added another matrix.
    pub d: MatrixAddress,
}
