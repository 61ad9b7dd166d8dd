//! The kernels of attention, and their launches on given matrices.

use std::ops::Range;

use narrows_plan::DType;
use narrows_plan::kernel::Attention;
use narrows_runtime::session::PositionRuns;

use super::operand::{Argument, LaunchResult, MatrixOperand, MemorySpace, to_u32, u32_arguments};
use super::site::Launch;
use crate::kernel_source::KernelFamily;

/// Threads per block of the tiled kernels.
const TILE_THREADS: u64 = 128;
/// Threads per block of the statistics kernel.
const STATISTICS_THREADS: u64 = 256;
/// Tokens per tile of the backward pass; the statistics are padded to whole tiles.
const BACKWARD_TILE_TOKENS: u64 = 64;

/// Choice of kernels for a head: the narrowest tiles that hold it.
///
/// If every head is aligned to 16 bytes and has at most 128 features, elements are copied in vectors of 16
/// bytes. Otherwise, and for small heads in f32, they are accessed one at a time; then bf16 does not use tensor
/// cores either. Neither does it for runs of queries that do not begin and end at whole tiles.
struct AttentionTiles {
    /// Suffix of the kernels' names.
    kernel_suffix: String,
    /// Kernel of the gradients of keys and values. That of tensor cores has a variant for windows and two runs of queries.
    dkv: &'static str,
    /// Threads per row in the statistics kernel.
    row_threads: u64,
    /// Queries per block in the forward kernel, and rows per block in the backward kernels.
    forward_queries: u64,
    backward_rows: u64,
    /// Shared memory per block, in bytes, of the forward, dq, and dk/dv kernels.
    shared_bytes: [u64; 3],
}

impl AttentionTiles {
    /// The kernels for these operands and their alignment.
    fn select(op: &Attention, operands: &[&MatrixOperand]) -> LaunchResult<AttentionTiles> {
        let (head, format) = (op.head_dim, op.input.name());
        let vector = 16 / op.input.width();
        let is_bf16 = op.input == DType::Bf16;
        let chunk = op.queries() / 2;
        let whole_tiles = op.query_parts == 1 || chunk.is_multiple_of(BACKWARD_TILE_TOKENS);
        let vectors = head <= 128
            && if is_bf16 { whole_tiles } else { head > 32 }
            && head.is_multiple_of(vector)
            && operands.iter().all(|operand| operand.is_aligned(vector));
        let widths: &[u64] = match (vectors, op.input) {
            (true, DType::Bf16) => &[64, 128],
            (true, _) => &[128],
            (false, _) => &[32, 256],
        };
        let Some(&width) = widths.iter().find(|width| head <= **width) else {
            return Err(format!("heads of {head} features exceed the widest tile, 256"));
        };
        let ending = if vectors { "" } else { "_v1" };
        let name = format!("{format}_w{width}{ending}");
        let row_threads = (width / if vectors { vector } else { 1 }).min(32);
        if vectors && is_bf16 {
            // Forward: queries, keys and values. Backward: double-buffered tiles of two matrices; the dk/dv
            // kernel also buffers two statistics per query.
            let (forward, backward) =
                ((128 + 2 * 64) * width * 2, 4 * BACKWARD_TILE_TOKENS * width * 2);
            let shared_bytes = [forward, backward, backward + 2 * BACKWARD_TILE_TOKENS * 2 * 4];
            return Ok(AttentionTiles {
                kernel_suffix: name,
                dkv: match (op.window, op.query_parts) {
                    (None, 1) => "dkv",
                    _ => "general_dkv",
                },
                row_threads,
                forward_queries: 128,
                backward_rows: BACKWARD_TILE_TOKENS,
                shared_bytes,
            });
        }
        // Padded rows and inner rows of two matrices, and the weights of four warps.
        let bytes = 4 * (2 * (16 + 32) * (width + 4) + 4 * 4 * 32);
        Ok(AttentionTiles {
            kernel_suffix: name,
            dkv: "dkv",
            row_threads,
            forward_queries: 16,
            backward_rows: 16,
            shared_bytes: [bytes; 3],
        })
    }
}

/// The kernels of an attention for operands with their alignment.
pub(super) struct AttentionKernels<'a> {
    op: &'a Attention,
    tiles: AttentionTiles,
    /// Keys that a query attends to at most.
    window: u64,
}

/// A run of consecutive positions of the queries of each sequence of a launch, and the keys before its end.
pub(super) struct QueryRun {
    /// Keys of a sequence that are attended to: its first rows.
    pub keys: u64,
    /// Positions of the queries.
    pub positions: Range<u64>,
    /// Row of the first query in its sequence.
    pub first_row: u64,
}

/// The heads of keys and values of which a launch computes the gradients.
pub(super) struct GradientHeads {
    /// The first one that is attended to.
    pub first_used: u64,
    /// Number of heads.
    pub count: u64,
}

impl<'a> AttentionKernels<'a> {
    pub fn select(
        op: &'a Attention,
        window: u64,
        operands: &[&MatrixOperand],
    ) -> LaunchResult<AttentionKernels<'a>> {
        Ok(AttentionKernels { op, tiles: AttentionTiles::select(op, operands)?, window })
    }

    /// Query heads that share a KV head.
    fn group(&self) -> u64 {
        self.op.heads / self.op.kv_heads
    }

    /// Rows of keys and of queries of a sequence.
    fn rows_of_sequences(&self) -> LaunchResult<Vec<Argument>> {
        u32_arguments(&[key_rows(self.op), self.op.queries()])
    }

    fn scale(&self) -> Argument {
        Argument::F32(1.0 / (self.op.head_dim as f32).sqrt())
    }

    fn kernel(&self, name: &str) -> String {
        format!("attention_{name}{}", self.tiles.kernel_suffix)
    }

    /// Outputs and log-sum-exps of a run of queries.
    pub fn forward(
        &self,
        [q, k, v, out, lse]: [&MatrixOperand; 5],
        run: &QueryRun,
    ) -> LaunchResult<Launch> {
        let op = self.op;
        let mut arguments = vec![q.read(), k.read(), v.read(), out.write(), lse.write()];
        arguments.extend(self.rows_of_sequences()?);
        arguments.extend(run.arguments()?);
        arguments.extend(u32_arguments(&[self.window, op.heads, self.group(), op.head_dim])?);
        arguments.extend(u32_arguments(&[q.stride, k.stride, v.stride, out.stride])?);
        arguments.push(self.scale());
        let over = [run.count().div_ceil(self.tiles.forward_queries), op.heads, op.sequences];
        let [shared_bytes, ..] = self.tiles.shared_bytes;
        tile_launch(self.kernel(""), arguments, over, shared_bytes)
    }

    /// Statistics of all queries for the backward pass, `[sequences, heads, padded, 2]` in f32.
    pub fn statistics(
        &self,
        [out, dout, lse, statistics]: [&MatrixOperand; 4],
    ) -> LaunchResult<Launch> {
        let op = self.op;
        let padded = padded_queries(op);
        let mut arguments = vec![out.read(), dout.read(), lse.read(), statistics.write()];
        let sizes = [op.queries(), op.heads, op.head_dim, out.stride, padded];
        arguments.extend(u32_arguments(&sizes)?);
        let of_block = STATISTICS_THREADS / self.tiles.row_threads;
        let over = [padded.div_ceil(of_block), op.heads, op.sequences];
        let launch = tile_launch(self.kernel("sums_"), arguments, over, 0)?;
        Ok(launch.block([to_u32(STATISTICS_THREADS)?, 1, 1]))
    }

    /// Gradients of a run of queries.
    pub fn query_gradients(
        &self,
        [q, k, v, dout, statistics]: [&MatrixOperand; 5],
        dq: &MatrixOperand,
        run: &QueryRun,
    ) -> LaunchResult<Launch> {
        let op = self.op;
        let mut arguments = [q, k, v, dout, statistics].map(MatrixOperand::read).to_vec();
        arguments.push(dq.write());
        arguments.extend(self.rows_of_sequences()?);
        arguments.extend(run.arguments()?);
        let sizes = [self.window, op.heads, self.group(), op.head_dim, padded_queries(op)];
        arguments.extend(u32_arguments(&sizes)?);
        let strides = [q, k, v, dout, dq].map(|operand| operand.stride);
        arguments.extend(u32_arguments(&strides)?);
        arguments.push(self.scale());
        let over = [run.count().div_ceil(self.tiles.backward_rows), op.heads, op.sequences];
        let [_, shared_bytes, _] = self.tiles.shared_bytes;
        tile_launch(self.kernel("dq_"), arguments, over, shared_bytes)
    }

    /// Gradients of the first keys and values of each sequence, which have the row strides of `k` and `v`, from these
    /// queries: the first rows of a sequence in `q`, `dout` and `statistics`.
    pub fn key_gradients(
        &self,
        [q, k, v, dout, statistics]: [&MatrixOperand; 5],
        [dk, dv]: [&MatrixOperand; 2],
        (keys, queries): (u64, PositionRuns),
        heads: GradientHeads,
    ) -> LaunchResult<Launch> {
        let op = self.op;
        let mut arguments = [q, k, v, dout, statistics].map(MatrixOperand::read).to_vec();
        arguments.extend([dk.write(), dv.write()]);
        let PositionRuns { first, count, second_row, gap } = queries;
        let runs = [count, first, second_row, gap].map(|size| size as u64);
        arguments.extend(self.rows_of_sequences()?);
        arguments.extend(u32_arguments(&[keys])?);
        arguments.extend(u32_arguments(&runs)?);
        let used = heads.first_used;
        let sizes = [self.window, op.heads, self.group(), op.head_dim, used, padded_queries(op)];
        arguments.extend(u32_arguments(&sizes)?);
        arguments.extend(u32_arguments(&[q, k, v, dout].map(|operand| operand.stride))?);
        arguments.push(self.scale());
        let over = [keys.div_ceil(self.tiles.backward_rows), heads.count, op.sequences];
        let [.., shared_bytes] = self.tiles.shared_bytes;
        tile_launch(self.kernel(&format!("{}_", self.tiles.dkv)), arguments, over, shared_bytes)
    }
}

impl QueryRun {
    fn count(&self) -> u64 {
        self.positions.end - self.positions.start
    }

    /// Keys of a sequence, first position and end, and positions before the run that have no row.
    fn arguments(&self) -> LaunchResult<Vec<Argument>> {
        let Range { start, end } = self.positions;
        u32_arguments(&[self.keys, start, end, start - self.first_row])
    }
}

/// A launch over tiles of tokens, heads and sequences.
fn tile_launch(
    kernel: String,
    arguments: Vec<Argument>,
    [tiles, heads, sequences]: [u64; 3],
    shared_bytes: u64,
) -> LaunchResult<Launch> {
    let grid = [to_u32(tiles)?, to_u32(heads)?, to_u32(sequences)?];
    let launch = Launch::new(KernelFamily::Attention, kernel, arguments).grid(grid);
    Ok(launch.block([to_u32(TILE_THREADS)?, 1, 1]).shared(to_u32(shared_bytes)?))
}

/// Queries of a sequence, rounded up to whole tiles of the backward pass.
fn padded_queries(op: &Attention) -> u64 {
    op.queries().next_multiple_of(BACKWARD_TILE_TOKENS)
}

/// Scratch memory of the statistics of a backward pass.
pub(super) fn statistics_operand(op: &Attention) -> MatrixOperand {
    let rows = op.sequences * op.heads * padded_queries(op);
    MatrixOperand::contiguous(MemorySpace::Scratch, 0, (rows, 2), DType::F32)
}

/// Rows of keys and values of a sequence.
pub(super) fn key_rows(op: &Attention) -> u64 {
    if op.rotation().is_some() { op.queries() } else { op.length }
}
