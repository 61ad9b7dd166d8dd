//! Grids, blocks, and the vector width of memory accesses.

use narrows_plan::DType;

use super::operand::{
    Argument, LaunchResult, MatrixOperand, MemorySpace, expect_dtype, expect_elements, to_u32,
};
use super::site::{Launch, LaunchContext, Launches};
use crate::kernel_source::KernelFamily;

/// Maximum threads per block; the kernels are compiled for it.
const BLOCK_THREADS: u64 = 256;
/// Maximum number of blocks per multiprocessor that share a sum over rows: as many as run at once within the registers that
/// the kernels are compiled for.
const PARTS_PER_MULTIPROCESSOR: u64 = 4;
/// Minimum rows per block of a sum over rows; fewer do not amortise a block.
const ROWS_PER_PART: u64 = 8;
/// Shared memory per block, in bytes, that every device since the A100 grants.
const SHARED_MAX: u64 = 160 * 1024;

/// Element type and vector width with which a kernel accesses memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct VectorFormat {
    dtype: DType,
    /// Elements per vector.
    pub vector: u64,
}

impl VectorFormat {
    /// The format for these operands: vectors of 16 bytes where all of them are aligned.
    pub fn common(dtype: DType, operands: &[MatrixOperand]) -> LaunchResult<VectorFormat> {
        if dtype == DType::U32 {
            return Err("it computes on token ids".to_string());
        }
        let wide = 16 / dtype.width();
        let all = operands.iter().all(|operand| operand.is_aligned(wide));
        Ok(VectorFormat { dtype, vector: if all { wide } else { 1 } })
    }

    /// The format for kernels with vectors of four elements of different types.
    pub fn common_quads(dtype: DType, operands: &[MatrixOperand]) -> LaunchResult<VectorFormat> {
        let all = operands.iter().all(|operand| operand.is_aligned(4));
        Ok(VectorFormat { vector: if all { 4 } else { 1 }, ..VectorFormat::common(dtype, &[])? })
    }

    /// Falls back to single elements unless a further condition for vectors holds.
    pub fn require(&mut self, vectors_allowed: bool) {
        if !vectors_allowed {
            self.vector = 1;
        }
    }

    /// Name of the kernel instance for this format.
    pub fn kernel_name(&self, kernel: &str) -> String {
        format!("{kernel}_{}_v{}", self.dtype.name(), self.vector)
    }

    /// Threads per row: one per vector, rounded up to whole warps and limited to a block. A row that needs
    /// several rounds gets the fewest threads that finish in as many rounds.
    fn threads_per_row(&self, columns: u64) -> u64 {
        let vectors = columns.div_ceil(self.vector).max(1);
        vectors.div_ceil(vectors.div_ceil(BLOCK_THREADS)).next_multiple_of(32)
    }

    /// Threads per row, and rows per block.
    fn block(&self, columns: u64) -> (u64, u64) {
        let row_threads = self.threads_per_row(columns);
        (row_threads, (BLOCK_THREADS / row_threads).max(1))
    }
}

impl Launch {
    /// Sets a grid that covers all rows, with as many rows per block as fit.
    pub(super) fn over_rows(
        self,
        rows: u64,
        columns: u64,
        format: VectorFormat,
    ) -> LaunchResult<Launch> {
        let (row_threads, block_rows) = format.block(columns);
        let blocks = to_u32(rows.div_ceil(block_rows))?;
        Ok(self.grid([blocks, 1, 1]).block([to_u32(row_threads)?, to_u32(block_rows)?, 1]))
    }

    /// Sets a grid with a row of blocks for each of `sums`, which together cover all columns.
    pub(super) fn over_columns(
        self,
        sums: u64,
        columns: u64,
        format: VectorFormat,
    ) -> LaunchResult<Launch> {
        let vectors = columns.div_ceil(format.vector).max(1);
        let row_threads = vectors.next_multiple_of(32).min(BLOCK_THREADS / 2);
        let slices = to_u32(vectors.div_ceil(row_threads).min(1 << 10))?;
        Ok(self.grid([to_u32(sums)?, slices, 1]).block([to_u32(row_threads)?, 1, 1]))
    }

    /// Sets a grid of one block of maximum size.
    pub(super) fn one_block(self) -> Launch {
        self.grid([1, 1, 1]).block([BLOCK_THREADS as u32, 1, 1])
    }

    /// Sets a grid with a thread for every vector of a flat array, up to 65,536 blocks; kernels loop over the
    /// rest.
    pub(super) fn over_elements(self, elements: u64, vector: u64) -> LaunchResult<Launch> {
        let blocks = elements.div_ceil(vector).div_ceil(BLOCK_THREADS).clamp(1, 1 << 16);
        Ok(self.grid([to_u32(blocks)?, 1, 1]).block([to_u32(BLOCK_THREADS)?, 1, 1]))
    }
}

/// A sum over rows in two launches: each block sums some rows into a row of scratch memory,
/// `[parts, width]`, and a second kernel adds these parts to the result in a fixed order.
pub(super) struct PartialSumGrid {
    pub parts: u64,
    pub width: u64,
}

impl PartialSumGrid {
    /// Partial sums of `width` columns over `rows`. The number of parts depends on the rows and the number of
    /// multiprocessors alone.
    pub fn over_rows(device: &LaunchContext, rows: u64, width: u64) -> PartialSumGrid {
        let parts_max = PARTS_PER_MULTIPROCESSOR * u64::from(device.multiprocessors.max(1));
        PartialSumGrid { parts: rows.div_ceil(ROWS_PER_PART).clamp(1, parts_max), width }
    }

    /// Scratch memory of the parts.
    pub fn scratch(&self) -> MatrixOperand {
        MatrixOperand::contiguous(MemorySpace::Scratch, 0, (self.parts, self.width), DType::F32)
    }

    /// Sets the grid of the first kernel: one block per part.
    pub fn one_block_per_part(
        &self,
        launch: Launch,
        columns: u64,
        format: VectorFormat,
    ) -> LaunchResult<Launch> {
        let row_threads = to_u32(format.threads_per_row(columns))?;
        Ok(launch.grid([to_u32(self.parts)?, 1, 1]).block([row_threads, 1, 1]))
    }

    /// Sets the grid of the first kernel: one block per part, with as many rows at a time as fit, each with sums of its own
    /// in shared memory.
    pub fn several_rows_per_part(
        &self,
        launch: Launch,
        columns: u64,
        format: VectorFormat,
    ) -> LaunchResult<Launch> {
        let (row_threads, block_rows) = format.block(columns);
        let block = [to_u32(row_threads)?, to_u32(block_rows)?, 1];
        let shared = shared_bytes(block_rows * self.width)?;
        Ok(launch.grid([to_u32(self.parts)?, 1, 1]).block(block).shared(shared))
    }

    /// Appends the reduction of the parts into `into` to `launch`, which computes them.
    pub fn then_reduce(&self, launch: Launch, into: MatrixOperand) -> LaunchResult<Launches> {
        expect_dtype(DType::F32, &[&into])?;
        expect_elements(self.width, &[&into])?;
        let arguments = vec![
            self.scratch().read(),
            into.flat().update(),
            Argument::U32(to_u32(self.parts)?),
            Argument::U32(to_u32(self.width)?),
        ];
        let columns = to_u32(self.width.div_ceil(32).max(1))?;
        let sum = Launch::new(KernelFamily::Elementwise, "sum_parts", arguments)
            .grid([columns, 1, 1])
            .block([32, 8, 1]);
        Ok(Launches { launches: vec![launch, sum], scratch_bytes: 4 * self.parts * self.width })
    }
}

/// Size of shared memory for this many f32 values.
pub(super) fn shared_bytes(elements: u64) -> LaunchResult<u32> {
    let bytes = 4 * elements;
    if bytes > SHARED_MAX {
        let most = SHARED_MAX / 4;
        return Err(format!("a block keeps {elements} sums in shared memory, which holds {most}"));
    }
    to_u32(bytes)
}
