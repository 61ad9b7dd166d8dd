//! Attention. q, k and v are columns of one, two or three operands, one after the other. With fewer
//! key heads than devices every device holds all of them and uses the one of its queries.
//!
//! Backward is three launches: what it needs of each query besides, in scratch memory of 8 bytes a
//! query and head (tokens rounded up to whole tiles); the gradient of queries; those of keys and values.

use narrows_plan::DType;
use narrows_plan::kernel::{Attention, Direction};

use super::operand::{MatrixOperand, small};
use super::shape::{expect, expect_shape};
use super::{Argument, InstrSite, KernelFamily, Launch, LaunchResult, Launches, MemorySpace};

/// Threads of a block.
const THREADS: u64 = 128;
/// Threads of a block that sums rows.
const SUM_THREADS: u64 = 256;
/// Tokens of a tile backward, to which scratch memory is rounded up.
const ROWS: u64 = 64;

/// The kernels for a head: the smallest tiles that hold it.
///
/// Where every head begins at a multiple of 16 bytes, numbers are copied in pieces of 16 bytes; else, and
/// beyond 128 features, one at a time, in plain sums.
struct AttentionTiles {
    /// The ending of the kernels' names.
    name: String,
    /// Threads that sum a row of [`SUM_THREADS`].
    lanes: u64,
    /// Queries of a block forward, and rows of a block backward.
    forward: u64,
    backward: u64,
    /// Shared memory of a block in bytes: forward, for dq, and for dk and dv.
    shared_bytes: [u64; 3],
}

impl AttentionTiles {
    /// For operands of these heads, which begin where they begin.
    fn of(op: &Attention, operands: &[&MatrixOperand]) -> LaunchResult<AttentionTiles> {
        let (head, format) = (op.head_dim, op.input.name());
        let vector = 16 / op.input.width();
        let pieces = head <= 128
            && head.is_multiple_of(vector)
            && operands.iter().all(|operand| operand.aligned(vector));
        let widths: &[u64] = if pieces { &[32, 64, 128] } else { &[32, 256] };
        let Some(&width) = widths.iter().find(|width| head <= **width) else {
            return Err(format!("heads of {head} features: tiles have at most 256"));
        };
        let ending = if pieces { "" } else { "_v1" };
        let name = format!("{format}_w{width}{ending}");
        let lanes = (width / if pieces { vector } else { 1 }).min(32);
        if pieces && op.input == DType::Bf16 {
            // Queries, keys and values; two times two tiles; and two numbers of each query of two.
            let (forward, backward) = ((128 + 2 * 64) * width * 2, 4 * ROWS * width * 2);
            let shared_bytes = [forward, backward, backward + 2 * ROWS * 2 * 4];
            return Ok(AttentionTiles { name, lanes, forward: 128, backward: ROWS, shared_bytes });
        }
        // Two matrices' rows and others, padded, and four warps' weights.
        let bytes = 4 * (2 * (16 + 32) * (width + 4) + 4 * 4 * 32);
        Ok(AttentionTiles { name, lanes, forward: 16, backward: 16, shared_bytes: [bytes; 3] })
    }
}

/// Where queries, keys and values are.
struct HeadAddresses {
    /// What is attended to.
    q: MatrixOperand,
    k: MatrixOperand,
    v: MatrixOperand,
    /// All keys and values that are held.
    all_k: MatrixOperand,
    all_v: MatrixOperand,
    /// The first head of the keys that is attended to, and how many are held.
    used: u64,
    held: u64,
}

pub(super) fn launches(site: &InstrSite<'_, &Attention>) -> LaunchResult<Launches> {
    let op = site.op;
    if op.kv_heads == 0 || !op.heads.is_multiple_of(op.kv_heads) {
        return Err(format!("{} query heads of {} key heads", op.heads, op.kv_heads));
    }
    if op.heads.max(op.sequences) > 65_535 {
        return Err(format!("{} heads of {} sequences exceed a grid", op.heads, op.sequences));
    }
    match op.direction {
        Direction::Forward => forward(site),
        Direction::Backward => backward(site),
    }
}

fn tokens(op: &Attention) -> u64 {
    op.sequences * op.length
}

/// Queries, keys and values among these operands.
fn heads(
    site: &InstrSite<'_, &Attention>,
    operands: &[MatrixOperand],
) -> LaunchResult<HeadAddresses> {
    let op = site.op;
    for operand in operands {
        expect(op.input, &[operand])?;
        expect_shape((tokens(op), operand.columns), &[operand])?;
    }
    let all: u64 = operands.iter().map(|operand| operand.columns).sum();
    let queries = op.heads * op.head_dim;
    let keys = all.saturating_sub(queries) / 2;
    let held = keys / op.head_dim;
    if queries + 2 * held * op.head_dim != all || held < op.kv_heads {
        return Err(format!(
            "{all} columns of queries, keys and values are not those of {} and {} heads",
            op.heads, op.kv_heads
        ));
    }
    let used = if held > op.kv_heads {
        let all_queries = op.heads * site.device.context.tensor_size();
        op.heads * site.device.tensor / (all_queries / held).max(1)
    } else {
        0
    };
    let width = op.kv_heads * op.head_dim;
    let columns = |first, count| located(operands, first, count);
    let of_keys = |first| columns(first + used * op.head_dim, width);
    Ok(HeadAddresses {
        q: columns(0, queries)?,
        k: of_keys(queries)?,
        v: of_keys(queries + keys)?,
        all_k: columns(queries, keys)?,
        all_v: columns(queries + keys, keys)?,
        used,
        held,
    })
}

/// Columns of operands that lie side by side.
fn located(operands: &[MatrixOperand], mut first: u64, count: u64) -> LaunchResult<MatrixOperand> {
    for operand in operands {
        if first < operand.columns {
            return operand.column_range(first, count);
        }
        first -= operand.columns;
    }
    Err(format!("no column {first} beyond all operands"))
}

/// The distance from row to row that operands share.
fn stride(operands: &[&MatrixOperand]) -> LaunchResult<u64> {
    let stride = operands[0].stride;
    for operand in operands {
        if operand.stride != stride {
            return Err(format!("rows {} apart where others are {stride}", operand.stride));
        }
    }
    Ok(stride)
}

fn numbers(sizes: &[u64]) -> LaunchResult<Vec<Argument>> {
    sizes.iter().map(|size| small(*size).map(Argument::U32)).collect()
}

/// A launch over tiles of so many tokens, heads and sequences.
fn launch(
    op: &Attention,
    kernel: String,
    arguments: Vec<Argument>,
    (tile, heads): (u64, u64),
    shared_bytes: u64,
) -> LaunchResult<Launch> {
    let grid = [small(op.length.div_ceil(tile))?, small(heads)?, small(op.sequences)?];
    let launch = Launch::new(KernelFamily::Attention, kernel, arguments).grid(grid);
    Ok(launch.block([small(THREADS)?, 1, 1]).shared(small(shared_bytes)?))
}

fn scale(op: &Attention) -> Argument {
    Argument::F32(1.0 / (op.head_dim as f32).sqrt())
}

fn forward(site: &InstrSite<'_, &Attention>) -> LaunchResult<Launches> {
    let op = site.op;
    let inputs = site.moment.instr.reads.len();
    let operands: Vec<MatrixOperand> =
        (0..inputs).map(|port| site.read(port)).collect::<LaunchResult<_>>()?;
    let HeadAddresses { q, k, v, .. } = heads(site, &operands)?;
    let (out, lse) = (site.write(0)?, site.write(1)?);
    expect(op.input, &[&out])?;
    expect(DType::F32, &[&lse])?;
    expect_shape((q.rows, q.columns), &[&out])?;
    expect_shape((q.rows, op.heads), &[&lse])?;
    if tokens(op) == 0 {
        return Ok(Launches::default());
    }
    let tiles = AttentionTiles::of(op, &[&q, &k, &v, &out])?;
    let mut arguments = vec![q.read(), k.read(), v.read(), out.write(), lse.write()];
    let sizes = [op.length, op.heads, op.heads / op.kv_heads, op.head_dim];
    arguments.extend(numbers(&sizes)?);
    arguments.extend(numbers(&[q.stride, k.stride, v.stride, out.stride])?);
    arguments.push(scale(op));
    let [shared_bytes, ..] = tiles.shared_bytes;
    let over = (tiles.forward, op.heads);
    Ok(launch(op, format!("attention_{}", tiles.name), arguments, over, shared_bytes)?.into())
}

fn backward(site: &InstrSite<'_, &Attention>) -> LaunchResult<Launches> {
    let op = site.op;
    let inputs = site.moment.instr.writes.len();
    let operands: Vec<MatrixOperand> =
        (0..inputs).map(|port| site.read(port)).collect::<LaunchResult<_>>()?;
    let made: Vec<MatrixOperand> =
        (0..inputs).map(|port| site.write(port)).collect::<LaunchResult<_>>()?;
    let read = heads(site, &operands)?;
    let written = heads(site, &made)?;
    let (q, k, v) = (read.q, read.k, read.v);
    let (dq, dk, dv) = (written.q, written.all_k, written.all_v);
    let (out, lse, dout) = (site.read(inputs)?, site.read(inputs + 1)?, site.read(inputs + 2)?);
    expect(op.input, &[&out, &dout])?;
    expect(DType::F32, &[&lse])?;
    expect_shape((q.rows, q.columns), &[&out, &dout])?;
    expect_shape((q.rows, op.heads), &[&lse])?;
    if tokens(op) == 0 {
        return Ok(Launches::default());
    }
    let of_q = stride(&[&q, &dq])?;
    let (of_k, of_v) = (stride(&[&k, &dk])?, stride(&[&v, &dv])?);
    let of_out = stride(&[&out, &dout])?;
    let group = op.heads / op.kv_heads;
    let padded = op.length.next_multiple_of(ROWS);
    let rows = op.sequences * op.heads * padded;
    let tiles = AttentionTiles::of(op, &[&q, &k, &v, &out, &dout, &dq, &dk, &dv])?;
    let sums = MatrixOperand::contiguous(MemorySpace::Scratch, 0, (rows, 2), DType::F32);

    let mut arguments = vec![out.read(), dout.read(), lse.read(), sums.write()];
    arguments.extend(numbers(&[op.length, op.heads, op.head_dim, of_out, padded])?);
    let of_block = SUM_THREADS / tiles.lanes;
    let kernel = |name| format!("attention_{name}_{}", tiles.name);
    let sum = launch(op, kernel("sums"), arguments, (of_block, op.heads), 0)?;
    let [_, heads, sequences] = sum.grid;
    let sum = sum.grid([small(padded.div_ceil(of_block))?, heads, sequences]);
    let sum = sum.block([small(SUM_THREADS)?, 1, 1]);

    let [_, of_queries, of_keys] = tiles.shared_bytes;
    let inputs = [q.read(), k.read(), v.read(), dout.read(), sums.read()];
    let strides = numbers(&[of_q, of_k, of_v, of_out])?;
    let mut arguments = inputs.to_vec();
    arguments.push(dq.write());
    arguments.extend(numbers(&[op.length, op.heads, group, op.head_dim, padded])?);
    arguments.extend(strides.clone());
    arguments.push(scale(op));
    let over = (tiles.backward, op.heads);
    let to_queries = launch(op, kernel("dq"), arguments, over, of_queries)?;

    let mut arguments = inputs.to_vec();
    arguments.extend([dk.write(), dv.write()]);
    arguments.extend(numbers(&[op.length, op.heads, group, op.head_dim, read.used, padded])?);
    arguments.extend(strides);
    arguments.push(scale(op));
    let over = (tiles.backward, read.held);
    let to_keys = launch(op, kernel("dkv"), arguments, over, of_keys)?;
    Ok(Launches { launches: vec![sum, to_queries, to_keys], scratch_bytes: 8 * rows })
}
