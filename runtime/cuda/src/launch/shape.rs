//! Grids and blocks, and in which vectors memory is accessed.

use narrows_plan::DType;

use super::operand::{MatrixOperand, small};
use super::{Argument, KernelFamily, Launch, LaunchResult, Launches, MemorySpace};

/// Threads of a block, at most: what the kernels are compiled for.
const THREADS: u64 = 256;
/// Blocks that a sum over rows is divided among, at most: what an A100 of 108 multiprocessors runs at
/// once with four of them each, and most of what an H100 does. Below so many rows a block does not pay.
const PARTS: u64 = 432;
const ROWS_OF_PART: u64 = 8;
/// Bytes of shared memory that a block has on every device since the A100.
const SHARED_MAX: u64 = 160 * 1024;

/// In what a kernel accesses memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AccessFormat {
    dtype: DType,
    /// Numbers of a vector.
    pub vector: u64,
}

impl AccessFormat {
    /// The format of a kernel on these operands: vectors of 16 bytes where all of them allow it.
    pub fn of(dtype: DType, operands: &[MatrixOperand]) -> LaunchResult<AccessFormat> {
        if dtype == DType::U32 {
            return Err("it computes on token ids".to_string());
        }
        let wide = 16 / dtype.width();
        let all = operands.iter().all(|operand| operand.aligned(wide));
        Ok(AccessFormat { dtype, vector: if all { wide } else { 1 } })
    }

    /// As [`AccessFormat::of`] for kernels that take four numbers at a time, of formats that differ.
    pub fn of_four(dtype: DType, operands: &[MatrixOperand]) -> LaunchResult<AccessFormat> {
        let all = operands.iter().all(|operand| operand.aligned(4));
        Ok(AccessFormat { vector: if all { 4 } else { 1 }, ..AccessFormat::of(dtype, &[])? })
    }

    /// One number at a time, unless something else allows vectors too.
    pub fn narrow_unless(&mut self, allowed: bool) {
        if !allowed {
            self.vector = 1;
        }
    }

    /// The name of a kernel for it.
    pub fn name(&self, kernel: &str) -> String {
        format!("{kernel}_{}_v{}", self.dtype.name(), self.vector)
    }

    /// Threads of a row: as many as vectors, in whole warps, at most a block; where a row takes
    /// several rounds, as few as do it in as many.
    fn lanes(&self, columns: u64) -> u64 {
        let vectors = columns.div_ceil(self.vector).max(1);
        vectors.div_ceil(vectors.div_ceil(THREADS)).next_multiple_of(32)
    }
}

/// That operands have this format.
pub(super) fn expect(dtype: DType, operands: &[&MatrixOperand]) -> LaunchResult<()> {
    match operands.iter().find(|operand| operand.dtype != dtype) {
        Some(other) => {
            Err(format!("an operand is {} where {} is expected", other.dtype.name(), dtype.name()))
        }
        None => Ok(()),
    }
}

/// That operands have so many rows and columns.
pub(super) fn expect_shape(shape: (u64, u64), operands: &[&MatrixOperand]) -> LaunchResult<()> {
    match operands.iter().find(|operand| (operand.rows, operand.columns) != shape) {
        Some(other) => Err(format!(
            "an operand is [{}, {}] where [{}, {}] is expected",
            other.rows, other.columns, shape.0, shape.1
        )),
        None => Ok(()),
    }
}

/// That operands hold so many numbers, in whatever rows.
pub(super) fn expect_count(count: u64, operands: &[&MatrixOperand]) -> LaunchResult<()> {
    match operands.iter().find(|operand| operand.elements() != count) {
        Some(other) => {
            Err(format!("an operand has {} numbers where {count} are expected", other.elements()))
        }
        None => Ok(()),
    }
}

impl Launch {
    /// Lanes of a row by rows of a block; blocks for all rows.
    pub(super) fn over_rows(
        self,
        rows: u64,
        columns: u64,
        format: AccessFormat,
    ) -> LaunchResult<Launch> {
        let lanes = format.lanes(columns);
        let of_block = (THREADS / lanes).max(1);
        let blocks = small(rows.div_ceil(of_block))?;
        Ok(self.grid([blocks, 1, 1]).block([small(lanes)?, small(of_block)?, 1]))
    }

    /// A row of blocks for each of so many sums, for all columns of it.
    pub(super) fn over_columns(
        self,
        sums: u64,
        columns: u64,
        format: AccessFormat,
    ) -> LaunchResult<Launch> {
        let vectors = columns.div_ceil(format.vector).max(1);
        let lanes = vectors.next_multiple_of(32).min(THREADS / 2);
        let pieces = small(vectors.div_ceil(lanes).min(1 << 10))?;
        Ok(self.grid([small(sums)?, pieces, 1]).block([small(lanes)?, 1, 1]))
    }

    /// One block as large as they are.
    pub(super) fn one_block(self) -> Launch {
        self.grid([1, 1, 1]).block([THREADS as u32, 1, 1])
    }

    /// Threads for every vector of memory without rows. They go round where that is too many.
    pub(super) fn over_all(self, elements: u64, vector: u64) -> LaunchResult<Launch> {
        let blocks = elements.div_ceil(vector).div_ceil(THREADS).clamp(1, 1 << 16);
        Ok(self.grid([small(blocks)?, 1, 1]).block([small(THREADS)?, 1, 1]))
    }
}

/// A sum over rows in two launches: each block sums some of them into its own row of scratch
/// memory, `[parts, width]`; then the parts are added to the result in order.
pub(super) struct SplitSum {
    pub count: u64,
    pub width: u64,
}

impl SplitSum {
    /// For so many rows, and so many sums. The number of parts depends on nothing else.
    pub fn of(rows: u64, width: u64) -> SplitSum {
        SplitSum { count: rows.div_ceil(ROWS_OF_PART).clamp(1, PARTS), width }
    }

    /// Where blocks put their sums.
    pub fn scratch(&self) -> MatrixOperand {
        MatrixOperand::contiguous(MemorySpace::Scratch, 0, (self.count, self.width), DType::F32)
    }

    /// The grid and block of the kernel that makes the parts, a block a part.
    pub fn over_parts(
        &self,
        launch: Launch,
        columns: u64,
        format: AccessFormat,
    ) -> LaunchResult<Launch> {
        let lanes = small(format.lanes(columns))?;
        Ok(launch.grid([small(self.count)?, 1, 1]).block([lanes, 1, 1]))
    }

    /// After `launch`, which makes the parts, adds them to `into`.
    pub fn then_add(&self, launch: Launch, into: MatrixOperand) -> LaunchResult<Launches> {
        expect(DType::F32, &[&into])?;
        expect_count(self.width, &[&into])?;
        let arguments = vec![
            self.scratch().read(),
            into.flat().update(),
            Argument::U32(small(self.count)?),
            Argument::U32(small(self.width)?),
        ];
        let columns = small(self.width.div_ceil(32).max(1))?;
        let sum = Launch::new(KernelFamily::Elementwise, "sum_parts", arguments)
            .grid([columns, 1, 1])
            .block([32, 8, 1]);
        Ok(Launches { launches: vec![launch, sum], scratch_bytes: 4 * self.count * self.width })
    }
}

/// Shared memory for so many f32 numbers, or why not.
pub(super) fn shared_bytes(numbers: u64) -> LaunchResult<u32> {
    let bytes = 4 * numbers;
    if bytes > SHARED_MAX {
        let most = SHARED_MAX / 4;
        return Err(format!("a block keeps {numbers} sums in shared memory, which holds {most}"));
    }
    small(bytes)
}
