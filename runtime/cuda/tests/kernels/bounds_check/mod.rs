//! Verification that launches and matmuls access only the operands of their instruction.
//!
//! The accesses that a launch declares ([`ByteRows`]) are compared with the operands of the instruction: reads lie
//! within an operand, writes within a written operand, and scratch memory is within the requested size and written
//! before it is read. Whether a kernel respects the declared accesses is tested with the shim, where memory around
//! them must stay unchanged and reads outside of them return NaN.
//!
//! The check uses the program alone, and none of the code that produced the launches.

mod tests;

use std::ops::Range;

use narrows_cuda::{
    Argument, ByteRows, Launch, LaunchContext, Launches, Matmul, MatrixAddress, MemoryAccess,
    MemorySpace, OPTIMIZER_COEFFICIENTS, StoredMatrix, Transpose,
};
use narrows_plan::Zero;
use narrows_plan::program::{Access, Action, BufferRole, FusedOp, Phase};
use narrows_runtime::{ScheduledInstruction, operand_range};

/// Launch limits of an A100 and later devices.
const THREADS_MAX: u64 = 1024;
const GRID_YZ_MAX: u32 = 65_535;
const SHARED_MAX: u32 = 163 * 1024;

/// Bytes of the arena that an instruction accesses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AccessedBytes {
    /// Bytes read.
    pub read: u64,
    /// Bytes written.
    pub written: u64,
}

/// A launch or matmul with an access outside its operands, or beyond the limits of a device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("launch of `{kernel}` for {origin}: {reason}")]
pub struct OutOfBounds {
    /// Name of the kernel.
    pub kernel: String,
    /// Op that the instruction belongs to.
    pub origin: String,
    /// Which argument violates which limit.
    pub reason: String,
}

/// Verifies the launches of an instruction and counts the bytes they access.
///
/// # Errors
/// An [`OutOfBounds`] for the first launch with an access outside its operands.
pub fn check_launches(
    device: &LaunchContext,
    scheduled: &ScheduledInstruction,
    launches: &Launches,
) -> Result<AccessedBytes, OutOfBounds> {
    let mut accessed = AccessedBytes::default();
    let mut scratch_written = 0;
    for launch in &launches.launches {
        let violation = |reason: String| OutOfBounds {
            kernel: launch.kernel.clone(),
            origin: scheduled.instr.origin.to_string(),
            reason,
        };
        check_launch_limits(launch).map_err(violation)?;
        let mut scratch_end = scratch_written;
        for (index, argument) in launch.all_arguments().enumerate() {
            let Argument::Pointer(span) = argument else { continue };
            if span.rows == 0 || span.row_bytes == 0 {
                continue;
            }
            if span.rows > 1 && span.stride_bytes < span.row_bytes {
                return Err(violation(format!("rows of argument {index} overlap: {span:?}")));
            }
            let (first, last) = (span.row_range(0), span.row_range(span.rows - 1));
            let bytes = span.rows * span.row_bytes;
            match span.memory {
                MemorySpace::Arena => {
                    if !is_allowed(device, scheduled, span) {
                        let outside = format!("argument {index} is outside its operands: {span:?}");
                        return Err(violation(outside));
                    }
                    accessed.read += if span.access == MemoryAccess::Write { 0 } else { bytes };
                    accessed.written += if span.access == MemoryAccess::Read { 0 } else { bytes };
                }
                MemorySpace::Scratch => {
                    let all = launches.scratch_bytes;
                    let limit =
                        if span.access == MemoryAccess::Write { all } else { scratch_written };
                    if last.end > limit {
                        let outside = format!("argument {index} accesses {first:?} to {last:?}");
                        return Err(violation(format!(
                            "{outside} of {limit} bytes of scratch memory"
                        )));
                    }
                    scratch_end = scratch_end.max(last.end);
                }
                MemorySpace::Rotary => {
                    within_rotary_table(device, scheduled, &last, span).map_err(violation)?
                }
                MemorySpace::Coefficients => {
                    within_size(&last, 4 * OPTIMIZER_COEFFICIENTS, MemoryAccess::Read, span)
                        .map_err(violation)?;
                }
                MemorySpace::Loss => {
                    within_size(&last, 8, MemoryAccess::Update, span).map_err(violation)?
                }
            }
        }
        scratch_written = scratch_end;
    }
    Ok(accessed)
}

/// Verifies that the matrices of a matmul are exactly the operands of its instruction, and counts their bytes.
///
/// # Errors
/// An [`OutOfBounds`] for a matrix that is not an entire operand, for a descriptor that cuBLASLt rejects, for
/// shapes that do not match, and for a result with overlapping batch members.
pub fn check_matmul(
    device: &LaunchContext,
    scheduled: &ScheduledInstruction,
    matmul: &Matmul,
) -> Result<AccessedBytes, OutOfBounds> {
    let key = &matmul.key;
    let violation = |reason: String| OutOfBounds {
        kernel: "cublasLtMatmul".into(),
        origin: scheduled.instr.origin.to_string(),
        reason,
    };
    let before = |operation, (rows, columns)| match operation {
        Transpose::N => (rows, columns),
        Transpose::T => (columns, rows),
    };
    let [reads, writes] = [&scheduled.instr.reads, &scheduled.instr.writes].map(|of| &of[..]);
    let matrices = [
        ("A", matmul.a, key.a, before(key.operation_a, (key.m, key.k)), reads),
        ("B", matmul.b, key.b, before(key.operation_b, (key.k, key.n)), reads),
        ("C", matmul.c, key.c, (key.m, key.n), if matmul.c == matmul.d { writes } else { reads }),
        ("D", matmul.d, key.c, (key.m, key.n), writes),
    ];
    let mut bytes = [0; 4];
    for (index, (name, address, stored, shape, operands)) in matrices.into_iter().enumerate() {
        if shape != (stored.rows, stored.columns) {
            return Err(violation(format!("{name} is {stored:?} where {shape:?} is expected")));
        }
        bytes[index] =
            whole_operand(device, scheduled, (address, stored), (key.batch, operands))
                .map_err(|reason| violation(format!("{name} {reason}: {address:?}, {stored:?}")))?;
    }
    let read = if key.accumulate { bytes[2] } else { 0 };
    let is_in_place = matmul.c == matmul.d;
    if key.accumulate && is_in_place && !reads.contains(&writes[0]) {
        return Err(violation("C is accumulated into but not read".into()));
    }
    if !key.accumulate && !is_in_place {
        return Err(violation("D is not C, which is not added".into()));
    }
    Ok(AccessedBytes { read: bytes[0] + bytes[1] + read, written: bytes[3] })
}

/// Size in bytes of a matrix that is an entire operand. Its elements do not overlap, are as many as those of the
/// operand, and lie within it, so they cover it.
fn whole_operand(
    device: &LaunchContext,
    scheduled: &ScheduledInstruction,
    (address, stored): (MatrixAddress, StoredMatrix),
    (batch, operands): (u64, &[Access]),
) -> Result<u64, String> {
    let StoredMatrix { rows, columns, leading_dimension, batch_stride, .. } = stored;
    if rows == 0 || columns == 0 || batch == 0 {
        return Err("is empty".into());
    }
    let block = leading_dimension.saturating_mul(columns - 1).saturating_add(rows);
    let consecutive = batch == 1 || batch_stride >= block;
    let skipped = batch_stride.saturating_mul(batch - 1);
    let side_by_side = batch_stride >= rows && skipped.saturating_add(rows) <= leading_dimension;
    if leading_dimension < rows || !(consecutive || side_by_side) {
        return Err(format!("has {batch} members that overlap"));
    }
    let width = stored.dtype.width();
    let end = address.offset.saturating_add(skipped.saturating_add(block).saturating_mul(width));
    let bytes = width * rows * columns * batch;
    let operand = operands.iter().any(|access| {
        let range = operand_range(device.stage, access, scheduled.slot);
        access.buffer == address.buffer
            && access.extent.dtype == stored.dtype
            && range == (address.offset..end)
            && bytes == end - address.offset
    });
    if !operand {
        return Err("is not an operand".into());
    }
    let aligned = |begin: u64| begin.is_multiple_of(stored.alignment_bytes.max(1));
    if !aligned(address.offset) || !aligned(batch_stride * width) {
        return Err(format!("is not aligned to {} bytes", stored.alignment_bytes));
    }
    Ok(bytes)
}

/// Checks an access to memory of this size that allows one kind of access.
fn within_size(
    last: &Range<u64>,
    size: u64,
    access: MemoryAccess,
    span: &ByteRows,
) -> Result<(), String> {
    if last.end <= size && span.access == access {
        return Ok(());
    }
    Err(format!("{span:?} in {size} bytes that allow {access:?} only"))
}

/// Checks a read of the rotary table.
fn within_rotary_table(
    device: &LaunchContext,
    scheduled: &ScheduledInstruction,
    last: &Range<u64>,
    span: &ByteRows,
) -> Result<(), String> {
    let rotated = match scheduled.instr.action {
        Action::Fused(FusedOp::Rope { .. } | FusedOp::RopeBackward { .. }) => {
            device.constants.rope.dim
        }
        _ => 0,
    };
    let size = 4 * rotated * device.context.workload.sequence_length;
    within_size(last, size, MemoryAccess::Read, span)
}

fn check_launch_limits(launch: &Launch) -> Result<(), String> {
    let threads: u64 = launch.block.iter().map(|size| u64::from(*size)).product();
    if threads == 0 || threads > THREADS_MAX || !threads.is_multiple_of(32) {
        return Err(format!("a block of {threads} threads"));
    }
    let [x, y, z] = launch.grid;
    if x == 0 || y == 0 || z == 0 || x > i32::MAX as u32 || y > GRID_YZ_MAX || z > GRID_YZ_MAX {
        return Err(format!("a grid of {:?}", launch.grid));
    }
    if launch.shared_bytes > SHARED_MAX {
        return Err(format!("{} bytes of shared memory", launch.shared_bytes));
    }
    Ok(())
}

/// Whether the instruction's operands allow an access to the arena.
fn is_allowed(device: &LaunchContext, scheduled: &ScheduledInstruction, span: &ByteRows) -> bool {
    let op = match scheduled.instr.action {
        Action::Fused(op) => Some(op),
        Action::Attention(_) => None,
        _ => return false,
    };
    let (reads, writes) = (&scheduled.instr.reads, &scheduled.instr.writes);
    let read = reads.iter().chain(writes);
    let within = |access: &Access| {
        let rotated = matches!(op, Some(FusedOp::Rope { .. } | FusedOp::RopeBackward { .. }));
        if rotated {
            within_rows(device, scheduled, access, span)
        } else {
            within_range(device, scheduled, access, span)
        }
    };
    match span.access {
        MemoryAccess::Read => {
            read.clone().any(within) || (op == Some(FusedOp::AdamW) && is_square_sum(device, span))
        }
        MemoryAccess::Write | MemoryAccess::Update => writes.iter().any(within),
    }
}

/// Whether an access lies within the bytes of an operand.
fn within_range(
    device: &LaunchContext,
    scheduled: &ScheduledInstruction,
    access: &Access,
    span: &ByteRows,
) -> bool {
    let Range { start, end } = operand_range(device.stage, access, scheduled.slot);
    let buffer = device.stage.buffer(access.buffer);
    let size = end - start;
    // With ZeRO a replica updates its own part, and the operand is as large as that part. In passes, replicas access parts
    // only where they add gradients.
    let is_addition = scheduled.instr.action == Action::Fused(FusedOp::AddInto);
    let sharded = (scheduled.pass.phase == Phase::Step || is_addition)
        && device.context.zero != Zero::Off
        && (buffer.role.is_weight() || buffer.role.is_gradient())
        && access.extent.bytes() < buffer.extent.bytes();
    let position = device.coordinates.replica % device.context.shard_size;
    let start = if sharded { start + position * size } else { start };
    let last = span.row_range(span.rows - 1);
    span.begin >= start && last.end <= start + size
}

/// Whether an access lies within the first columns of each row of a buffer.
fn within_rows(
    device: &LaunchContext,
    scheduled: &ScheduledInstruction,
    access: &Access,
    span: &ByteRows,
) -> bool {
    let start = operand_range(device.stage, access, scheduled.slot).start;
    let buffer = device.stage.buffer(access.buffer).extent;
    let width = buffer.dtype.width();
    let (row, stride) = (access.extent.columns * width, buffer.columns * width);
    let Some(skipped) = span.begin.checked_sub(start) else { return false };
    let same_rows = span.rows <= 1 || span.stride_bytes == stride;
    let first = skipped / stride.max(1);
    same_rows
        && skipped % stride.max(1) + span.row_bytes <= row
        && first + span.rows <= access.extent.rows
}

/// Whether an access is to the sum of all squared gradients, which AdamW reads for clipping.
fn is_square_sum(device: &LaunchContext, span: &ByteRows) -> bool {
    device.stage.buffers.iter().any(|buffer| {
        buffer.role == BufferRole::SquareSum
            && buffer.offset == span.begin
            && span.rows == 1
            && span.row_bytes == 4
    })
}
