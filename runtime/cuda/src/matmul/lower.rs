//! Lowering of a program's GEMMs to matmuls.

use narrows_plan::program::{Access, Action, GemmOp, GemmRole, ParameterShard, Phase};
use narrows_plan::{Bytes, DType};
use narrows_runtime::{ScheduledInstruction, operand_range};

use super::key::{Matmul, MatmulKey, MatrixAddress, StoredMatrix, Transpose};
use crate::launch::{LaunchContext, UnsupportedInstr};

/// Context of matmuls: the device and its program.
#[derive(Clone, Copy, Debug)]
pub struct MatmulContext<'a> {
    /// The device and its program.
    pub device: &'a LaunchContext<'a>,
    /// Whether the head's weight is the embedding table.
    pub tied: bool,
    /// Maximum workspace of a matmul: see [`recommended_workspace`].
    pub workspace: Bytes,
}

/// Workspace of matmuls by compute capability. NVIDIA recommends at least 32 MiB from the H100 on and 4 MiB before
/// ("cuBLAS Library", `cublasSetWorkspace`). More lets algorithms split k: the parts in f32 of a weight gradient of
/// 2,048 × 5,472 take 43 MiB each.
pub fn recommended_workspace(capability: (u32, u32)) -> Bytes {
    Bytes(if capability.0 >= 9 { 256 << 20 } else { 64 << 20 })
}

/// Maximum dimension: cuBLASLt takes signed 32-bit integers.
const DIMENSION_MAX: u64 = i32::MAX as u64;

/// Maximum alignment that is reported for an address.
const ALIGNMENT_MAX: u64 = 256;

/// The matmul of a GEMM instruction; a batched GEMM is one matmul.
///
/// # Errors
/// An [`UnsupportedInstr`] for any other action, for operands whose shapes or formats do not match the GEMM, and
/// for dimensions beyond 32 bits.
pub fn lower_gemm(
    context: &MatmulContext,
    scheduled: &ScheduledInstruction,
) -> Result<Matmul, UnsupportedInstr> {
    let matmul = match &scheduled.instr.action {
        Action::Gemm(gemm) => checked_matmul(context, scheduled, gemm),
        other => Err(format!("`{}` is not a GEMM", other.name())),
    };
    matmul.map_err(|reason| UnsupportedInstr::new(scheduled, reason))
}

/// An operand: rows and columns of one batch member as stored, row-major, and its transposition.
#[derive(Clone, Copy)]
struct MatmulOperand<'a> {
    access: &'a Access,
    rows: u64,
    columns: u64,
    operation: Transpose,
}

fn checked_matmul(
    context: &MatmulContext,
    scheduled: &ScheduledInstruction,
    gemm: &GemmOp,
) -> Result<Matmul, String> {
    let GemmOp { m, n, k, batch, accumulate, .. } = *gemm;
    let (reads, writes) = (&scheduled.instr.reads, &scheduled.instr.writes);
    let count = if accumulate { 3 } else { 2 };
    if reads.len() != count || writes.len() != 1 {
        return Err(format!("it reads {} operands and writes {}", reads.len(), writes.len()));
    }
    if accumulate && !gemm.is_residual_sum() && reads[2] != writes[0] {
        return Err("it accumulates into another operand than it writes".into());
    }
    if scheduled.pass.phase == Phase::Step {
        return Err("it is in the step phase, where replicas hold parts of weights".into());
    }
    if [m, n, k, batch].iter().any(|size| *size == 0 || *size > DIMENSION_MAX) {
        return Err(format!("{m}×{n}×{k} with batch {batch} is empty or exceeds 32 bits"));
    }
    let [left, right, result] = operands(context, scheduled, gemm)?;
    let addend = match gemm.is_residual_sum() {
        true => MatmulOperand { access: &reads[2], ..result },
        false => result,
    };
    if addend.access.extent != result.access.extent {
        return Err(format!("it adds {} to {}", result.access.extent, addend.access.extent));
    }
    check_formats(&left, &right, &result)?;
    let stage = context.device.stage;
    let bytes = |operand: &MatmulOperand| operand_range(stage, operand.access, scheduled.slot);
    let written = bytes(&result);
    let read = [&left, &right].into_iter().chain(gemm.is_residual_sum().then_some(&addend));
    if read.into_iter().any(|operand| {
        let read = bytes(operand);
        read.start < written.end && written.start < read.end
    }) {
        return Err("its result overlaps an operand".into());
    }
    let address = |operand: &MatmulOperand| MatrixAddress {
        buffer: operand.access.buffer,
        offset: bytes(operand).start,
    };
    let stored = |operand: &MatmulOperand| operand.stored(batch, bytes(operand).start);
    let key = MatmulKey {
        m: result.columns,
        n: result.rows,
        k,
        batch,
        operation_a: right.operation,
        operation_b: left.operation,
        a: stored(&right),
        b: stored(&left),
        c: stored_alike(stored(&addend), stored(&result)),
        accumulate,
        workspace_bytes: context.workspace.0,
    };
    let [a, b, c, d] = [&right, &left, &addend, &result].map(address);
    Ok(Matmul { key, a, b, c, d })
}

/// C and D with the alignment of both.
fn stored_alike(c: StoredMatrix, d: StoredMatrix) -> StoredMatrix {
    StoredMatrix { alignment_bytes: c.alignment_bytes.min(d.alignment_bytes), ..d }
}

/// The left factor, the right factor and the result of a GEMM.
fn operands<'a>(
    context: &MatmulContext,
    scheduled: &ScheduledInstruction<'a>,
    gemm: &GemmOp,
) -> Result<[MatmulOperand<'a>; 3], String> {
    let GemmOp { role, m, n, k, batch, .. } = *gemm;
    let instr = scheduled.instr;
    let [x, y, z] = [&instr.reads[0], &instr.reads[1], &instr.writes[0]];
    let operand =
        |access, rows, columns, operation| MatmulOperand { access, rows, columns, operation };
    let (left, right) = match role {
        GemmRole::Forward => (operand(x, m, k, Transpose::N), operand(y, k, n, Transpose::N)),
        GemmRole::InputGradient => (operand(x, m, k, Transpose::N), operand(y, n, k, Transpose::T)),
        GemmRole::WeightGradient => {
            (operand(x, k, m, Transpose::T), operand(y, k, n, Transpose::N))
        }
    };
    let result = operand(z, m, n, Transpose::N);
    for operand in [&left, &right, &result] {
        let extent = operand.access.extent;
        let (rows, columns) = (operand.rows, operand.columns * batch);
        if (extent.rows, extent.columns) != (rows, columns) {
            return Err(format!("an operand is {extent}, not {rows}×{columns}"));
        }
    }
    let is_gradient = role == GemmRole::WeightGradient;
    if !is_tied_table(context, if is_gradient { z } else { y }) {
        return Ok([left, right, result]);
    }
    if batch != 1 {
        return Err(format!("a tied head cannot be batched, and this batch is {batch}"));
    }
    Ok(match is_gradient {
        true => [right.flipped(), left.flipped(), result.transposed()],
        false => [left, right.transposed().flipped(), result],
    })
}

impl MatmulOperand<'_> {
    /// The same operand where the buffer stores the transpose.
    fn transposed(self) -> Self {
        MatmulOperand { rows: self.columns, columns: self.rows, ..self }
    }

    /// The same operand with the opposite operation.
    fn flipped(self) -> Self {
        let operation = match self.operation {
            Transpose::N => Transpose::T,
            Transpose::T => Transpose::N,
        };
        MatmulOperand { operation, ..self }
    }

    /// Column-major storage, which is the transpose of the row-major matrix.
    fn stored(&self, batch: u64, offset: u64) -> StoredMatrix {
        let dtype = self.access.extent.dtype;
        let batch_stride = if batch == 1 { 0 } else { self.columns };
        let multiple = offset | (batch_stride * dtype.width()) | ALIGNMENT_MAX;
        StoredMatrix {
            dtype,
            rows: self.columns,
            columns: self.rows,
            leading_dimension: self.columns * batch,
            batch_stride,
            alignment_bytes: 1 << multiple.trailing_zeros(),
        }
    }
}

/// Checks that cuBLASLt supports this combination of formats, of those that programs have.
fn check_formats(
    left: &MatmulOperand,
    right: &MatmulOperand,
    result: &MatmulOperand,
) -> Result<(), String> {
    use DType::{Bf16, F32};
    let [left, right, result] = [left, right, result].map(|operand| operand.access.extent.dtype);
    match (left, right, result) {
        (Bf16, Bf16, Bf16 | F32) | (F32, F32, F32) => Ok(()),
        _ => Err(format!("{} by {} into {}", left.name(), right.name(), result.name())),
    }
}

/// Whether a weight or a gradient is the embedding table as the weight of a tied head, which stores the transpose.
fn is_tied_table(context: &MatmulContext, weight: &Access) -> bool {
    let buffer = context.device.stage.buffer(weight.buffer);
    let is_parameter = buffer.role.is_weight() || buffer.role.is_gradient();
    let is_head = buffer.shard.as_ref().is_some_and(ParameterShard::holds_head);
    context.tied && is_parameter && is_head
}
