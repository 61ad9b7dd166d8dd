//! A product as cublasLtMatmul takes it.
//!
//! For every member b of a batch, cublasLtMatmul computes
//!
//! ```text
//! C = op(A)·op(B) + β·C,   op(A): m×k, op(B): k×n, C: m×n,
//! ```
//!
//! on matrices whose columns are contiguous: the number in row i and column j of member b lies
//! `b·stride + j·ld + i` numbers behind the pointer. Our rows are contiguous, so what we have is the
//! transpose of what it sees, and the product is turned around: Y = L·R is Yᵀ = Rᵀ·Lᵀ, so A is R and B
//! is L, each as it lies in memory.
//!
//! | product | A | B | C | m, n, k |
//! |---|---|---|---|---|
//! | Y = X·W | W, as it is | X, as it is | Y | d_out, tokens, d_in |
//! | dX = dY·Wᵀ | W, transposed | dY, as it is | dX | d_in, tokens, d_out |
//! | dW += Xᵀ·dY | dY, as it is | X, transposed | dW | d_out, d_in, tokens |
//!
//! A tied head's weight is the embedding's table, Wᵀ as it is. Its first two products take the other of the
//! two forms of A. Its gradient is dWᵀ += dYᵀ·X: A is X as it is, B is dY transposed, m is d_in, n is d_out.
//!
//! Members of a batch lie side by side in the columns: `ld` is the width of all of them and
//! `stride` that of one. Numbers are bf16 or f32, sums are f32 always; the result is bf16 or f32.
//! So of the ways in which parts of a sum come together, an algorithm may only have those that keep it
//! in f32 (`CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE`).
//!
//! Nothing is executed here. [`MatmulKey`] is everything but the addresses: products of one key have the
//! same descriptors and the same best algorithm, which an [`AlgorithmStore`] keeps between runs.

mod store;

use narrows_plan::program::{Access, Action, BufferId, GemmOp, GemmRole, Phase, Region};
use narrows_plan::{Bytes, DType};
use serde::{Deserialize, Serialize};

use super::launch::{LaunchContext, UnsupportedInstr};
use narrows_runtime::ScheduledInstruction;
use narrows_runtime::operand_range;

pub use store::{AlgorithmStore, MatmulAlgorithm, Platform, Unusable};

/// How a matrix enters a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Transpose {
    /// As it lies in memory, column by column.
    N,
    /// Transposed.
    T,
}

/// How the numbers of a matrix lie behind its pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredMatrix {
    /// Their format.
    pub dtype: DType,
    /// Rows, of a member of the batch, before any transposition.
    pub rows: u64,
    /// Columns, likewise.
    pub columns: u64,
    /// The leading dimension: numbers from the beginning of a column to that of the next.
    pub leading: u64,
    /// Numbers from the beginning of a member of the batch to that of the next; 0 for one member.
    pub batch_stride: u64,
    /// What the address of every member is a multiple of, in bytes: a power of two, at most 256. It
    /// holds where the arena begins at a multiple of 256, as all device memory does.
    pub alignment_bytes: u64,
}

/// A product without its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MatmulKey {
    /// Rows of op(A) and of C.
    pub m: u64,
    /// Columns of op(B) and of C.
    pub n: u64,
    /// Columns of op(A) and rows of op(B).
    pub k: u64,
    /// How many products.
    pub batch: u64,
    /// op of A.
    pub operation_a: Transpose,
    /// op of B.
    pub operation_b: Transpose,
    /// A.
    pub a: StoredMatrix,
    /// B.
    pub b: StoredMatrix,
    /// C, which is read and written, or written only.
    pub c: StoredMatrix,
    /// β: whether the result is added to what C holds (1), or replaces it (0). α is 1.
    pub accumulate: bool,
    /// The most memory that an algorithm may want besides.
    pub workspace_bytes: u64,
}

/// Where a matrix begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatrixAddress {
    /// The buffer it is in.
    pub buffer: BufferId,
    /// Its first byte, from the beginning of the device's arena.
    pub offset: u64,
}

/// A product as cublasLtMatmul takes it: bf16 or f32 in, summed in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Matmul {
    /// Everything but the addresses.
    pub key: MatmulKey,
    /// A.
    pub a: MatrixAddress,
    /// B.
    pub b: MatrixAddress,
    /// C, and D.
    pub c: MatrixAddress,
}

/// What products depend on besides the instruction.
#[derive(Clone, Copy, Debug)]
pub struct MatmulSetting<'a> {
    /// The device's place, and its program.
    pub device: &'a LaunchContext<'a>,
    /// Whether the head's weight is the embedding's table: that of the program.
    pub tied: bool,
    /// What a product may use of memory besides: see [`workspace`].
    pub workspace: Bytes,
}

/// The memory that NVIDIA recommends a product may use besides its operands, by compute
/// capability: 32 MiB from the H100 on, 4 MiB before ("cuBLAS Library", `cublasSetWorkspace`).
pub fn workspace(capability: (u32, u32)) -> Bytes {
    Bytes(if capability.0 >= 9 { 32 << 20 } else { 4 << 20 })
}

/// Sides that cuBLASLt takes are 32 bits and signed.
const SIDE_MAX: u64 = i32::MAX as u64;

/// The product of an instruction: one, whatever its batch.
///
/// # Errors
/// A [`UnsupportedInstr`] that names the instruction, and what of it cuBLASLt does not do: another action
/// than a product, operands of other shapes or formats than the product's, or sizes beyond 32 bits.
pub fn matmul(
    setting: &MatmulSetting,
    moment: &ScheduledInstruction,
) -> Result<Matmul, UnsupportedInstr> {
    let made = match &moment.instr.action {
        Action::Gemm(product) => made(setting, moment, product),
        other => Err(format!("`{}` is no product", other.name())),
    };
    made.map_err(|why| UnsupportedInstr {
        pass: moment.instr.action.name(),
        origin: moment.instr.origin.clone(),
        why,
    })
}

/// An operand: the rows and columns of a member as they lie in memory, row by row, and how the
/// product takes them.
#[derive(Clone, Copy)]
struct MatmulSide<'a> {
    access: &'a Access,
    rows: u64,
    columns: u64,
    operation: Transpose,
}

fn made(
    setting: &MatmulSetting,
    moment: &ScheduledInstruction,
    product: &GemmOp,
) -> Result<Matmul, String> {
    let GemmOp { m, n, k, batch, accumulate, .. } = *product;
    let (reads, writes) = (&moment.instr.reads, &moment.instr.writes);
    let count = if accumulate { 3 } else { 2 };
    if reads.len() != count || writes.len() != 1 {
        return Err(format!("it reads {} operands and writes {}", reads.len(), writes.len()));
    }
    if accumulate && reads[2] != writes[0] {
        return Err("it adds to something else than what it writes".into());
    }
    if moment.phase == Phase::Step {
        return Err("it comes after all microbatches, where replicas have parts of weights".into());
    }
    if [m, n, k, batch].iter().any(|size| *size == 0 || *size > SIDE_MAX) {
        return Err(format!("{m}×{n}×{k}, {batch} times, is beyond 32 bits, or nothing"));
    }
    let [left, right, result] = sides(setting, moment, product)?;
    formats(&left, &right, &result)?;
    let stage = setting.device.stage;
    let bytes = |side: &MatmulSide| operand_range(stage, side.access, moment.slot);
    let written = bytes(&result);
    if [&left, &right].iter().any(|side| {
        let read = bytes(side);
        read.start < written.end && written.start < read.end
    }) {
        return Err("it writes over what it reads".into());
    }
    let begin =
        |side: &MatmulSide| MatrixAddress { buffer: side.access.buffer, offset: bytes(side).start };
    let stored = |side: &MatmulSide| side.stored(batch, bytes(side).start);
    let key = MatmulKey {
        m: result.columns,
        n: result.rows,
        k,
        batch,
        operation_a: right.operation,
        operation_b: left.operation,
        a: stored(&right),
        b: stored(&left),
        c: stored(&result),
        accumulate,
        workspace_bytes: setting.workspace.0,
    };
    Ok(Matmul { key, a: begin(&right), b: begin(&left), c: begin(&result) })
}

/// The factors of a product, left and right, and its result.
fn sides<'a>(
    setting: &MatmulSetting,
    moment: &ScheduledInstruction<'a>,
    product: &GemmOp,
) -> Result<[MatmulSide<'a>; 3], String> {
    let GemmOp { role: form, m, n, k, batch, .. } = *product;
    let [x, y, z] = [&moment.instr.reads[0], &moment.instr.reads[1], &moment.instr.writes[0]];
    let side = |access, rows, columns, operation| MatmulSide { access, rows, columns, operation };
    let (left, right) = match form {
        GemmRole::Forward => (side(x, m, k, Transpose::N), side(y, k, n, Transpose::N)),
        GemmRole::InputGradient => (side(x, m, k, Transpose::N), side(y, n, k, Transpose::T)),
        GemmRole::WeightGradient => (side(x, k, m, Transpose::T), side(y, k, n, Transpose::N)),
    };
    let result = side(z, m, n, Transpose::N);
    for side in [&left, &right, &result] {
        let (seen, wanted) = (side.access.extent, (side.rows, side.columns * batch));
        if (seen.rows, seen.columns) != wanted {
            return Err(format!("an operand is {seen}, and not {}×{}", wanted.0, wanted.1));
        }
    }
    let gradient = form == GemmRole::WeightGradient;
    if !stored_transposed(setting, if gradient { z } else { y }) {
        return Ok([left, right, result]);
    }
    if batch != 1 {
        return Err(format!("a table of {batch} heads side by side is not tied"));
    }
    Ok(match gradient {
        true => [right.turned(), left.turned(), result.transposed()],
        false => [left, right.transposed().turned(), result],
    })
}

impl MatmulSide<'_> {
    /// Of which the memory holds the transpose.
    fn transposed(self) -> Self {
        MatmulSide { rows: self.columns, columns: self.rows, ..self }
    }

    /// Taken the other way.
    fn turned(self) -> Self {
        let operation = match self.operation {
            Transpose::N => Transpose::T,
            Transpose::T => Transpose::N,
        };
        MatmulSide { operation, ..self }
    }

    /// Column by column, it is its transpose.
    fn stored(&self, batch: u64, offset: u64) -> StoredMatrix {
        let dtype = self.access.extent.dtype;
        let batch_stride = if batch == 1 { 0 } else { self.columns };
        let multiple = offset | (batch_stride * dtype.width()) | ALIGNMENT_MAX;
        StoredMatrix {
            dtype,
            rows: self.columns,
            columns: self.rows,
            leading: self.columns * batch,
            batch_stride,
            alignment_bytes: 1 << multiple.trailing_zeros(),
        }
    }
}

/// More is not asked of an address.
const ALIGNMENT_MAX: u64 = 256;

/// What cuBLASLt has of formats, as far as programs need them.
fn formats(left: &MatmulSide, right: &MatmulSide, result: &MatmulSide) -> Result<(), String> {
    use DType::{Bf16, F32};
    let [left, right, result] = [left, right, result].map(|side| side.access.extent.dtype);
    match (left, right, result) {
        (Bf16, Bf16, Bf16 | F32) | (F32, F32, F32) => Ok(()),
        _ => Err(format!("{} by {} into {}", left.name(), right.name(), result.name())),
    }
}

/// Whether a weight, or its gradient, is the table of a tied head.
fn stored_transposed(setting: &MatmulSetting, weight: &Access) -> bool {
    let buffer = setting.device.stage.buffer(weight.buffer);
    let parameter = matches!(buffer.region, Region::Weight | Region::Gradient);
    let members = buffer.shard.iter().flat_map(|shard| &shard.members);
    setting.tied && parameter && members.into_iter().any(|(name, _, _)| name == "head")
}
