//! Causal attention. q, k and v are consecutive columns of one, two or three operands. With fewer KV heads
//! than devices, every device holds all KV heads and uses the one of its query heads.
//!
//! Queries of two runs of positions, with the keys of all positions, take a launch for each run; the gradients of keys and
//! values one for both.
//!
//! Backward takes a launch for statistics of each query, in scratch memory of 8 bytes per query and head (rounded up to
//! whole tiles), one for the gradient of the queries of each run, and one for the gradients of keys and values.

use std::ops::Range;

use narrows_plan::kernel::{Attention, Direction};
use narrows_plan::{Axis, DType};
use narrows_runtime::session::PositionRuns;

use super::operand::{
    Argument, LaunchResult, MatrixOperand, MemorySpace, expect_dtype, expect_shape, to_u32,
};
use super::site::{InstrSite, Launch, LaunchContext, Launches};
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

/// Queries, keys and values as matrices.
pub(super) struct HeadOperands {
    /// The queries, and the keys and values that they attend to.
    pub q: MatrixOperand,
    pub k: MatrixOperand,
    pub v: MatrixOperand,
    /// All keys and values of this device.
    pub all_k: MatrixOperand,
    pub all_v: MatrixOperand,
    /// The first KV head that is attended to.
    pub first_kv_head: u64,
    /// KV heads that this device holds.
    pub local_kv_heads: u64,
}

/// Operands of the forward pass.
pub(super) struct ForwardOperands {
    pub heads: HeadOperands,
    pub out: MatrixOperand,
    pub lse: MatrixOperand,
}

/// Operands of the backward pass: queries, keys and values, and their gradients in the same places.
pub(super) struct BackwardOperands {
    pub read: HeadOperands,
    pub written: HeadOperands,
    pub out: MatrixOperand,
    pub lse: MatrixOperand,
    pub out_gradient: MatrixOperand,
}

pub(super) fn launches(site: &InstrSite<'_, &Attention>) -> LaunchResult<Launches> {
    let op = site.op;
    if op.kv_heads == 0 || !op.heads.is_multiple_of(op.kv_heads) {
        return Err(format!(
            "{} query heads do not share {} KV heads evenly",
            op.heads, op.kv_heads
        ));
    }
    if op.heads.max(op.sequences) > 65_535 {
        return Err(format!("{} heads of {} sequences exceed a grid", op.heads, op.sequences));
    }
    match op.direction {
        Direction::Forward => forward(site),
        Direction::Backward => backward(site),
    }
}

/// Rows of keys and values.
fn key_rows(op: &Attention) -> u64 {
    op.sequences * op.length
}

/// Positions of the queries of a sequence.
fn query_positions(site: &InstrSite<'_, &Attention>) -> PositionRuns {
    let (op, LaunchContext { context, coordinates, .. }) = (site.op, site.device);
    if op.query_parts == 1 {
        return PositionRuns::consecutive(0, op.length as usize);
    }
    let place = coordinates.position(Axis::Context, &context.mesh) as usize;
    PositionRuns::at_place(context, place)
}

/// Locates queries, keys and values in these operands.
fn head_operands(
    site: &InstrSite<'_, &Attention>,
    operands: &[MatrixOperand],
) -> LaunchResult<HeadOperands> {
    let op = site.op;
    for (port, operand) in operands.iter().enumerate() {
        // Queries of some positions are an operand of their own.
        let rows = if port == 0 { op.sequences * op.queries() } else { key_rows(op) };
        expect_dtype(op.input, &[operand])?;
        expect_shape((rows, operand.columns), &[operand])?;
    }
    let all: u64 = operands.iter().map(|operand| operand.columns).sum();
    let queries = op.heads * op.head_dim;
    let keys = all.saturating_sub(queries) / 2;
    let local = keys / op.head_dim;
    if queries + 2 * local * op.head_dim != all || local < op.kv_heads {
        return Err(format!(
            "{all} columns of queries, keys and values do not fit {} query and {} KV heads",
            op.heads, op.kv_heads
        ));
    }
    let used = if local > op.kv_heads {
        let all_queries = op.heads * site.device.context.tensor_size();
        op.heads * site.device.coordinates.tensor / (all_queries / local).max(1)
    } else {
        0
    };
    let width = op.kv_heads * op.head_dim;
    let columns = |first, count| column_range_of(operands, first, count);
    let key_columns = |first| columns(first + used * op.head_dim, width);
    Ok(HeadOperands {
        q: columns(0, queries)?,
        k: key_columns(queries)?,
        v: key_columns(queries + keys)?,
        all_k: columns(queries, keys)?,
        all_v: columns(queries + keys, keys)?,
        first_kv_head: used,
        local_kv_heads: local,
    })
}

/// A range of columns of the concatenation of operands, which must lie in one of them.
fn column_range_of(
    operands: &[MatrixOperand],
    mut first: u64,
    count: u64,
) -> LaunchResult<MatrixOperand> {
    for operand in operands {
        if first < operand.columns {
            return operand.column_range(first, count);
        }
        first -= operand.columns;
    }
    Err(format!("column {first} is beyond all operands"))
}

/// The row stride of operands that must share it.
fn common_stride(operands: &[&MatrixOperand]) -> LaunchResult<u64> {
    let stride = operands[0].stride;
    for operand in operands {
        if operand.stride != stride {
            return Err(format!("a row stride of {} where others have {stride}", operand.stride));
        }
    }
    Ok(stride)
}

fn u32_arguments(sizes: &[u64]) -> LaunchResult<Vec<Argument>> {
    sizes.iter().map(|size| to_u32(*size).map(Argument::U32)).collect()
}

/// The arguments of a launch for one run of queries: keys and queries of a sequence, first position of the run and end,
/// and positions before the run that have no row.
fn run_arguments(
    op: &Attention,
    first_row: u64,
    run: &Range<usize>,
) -> LaunchResult<Vec<Argument>> {
    let [first, end] = [run.start, run.end].map(|position| position as u64);
    u32_arguments(&[op.length, op.queries(), first, end, first - first_row])
}

/// Runs of queries, each with its first row in a sequence.
fn runs_with_rows(positions: PositionRuns) -> impl Iterator<Item = (u64, Range<usize>)> {
    positions.runs().scan(0, |row, run| {
        let first_row = *row;
        *row += run.len() as u64;
        Some((first_row, run))
    })
}

/// A launch over tiles of tokens, heads and sequences.
fn tile_launch(
    op: &Attention,
    kernel: String,
    arguments: Vec<Argument>,
    (tiles, heads): (u64, u64),
    shared_bytes: u64,
) -> LaunchResult<Launch> {
    let grid = [to_u32(tiles)?, to_u32(heads)?, to_u32(op.sequences)?];
    let launch = Launch::new(KernelFamily::Attention, kernel, arguments).grid(grid);
    Ok(launch.block([to_u32(TILE_THREADS)?, 1, 1]).shared(to_u32(shared_bytes)?))
}

/// Keys of a query at most.
fn window(op: &Attention) -> u64 {
    op.window.unwrap_or(op.length)
}

fn score_scale(op: &Attention) -> Argument {
    Argument::F32(1.0 / (op.head_dim as f32).sqrt())
}

/// Operands of a forward instruction, with verified shapes and formats.
pub(super) fn forward_operands(site: &InstrSite<'_, &Attention>) -> LaunchResult<ForwardOperands> {
    let op = site.op;
    let inputs = site.scheduled.instr.reads.len();
    let operands: Vec<MatrixOperand> =
        (0..inputs).map(|port| site.input(port)).collect::<LaunchResult<_>>()?;
    let heads = head_operands(site, &operands)?;
    let (out, lse) = (site.output(0)?, site.output(1)?);
    expect_dtype(op.input, &[&out])?;
    expect_dtype(DType::F32, &[&lse])?;
    expect_shape((heads.q.rows, heads.q.columns), &[&out])?;
    expect_shape((heads.q.rows, op.heads), &[&lse])?;
    Ok(ForwardOperands { heads, out, lse })
}

/// Operands of a backward instruction, with verified shapes and formats.
pub(super) fn backward_operands(
    site: &InstrSite<'_, &Attention>,
) -> LaunchResult<BackwardOperands> {
    let op = site.op;
    let inputs = site.scheduled.instr.writes.len();
    let operands: Vec<MatrixOperand> =
        (0..inputs).map(|port| site.input(port)).collect::<LaunchResult<_>>()?;
    let gradients: Vec<MatrixOperand> =
        (0..inputs).map(|port| site.output(port)).collect::<LaunchResult<_>>()?;
    let read = head_operands(site, &operands)?;
    let written = head_operands(site, &gradients)?;
    let (out, lse, out_gradient) =
        (site.input(inputs)?, site.input(inputs + 1)?, site.input(inputs + 2)?);
    expect_dtype(op.input, &[&out, &out_gradient])?;
    expect_dtype(DType::F32, &[&lse])?;
    expect_shape((read.q.rows, read.q.columns), &[&out, &out_gradient])?;
    expect_shape((read.q.rows, op.heads), &[&lse])?;
    Ok(BackwardOperands { read, written, out, lse, out_gradient })
}

fn forward(site: &InstrSite<'_, &Attention>) -> LaunchResult<Launches> {
    let op = site.op;
    let ForwardOperands { heads: HeadOperands { q, k, v, .. }, out, lse } = forward_operands(site)?;
    if key_rows(op) == 0 {
        return Ok(Launches::default());
    }
    let tiles = AttentionTiles::select(op, &[&q, &k, &v, &out])?;
    let [shared_bytes, ..] = tiles.shared_bytes;
    let launch = |(first_row, run): (u64, Range<usize>)| {
        let mut arguments = vec![q.read(), k.read(), v.read(), out.write(), lse.write()];
        arguments.extend(run_arguments(op, first_row, &run)?);
        let sizes = [window(op), op.heads, op.heads / op.kv_heads, op.head_dim];
        arguments.extend(u32_arguments(&sizes)?);
        arguments.extend(u32_arguments(&[q.stride, k.stride, v.stride, out.stride])?);
        arguments.push(score_scale(op));
        let over = ((run.len() as u64).div_ceil(tiles.forward_queries), op.heads);
        let kernel = format!("attention_{}", tiles.kernel_suffix);
        tile_launch(op, kernel, arguments, over, shared_bytes)
    };
    let launches = runs_with_rows(query_positions(site)).map(launch);
    Ok(Launches { launches: launches.collect::<LaunchResult<_>>()?, scratch_bytes: 0 })
}

fn backward(site: &InstrSite<'_, &Attention>) -> LaunchResult<Launches> {
    let op = site.op;
    let BackwardOperands { read, written, out, lse, out_gradient: dout } = backward_operands(site)?;
    let (q, k, v) = (read.q, read.k, read.v);
    let (dq, dk, dv) = (written.q, written.all_k, written.all_v);
    if key_rows(op) == 0 {
        return Ok(Launches::default());
    }
    let of_q = common_stride(&[&q, &dq])?;
    let (of_k, of_v) = (common_stride(&[&k, &dk])?, common_stride(&[&v, &dv])?);
    let of_out = common_stride(&[&out, &dout])?;
    let group = op.heads / op.kv_heads;
    let padded = op.queries().next_multiple_of(BACKWARD_TILE_TOKENS);
    let rows = op.sequences * op.heads * padded;
    let tiles = AttentionTiles::select(op, &[&q, &k, &v, &out, &dout, &dq, &dk, &dv])?;
    let sums = MatrixOperand::contiguous(MemorySpace::Scratch, 0, (rows, 2), DType::F32);

    let mut arguments = vec![out.read(), dout.read(), lse.read(), sums.write()];
    arguments.extend(u32_arguments(&[op.queries(), op.heads, op.head_dim, of_out, padded])?);
    let of_block = STATISTICS_THREADS / tiles.row_threads;
    let kernel = |name| format!("attention_{name}_{}", tiles.kernel_suffix);
    let over = (padded.div_ceil(of_block), op.heads);
    let sum = tile_launch(op, kernel("sums"), arguments, over, 0)?;
    let sum = sum.block([to_u32(STATISTICS_THREADS)?, 1, 1]);

    let [_, of_queries, of_keys] = tiles.shared_bytes;
    let inputs = [q.read(), k.read(), v.read(), dout.read(), sums.read()];
    let strides = u32_arguments(&[of_q, of_k, of_v, of_out])?;
    let positions = query_positions(site);
    let to_queries = |(first_row, run): (u64, Range<usize>)| {
        let mut arguments = inputs.to_vec();
        arguments.push(dq.write());
        arguments.extend(run_arguments(op, first_row, &run)?);
        arguments.extend(u32_arguments(&[window(op), op.heads, group, op.head_dim, padded])?);
        arguments.extend(strides.clone());
        arguments.push(score_scale(op));
        let over = ((run.len() as u64).div_ceil(tiles.backward_rows), op.heads);
        tile_launch(op, kernel("dq"), arguments, over, of_queries)
    };

    let mut arguments = inputs.to_vec();
    arguments.extend([dk.write(), dv.write()]);
    let PositionRuns { first, count, second_row, gap } = positions;
    let runs = [count, first, second_row, gap].map(|size| size as u64);
    arguments.extend(u32_arguments(&[op.length])?);
    arguments.extend(u32_arguments(&runs)?);
    let used = read.first_kv_head;
    arguments.extend(u32_arguments(&[window(op), op.heads, group, op.head_dim, used, padded])?);
    arguments.extend(strides.clone());
    arguments.push(score_scale(op));
    let over = (op.length.div_ceil(tiles.backward_rows), read.local_kv_heads);
    let to_keys = tile_launch(op, kernel(tiles.dkv), arguments, over, of_keys)?;
    let mut launches = vec![sum];
    for run in runs_with_rows(positions) {
        launches.push(to_queries(run)?);
    }
    launches.push(to_keys);
    Ok(Launches { launches, scratch_bytes: 8 * rows })
}
