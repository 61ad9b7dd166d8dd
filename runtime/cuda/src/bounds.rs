//! That launches and products touch nothing but the operands of their instruction.
//!
//! What a launch says it touches ([`ByteRows`]s) is held against what the instruction names: what is
//! read lies within an operand, what is written within one that is written; scratch memory is
//! within the scratch memory that is asked for, and read only after it was written. That a kernel
//! touches what its launch says is another question: the shim answers it in tests, where all
//! memory around the spans must be unchanged, and what is read beside them is not a number.
//!
//! This uses the program alone, and none of the code that made the launches.

use std::ops::Range;

use narrows_plan::program::{Access, Action, FusedOp, Phase, Region};
use narrows_plan::strategy::Zero;

use super::launch::{
    Argument, ByteRows, COEFFICIENTS, Launch, LaunchContext, Launches, MemoryAccess, MemorySpace,
};
use super::products::{Matmul, MatrixAddress, StoredMatrix, Transpose};
use narrows_runtime::ScheduledInstruction;
use narrows_runtime::operand_range;

/// What a device of the A100's generation or later grants a launch.
const THREADS_MAX: u64 = 1024;
const GRID_YZ_MAX: u32 = 65_535;
const SHARED_MAX: u32 = 163 * 1024;

/// Bytes that launches touch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TouchedBytes {
    /// Of the arena, read.
    pub read: u64,
    /// Of the arena, written.
    pub written: u64,
}

/// A launch that touches what it must not, or that no device grants.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("launch of `{kernel}` for {origin}: {why}")]
pub struct OutOfBounds {
    /// The kernel.
    pub kernel: String,
    /// Where the instruction comes from.
    pub origin: String,
    /// Which argument does what.
    pub why: String,
}

/// Counts what the launches of an instruction touch.
///
/// # Errors
/// An [`OutOfBounds`] for the first launch that touches bytes outside its operands.
pub fn check(
    device: &LaunchContext,
    moment: &ScheduledInstruction,
    launches: &Launches,
) -> Result<TouchedBytes, OutOfBounds> {
    let mut touched = TouchedBytes::default();
    let mut scratch_written = 0;
    for launch in &launches.launches {
        let refuse = |why: String| OutOfBounds {
            kernel: launch.kernel.clone(),
            origin: moment.instr.origin.clone(),
            why,
        };
        granted(launch).map_err(refuse)?;
        let mut scratch_end = scratch_written;
        for (at, argument) in launch.arguments.iter().enumerate() {
            let Argument::Memory(span) = argument else { continue };
            if span.rows == 0 || span.row_bytes == 0 {
                continue;
            }
            if span.rows > 1 && span.stride_bytes < span.row_bytes {
                return Err(refuse(format!("rows of argument {at} overlap: {span:?}")));
            }
            let (first, last) = (span.row(0), span.row(span.rows - 1));
            let bytes = span.rows * span.row_bytes;
            match span.memory {
                MemorySpace::Arena => {
                    if !allowed(device, moment, span) {
                        let outside = format!("argument {at} is outside its operands: {span:?}");
                        return Err(refuse(outside));
                    }
                    touched.read += if span.touch == MemoryAccess::Write { 0 } else { bytes };
                    touched.written += if span.touch == MemoryAccess::Read { 0 } else { bytes };
                }
                MemorySpace::Scratch => {
                    let all = launches.scratch_bytes;
                    let known =
                        if span.touch == MemoryAccess::Write { all } else { scratch_written };
                    if last.end > known {
                        let outside = format!("argument {at} takes {first:?} to {last:?}");
                        return Err(refuse(format!(
                            "{outside} of {known} bytes of scratch memory"
                        )));
                    }
                    scratch_end = scratch_end.max(last.end);
                }
                MemorySpace::Rotary => within_table(device, moment, &last, span).map_err(refuse)?,
                MemorySpace::Coefficients => {
                    within_size(&last, 4 * COEFFICIENTS, MemoryAccess::Read, span)
                        .map_err(refuse)?;
                }
                MemorySpace::Loss => {
                    within_size(&last, 8, MemoryAccess::Update, span).map_err(refuse)?
                }
            }
        }
        scratch_written = scratch_end;
    }
    Ok(touched)
}

/// Counts what a product touches, which is each of its operands to the last byte: all of what it
/// reads, and each number of the result once.
///
/// # Errors
/// An [`OutOfBounds`] for a matrix that is not one of the operands, in whole; one whose descriptor
/// cuBLASLt refuses; sides that do not fit each other; or a result whose numbers share memory.
pub fn check_product(
    device: &LaunchContext,
    moment: &ScheduledInstruction,
    matmul: &Matmul,
) -> Result<TouchedBytes, OutOfBounds> {
    let key = &matmul.key;
    let refuse = |why: String| OutOfBounds {
        kernel: "cublasLtMatmul".into(),
        origin: moment.instr.origin.clone(),
        why,
    };
    let turned = |operation, side: (u64, u64)| match operation {
        Transpose::N => side,
        Transpose::T => (side.1, side.0),
    };
    let [reads, writes] = [&moment.instr.reads, &moment.instr.writes].map(|of| &of[..]);
    let matrices = [
        ("A", matmul.a, key.a, turned(key.operation_a, (key.m, key.k)), reads),
        ("B", matmul.b, key.b, turned(key.operation_b, (key.k, key.n)), reads),
        ("C", matmul.c, key.c, (key.m, key.n), writes),
    ];
    let mut bytes = [0; 3];
    for (at, (name, place, stored, side, operands)) in matrices.into_iter().enumerate() {
        if side != (stored.rows, stored.columns) {
            return Err(refuse(format!("{name} is {stored:?}, and is taken as {side:?}")));
        }
        bytes[at] = whole_operand(device, moment, (place, stored), (key.batch, operands))
            .map_err(|why| refuse(format!("{name} {why}: {place:?}, {stored:?}")))?;
    }
    let read = if key.accumulate { bytes[2] } else { 0 };
    if key.accumulate && !reads.contains(&writes[0]) {
        return Err(refuse("C is added to, and not read".into()));
    }
    Ok(TouchedBytes { read: bytes[0] + bytes[1] + read, written: bytes[2] })
}

/// The bytes of a matrix, which are those of an operand. Its numbers are in different places, as many as
/// the operand has, and within it: so they are all of it.
fn whole_operand(
    device: &LaunchContext,
    moment: &ScheduledInstruction,
    (place, stored): (MatrixAddress, StoredMatrix),
    (batch, operands): (u64, &[Access]),
) -> Result<u64, String> {
    let StoredMatrix { rows, columns, leading, batch_stride, .. } = stored;
    if rows == 0 || columns == 0 || batch == 0 {
        return Err("is empty".into());
    }
    let block = leading.saturating_mul(columns - 1).saturating_add(rows);
    let apart = batch == 1 || batch_stride >= block;
    let skipped = batch_stride.saturating_mul(batch - 1);
    let beside = batch_stride >= rows && skipped.saturating_add(rows) <= leading;
    if leading < rows || !(apart || beside) {
        return Err(format!("has {batch} members that share memory"));
    }
    let width = stored.dtype.width();
    let end = place.offset.saturating_add(skipped.saturating_add(block).saturating_mul(width));
    let bytes = width * rows * columns * batch;
    let operand = operands.iter().any(|access| {
        let range = operand_range(device.stage, access, moment.slot);
        access.buffer == place.buffer
            && access.extent.dtype == stored.dtype
            && range == (place.offset..end)
            && bytes == end - place.offset
    });
    if !operand {
        return Err("is no operand".into());
    }
    let aligned = |begin: u64| begin.is_multiple_of(stored.alignment_bytes.max(1));
    if !aligned(place.offset) || !aligned(batch_stride * width) {
        return Err(format!("is not aligned to {} bytes", stored.alignment_bytes));
    }
    Ok(bytes)
}

/// Within memory of so many bytes that is touched in one way.
fn within_size(
    last: &Range<u64>,
    size: u64,
    touch: MemoryAccess,
    span: &ByteRows,
) -> Result<(), String> {
    if last.end <= size && span.touch == touch {
        return Ok(());
    }
    Err(format!("{span:?} of {size} bytes, which are only for {touch:?}"))
}

/// Within the rotary table of the model's heads.
fn within_table(
    device: &LaunchContext,
    moment: &ScheduledInstruction,
    last: &Range<u64>,
    span: &ByteRows,
) -> Result<(), String> {
    let head_dim = match moment.instr.action {
        Action::Fused(FusedOp::Rope { head_dim } | FusedOp::RopeBackward { head_dim }) => head_dim,
        _ => 0,
    };
    let size = 4 * head_dim * device.context.workload.sequence_length;
    within_size(last, size, MemoryAccess::Read, span)
}

fn granted(launch: &Launch) -> Result<(), String> {
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

/// Whether a span lies within what the instruction may touch in that way.
fn allowed(device: &LaunchContext, moment: &ScheduledInstruction, span: &ByteRows) -> bool {
    let op = match moment.instr.action {
        Action::Fused(op) => Some(op),
        Action::Attention(_) => None,
        _ => return false,
    };
    let (reads, writes) = (&moment.instr.reads, &moment.instr.writes);
    let read = reads.iter().chain(writes);
    let within = |access: &Access| {
        let rotated = matches!(op, Some(FusedOp::Rope { .. } | FusedOp::RopeBackward { .. }));
        if rotated {
            within_rows(device, moment, access, span)
        } else {
            within_range(device, moment, access, span)
        }
    };
    match span.touch {
        MemoryAccess::Read => {
            read.clone().any(within) || (op == Some(FusedOp::AdamW) && is_square_sum(device, span))
        }
        MemoryAccess::Write | MemoryAccess::Update => writes.iter().any(within),
    }
}

/// Within the bytes of an operand.
fn within_range(
    device: &LaunchContext,
    moment: &ScheduledInstruction,
    access: &Access,
    span: &ByteRows,
) -> bool {
    let Range { start, end } = operand_range(device.stage, access, moment.slot);
    let buffer = device.stage.buffer(access.buffer);
    let size = end - start;
    // With ZeRO-1 a replica updates its own part, and the operand is as long as the part.
    let parted = moment.phase == Phase::Step
        && device.context.zero == Zero::One
        && matches!(buffer.region, Region::Weight | Region::Gradient)
        && access.extent.bytes() < buffer.extent.bytes();
    let start = if parted { start + device.data * size } else { start };
    let last = span.row(span.rows - 1);
    span.begin >= start && last.end <= start + size
}

/// Within the first columns of each row of a buffer.
fn within_rows(
    device: &LaunchContext,
    moment: &ScheduledInstruction,
    access: &Access,
    span: &ByteRows,
) -> bool {
    let start = operand_range(device.stage, access, moment.slot).start;
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

/// The sum of all squared gradients, which decides how much they are clipped.
fn is_square_sum(device: &LaunchContext, span: &ByteRows) -> bool {
    device.stage.buffers.iter().any(|buffer| {
        buffer.region == Region::Input
            && buffer.name == "square sum"
            && buffer.offset == span.begin
            && span.rows == 1
            && span.row_bytes == 4
    })
}
