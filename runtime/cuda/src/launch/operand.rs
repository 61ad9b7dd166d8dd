//! Operands as kernel arguments: where they lie, and which of their bytes a kernel accesses.

use std::ops::Range;

use narrows_plan::DType;

/// A result, or the reason why an instruction is not supported.
pub(super) type LaunchResult<T> = Result<T, String>;

/// Memory that a pointer argument refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MemorySpace {
    /// The arena of the program.
    Arena,
    /// Scratch memory shared by the launches of one instruction.
    Scratch,
    /// Cosines and sines of all positions, computed once per session:
    /// [`rotary_table`](super::rotary_table).
    Rotary,
    /// Scalars of the optimizer for the step: [`optimizer_coefficients`](super::optimizer_coefficients).
    Coefficients,
    /// This device's contribution to the loss of the step, one f64. Zeroed before every step.
    Loss,
}

/// Access of a kernel to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryAccess {
    /// Reads only.
    Read,
    /// Writes every byte, with the other launches of the instruction, without reading.
    Write,
    /// Reads and writes.
    Update,
}

/// The bytes that a kernel accesses through one pointer: rows of equal length at a constant stride.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteRows {
    /// The memory.
    pub memory: MemorySpace,
    /// Offset of the first byte, which is the value of the pointer.
    pub begin: u64,
    /// Number of rows.
    pub rows: u64,
    /// Bytes per row.
    pub row_bytes: u64,
    /// Bytes from the beginning of one row to the next.
    pub stride_bytes: u64,
    /// Kind of access.
    pub access: MemoryAccess,
}

/// An argument of a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Argument {
    /// A pointer.
    Pointer(ByteRows),
    /// A null pointer, where the kernel allows it.
    Null,
    /// A 32-bit integer.
    U32(u32),
    /// A 64-bit integer.
    U64(u64),
    /// A 32-bit float.
    F32(f32),
}

impl ByteRows {
    /// The bytes of one row.
    pub fn row_range(&self, row: u64) -> Range<u64> {
        let begin = self.begin + row * self.stride_bytes;
        begin..begin + self.row_bytes
    }
}

/// A row-major matrix in a memory space.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct MatrixOperand {
    pub memory: MemorySpace,
    /// Offset of the first byte.
    pub begin: u64,
    pub rows: u64,
    pub columns: u64,
    /// Elements from the beginning of one row to the next.
    pub stride: u64,
    pub dtype: DType,
}

impl MatrixOperand {
    /// A matrix without gaps between rows.
    pub fn contiguous(
        memory: MemorySpace,
        begin: u64,
        (rows, columns): (u64, u64),
        dtype: DType,
    ) -> Self {
        MatrixOperand { memory, begin, rows, columns, stride: columns, dtype }
    }

    /// Columns `first` to `first + count`.
    pub fn column_range(self, first: u64, count: u64) -> LaunchResult<MatrixOperand> {
        if first + count > self.columns {
            return Err(format!("columns {first} to {} of {}", first + count, self.columns));
        }
        Ok(MatrixOperand { begin: self.begin + first * self.dtype.width(), columns: count, ..self })
    }

    /// Rows `first` to `first + count`, which exist.
    pub fn row_range(self, first: u64, count: u64) -> MatrixOperand {
        let begin = self.begin + first * self.stride * self.dtype.width();
        MatrixOperand { begin, rows: count, ..self }
    }

    /// All elements as one row.
    pub fn flat(self) -> MatrixOperand {
        let columns = self.rows * self.columns;
        MatrixOperand { rows: 1, columns, stride: columns, ..self }
    }

    pub fn elements(&self) -> u64 {
        self.rows * self.columns
    }

    /// Whether every row is aligned for vectors of this many elements.
    pub fn is_aligned(&self, elements: u64) -> bool {
        let bytes = (elements * self.dtype.width()).min(16);
        let stride = if self.rows > 1 { self.stride * self.dtype.width() } else { 0 };
        self.begin.is_multiple_of(bytes) && stride.is_multiple_of(bytes)
    }

    pub fn read(&self) -> Argument {
        self.pointer(MemoryAccess::Read)
    }

    pub fn write(&self) -> Argument {
        self.pointer(MemoryAccess::Write)
    }

    pub fn update(&self) -> Argument {
        self.pointer(MemoryAccess::Update)
    }

    /// A pointer that is updated with `writes`, and read without.
    pub fn read_or_update(&self, writes: bool) -> Argument {
        if writes { self.update() } else { self.read() }
    }

    /// A pointer that is updated with `accumulate`, and written without.
    pub fn write_or_update(&self, accumulate: bool) -> Argument {
        if accumulate { self.update() } else { self.write() }
    }

    fn pointer(&self, access: MemoryAccess) -> Argument {
        let width = self.dtype.width();
        Argument::Pointer(ByteRows {
            memory: self.memory,
            begin: self.begin,
            rows: self.rows,
            row_bytes: self.columns * width,
            stride_bytes: self.stride * width,
            access,
        })
    }
}

/// Converts a size to 32 bits.
pub(super) fn to_u32(size: u64) -> LaunchResult<u32> {
    u32::try_from(size).map_err(|_| format!("a size of {size} exceeds 32 bits"))
}

/// Sizes as arguments.
pub(super) fn u32_arguments(sizes: &[u64]) -> LaunchResult<Vec<Argument>> {
    sizes.iter().map(|size| to_u32(*size).map(Argument::U32)).collect()
}

/// A boolean argument.
pub(super) fn flag(value: bool) -> Argument {
    Argument::U32(u32::from(value))
}

/// Checks that operands have this format.
pub(super) fn expect_dtype(dtype: DType, operands: &[&MatrixOperand]) -> LaunchResult<()> {
    match operands.iter().find(|operand| operand.dtype != dtype) {
        Some(other) => {
            Err(format!("an operand is {} where {} is expected", other.dtype.name(), dtype.name()))
        }
        None => Ok(()),
    }
}

/// Checks that operands have this many rows and columns.
pub(super) fn expect_shape(shape: (u64, u64), operands: &[&MatrixOperand]) -> LaunchResult<()> {
    match operands.iter().find(|operand| (operand.rows, operand.columns) != shape) {
        Some(other) => Err(format!(
            "an operand is [{}, {}] where [{}, {}] is expected",
            other.rows, other.columns, shape.0, shape.1
        )),
        None => Ok(()),
    }
}

/// Checks that operands have this many elements, in any number of rows.
pub(super) fn expect_elements(count: u64, operands: &[&MatrixOperand]) -> LaunchResult<()> {
    match operands.iter().find(|operand| operand.elements() != count) {
        Some(other) => {
            Err(format!("an operand has {} elements where {count} are expected", other.elements()))
        }
        None => Ok(()),
    }
}

/// Views an operand as one f32 per row.
pub(super) fn row_statistic(operand: MatrixOperand, rows: u64) -> LaunchResult<MatrixOperand> {
    expect_dtype(DType::F32, &[&operand])?;
    expect_elements(rows, &[&operand])?;
    Ok(operand.flat())
}

/// The number of rows and of columns as two arguments.
pub(super) fn row_and_column_counts(operand: &MatrixOperand) -> LaunchResult<[Argument; 2]> {
    Ok([Argument::U32(to_u32(operand.rows)?), Argument::U32(to_u32(operand.columns)?)])
}
