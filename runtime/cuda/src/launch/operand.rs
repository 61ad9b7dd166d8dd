//! Operands as arguments of kernels: where they lie, and which of their bytes a kernel touches.

use std::ops::Range;

use narrows_plan::DType;
use narrows_plan::program::Access;

use super::{InstrSite, LaunchResult};
use narrows_runtime::replica_operand_range;

/// What an argument points into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MemorySpace {
    /// The arena of the program.
    Arena,
    /// Memory that the launches of one instruction share.
    Scratch,
    /// Cosines and sines of all positions, made once a session:
    /// [`rotary_table`](super::rotary_table).
    Rotary,
    /// The optimizer's numbers of the step: [`coefficients`](super::coefficients).
    Coefficients,
    /// The step's loss as this device has seen it, one f64. Zeroed before a step.
    Loss,
}

/// What a kernel does there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryAccess {
    /// Reads.
    Read,
    /// Writes all of it, whatever was there.
    Write,
    /// Reads and writes.
    Update,
}

/// The bytes behind a pointer that a kernel touches: rows of equal length, at equal distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteRows {
    /// Where.
    pub memory: MemorySpace,
    /// The first byte: what the pointer points to.
    pub begin: u64,
    /// How many rows.
    pub rows: u64,
    /// Bytes of a row.
    pub row_bytes: u64,
    /// Bytes from the beginning of a row to that of the next.
    pub stride_bytes: u64,
    /// What is done.
    pub touch: MemoryAccess,
}

/// What a kernel is given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Argument {
    /// A pointer to memory.
    Memory(ByteRows),
    /// A null pointer, where a kernel allows it.
    Absent,
    /// 32 bits.
    U32(u32),
    /// 64 bits.
    U64(u64),
    /// A number.
    F32(f32),
}

impl ByteRows {
    /// The bytes of a row.
    pub fn row(&self, row: u64) -> Range<u64> {
        let begin = self.begin + row * self.stride_bytes;
        begin..begin + self.row_bytes
    }
}

/// An operand as a matrix in the arena, or in scratch memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct MatrixOperand {
    pub memory: MemorySpace,
    pub begin: u64,
    pub rows: u64,
    pub columns: u64,
    /// Numbers from the beginning of a row to that of the next.
    pub stride: u64,
    pub dtype: DType,
}

impl MatrixOperand {
    /// Rows without a gap between them.
    pub fn contiguous(
        memory: MemorySpace,
        begin: u64,
        (rows, columns): (u64, u64),
        dtype: DType,
    ) -> Self {
        MatrixOperand { memory, begin, rows, columns, stride: columns, dtype }
    }

    /// Some of its columns.
    pub fn column_range(self, first: u64, count: u64) -> LaunchResult<MatrixOperand> {
        if first + count > self.columns {
            return Err(format!("columns {first} to {} of {}", first + count, self.columns));
        }
        Ok(MatrixOperand { begin: self.begin + first * self.dtype.width(), columns: count, ..self })
    }

    /// Its numbers in one row.
    pub fn flat(self) -> MatrixOperand {
        let columns = self.rows * self.columns;
        MatrixOperand { rows: 1, columns, stride: columns, ..self }
    }

    pub fn elements(&self) -> u64 {
        self.rows * self.columns
    }

    /// Whether every row begins where a vector of so many numbers may.
    pub fn aligned(&self, numbers: u64) -> bool {
        let bytes = (numbers * self.dtype.width()).min(16);
        let stride = if self.rows > 1 { self.stride * self.dtype.width() } else { 0 };
        self.begin.is_multiple_of(bytes) && stride.is_multiple_of(bytes)
    }

    pub fn read(&self) -> Argument {
        self.touched(MemoryAccess::Read)
    }

    pub fn write(&self) -> Argument {
        self.touched(MemoryAccess::Write)
    }

    pub fn update(&self) -> Argument {
        self.touched(MemoryAccess::Update)
    }

    /// Written, or added to.
    pub fn made(&self, add: bool) -> Argument {
        if add { self.update() } else { self.write() }
    }

    fn touched(&self, touch: MemoryAccess) -> Argument {
        let width = self.dtype.width();
        Argument::Memory(ByteRows {
            memory: self.memory,
            begin: self.begin,
            rows: self.rows,
            row_bytes: self.columns * width,
            stride_bytes: self.stride * width,
            touch,
        })
    }
}

/// 32 bits of a size, or why not.
pub(super) fn small(size: u64) -> LaunchResult<u32> {
    u32::try_from(size).map_err(|_| format!("a size of {size} exceeds 32 bits"))
}

impl<Op> InstrSite<'_, Op> {
    /// A read operand.
    pub fn read(&self, port: usize) -> LaunchResult<MatrixOperand> {
        let reads = &self.moment.instr.reads;
        let access = reads.get(port).ok_or_else(|| format!("it reads {} operands", reads.len()))?;
        Ok(self.operand(access))
    }

    /// A written operand.
    pub fn write(&self, port: usize) -> LaunchResult<MatrixOperand> {
        let writes = &self.moment.instr.writes;
        let access =
            writes.get(port).ok_or_else(|| format!("it writes {} operands", writes.len()))?;
        Ok(self.operand(access))
    }

    /// An operand where this device has it. Parameters of which this replica updates a part are
    /// seen as that part.
    pub fn operand(&self, access: &Access) -> MatrixOperand {
        let InstrSite { device, moment, .. } = self;
        let seen = (access, moment.phase, moment.slot);
        let begin = replica_operand_range(device.stage, (device.context, device.data), seen).start;
        let shape = (access.extent.rows, access.extent.columns);
        MatrixOperand::contiguous(MemorySpace::Arena, begin, shape, access.extent.dtype)
    }
}
