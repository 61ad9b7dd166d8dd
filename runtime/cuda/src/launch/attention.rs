//! Causal attention. q, k and v are consecutive columns of one, two or three operands. With fewer KV heads
//! than devices, every device holds all KV heads and uses the one of its query heads.
//!
//! Queries of two runs of positions, with the keys of all positions, take a launch for each run; the gradients of keys and
//! values one for both.
//!
//! Backward takes a launch for statistics of each query, in scratch memory of 8 bytes per query and head (rounded up to
//! whole tiles), one for the gradient of the queries of each run, and one for the gradients of keys and values.

use narrows_plan::kernel::{Attention, Direction};
use narrows_plan::{Axis, DType};
use narrows_runtime::session::PositionRuns;

use super::attention_kernels::{
    AttentionKernels, GradientHeads, QueryRun, key_rows, statistics_operand,
};
use super::operand::{LaunchResult, MatrixOperand, expect_dtype, expect_shape};
use super::site::{InstrSite, LaunchContext, Launches};

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
    check_sizes(site.op)?;
    match site.op.direction {
        Direction::Forward => forward(site),
        Direction::Backward => backward(site),
    }
}

/// Checks numbers of heads and sequences.
pub(super) fn check_sizes(op: &Attention) -> LaunchResult<()> {
    if op.kv_heads == 0 || !op.heads.is_multiple_of(op.kv_heads) {
        return Err(format!(
            "{} query heads do not share {} KV heads evenly",
            op.heads, op.kv_heads
        ));
    }
    if op.heads.max(op.sequences) > 65_535 {
        return Err(format!("{} heads of {} sequences exceed a grid", op.heads, op.sequences));
    }
    Ok(())
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
        let rows = op.sequences * if port == 0 { op.queries() } else { key_rows(op) };
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

/// Checks that two operands have the same row stride.
pub(super) fn expect_common_stride([first, second]: [&MatrixOperand; 2]) -> LaunchResult<()> {
    match first.stride == second.stride {
        true => Ok(()),
        false => {
            Err(format!("a row stride of {} where {} is expected", second.stride, first.stride))
        }
    }
}

/// The runs of queries.
fn query_runs(op: &Attention, positions: PositionRuns) -> impl Iterator<Item = QueryRun> {
    let keys = op.length;
    positions.runs().scan(0, move |row, run| {
        let first_row = *row;
        *row += run.len() as u64;
        let positions = run.start as u64..run.end as u64;
        Some(QueryRun { keys, positions, first_row })
    })
}

/// Keys of a query at most.
fn window(op: &Attention) -> u64 {
    op.window.unwrap_or(op.length)
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
    // After them, it reads the output, its log-sum-exp and its gradient.
    let inputs = site.scheduled.instr.reads.len().saturating_sub(3);
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
    if k.rows == 0 {
        return Ok(Launches::default());
    }
    let kernels = AttentionKernels::select(op, window(op), &[&q, &k, &v, &out])?;
    let launches = query_runs(op, query_positions(site))
        .map(|run| kernels.forward([&q, &k, &v, &out, &lse], &run));
    Ok(Launches { launches: launches.collect::<LaunchResult<_>>()?, scratch_bytes: 0 })
}

fn backward(site: &InstrSite<'_, &Attention>) -> LaunchResult<Launches> {
    let op = site.op;
    let BackwardOperands { read, written, out, lse, out_gradient: dout } = backward_operands(site)?;
    let (q, k, v) = (read.q, read.k, read.v);
    let (dq, dk, dv) = (written.q, written.all_k, written.all_v);
    if k.rows == 0 {
        return Ok(Launches::default());
    }
    for pair in [[&k, &dk], [&v, &dv], [&out, &dout]] {
        expect_common_stride(pair)?;
    }
    let operands = [&q, &k, &v, &out, &dout, &dq, &dk, &dv];
    let kernels = AttentionKernels::select(op, window(op), &operands)?;
    let statistics = statistics_operand(op);
    let inputs = [&q, &k, &v, &dout, &statistics];
    let positions = query_positions(site);
    let mut launches = vec![kernels.statistics([&out, &dout, &lse, &statistics])?];
    for run in query_runs(op, positions) {
        launches.push(kernels.query_gradients(inputs, &dq, &run)?);
    }
    let heads = GradientHeads { first_used: read.first_kv_head, count: read.local_kv_heads };
    launches.push(kernels.key_gradients(inputs, [&dk, &dv], (op.length, positions), heads)?);
    Ok(Launches { launches, scratch_bytes: statistics.elements() * 4 })
}
