//! Gradients of q, k and v.

use super::super::matrix::matmul;
use super::super::parallel::{ColumnRows, SharedOperand, TaskScratch};
use super::super::simd::{Simd, SimdBody, dispatch_simd, dot, exp};
use super::super::{MatrixView, MatrixViewMut, Parallel, WriteMode};
use super::{
    AttentionScratch, AttentionShape, KEYS, QUERIES, Transpose, by_sequences, head, head_mut,
    heads, lent, sequences,
};

/// What [`backward`] reads.
#[derive(Clone, Copy, Debug)]
pub struct AttentionSaved<'a> {
    /// Queries.
    pub q: MatrixView<'a>,
    /// Keys.
    pub k: MatrixView<'a>,
    /// Values.
    pub v: MatrixView<'a>,
    /// The output of forward.
    pub out: MatrixView<'a>,
    /// The log-sum-exp of forward.
    pub lse: MatrixView<'a>,
    /// The gradient of the output.
    pub dout: MatrixView<'a>,
}

/// What [`backward`] writes, whatever is there.
pub struct AttentionGradients<'a> {
    /// Gradient of the queries.
    pub dq: MatrixViewMut<'a>,
    /// Gradient of the keys.
    pub dk: MatrixViewMut<'a>,
    /// Gradient of the values.
    pub dv: MatrixViewMut<'a>,
}

/// Backward: the gradients of all heads. `scratch` holds [`AttentionShape::scratch`] numbers.
pub fn attention_backward(
    shape: AttentionShape,
    saved: AttentionSaved<'_>,
    made: AttentionGradients<'_>,
    scratch: &mut [f32],
    parallel: Parallel,
) {
    let AttentionSaved { q, k, v, out, lse, dout } = saved;
    let AttentionGradients { dq, dk, dv } = made;
    let size = |of: &MatrixView<'_>| (of.rows(), of.columns());
    let size_mut = |of: &MatrixViewMut<'_>| (of.rows(), of.columns());
    let of_queries = [size(&q), size(&out), size(&dout), size_mut(&dq)];
    shape.check(&of_queries, &[size(&k), size(&v), size_mut(&dk), size_mut(&dv)]);
    assert_eq!(size(&lse), (shape.tokens(), shape.heads));
    let tiles = lent(shape, scratch);
    if by_sequences(shape, parallel) {
        let by = |of| sequences(shape, of);
        let read = (by(q), by(k), by(v), by(out), by(lse), by(dout));
        let made = (sequences(shape, dq), sequences(shape, dk), sequences(shape, dv));
        let work = (read, made, tiles, SharedOperand(shape));
        parallel.for_expensive_rows(
            shape.sequences,
            work,
            |(read, made, tiles, SharedOperand(shape))| {
                let (q, k, v, out, lse, dout) = read;
                let (q, k, v, out) = (q.operand, k.operand, v.operand, out.operand);
                let saved = AttentionSaved { q, k, v, out, lse: lse.operand, dout: dout.operand };
                part(
                    shape,
                    saved,
                    AttentionGradients {
                        dq: made.0.operand,
                        dk: made.1.operand,
                        dv: made.2.operand,
                    },
                    tiles,
                );
            },
        );
        return;
    }
    let keys = shape.head_dim;
    let queries = shape.group() * shape.head_dim;
    let by = |each: usize| move |of| heads(each, of);
    let of_queries = [q, out, dout].map(by(queries)).into();
    let of_queries: (_, _, _) = of_queries;
    let read = (of_queries, heads(keys, k), heads(keys, v), heads(shape.group(), lse));
    let made = (heads(queries, dq), heads(keys, dk), heads(keys, dv));
    let work = (read, made, tiles, SharedOperand(shape));
    parallel.for_expensive_rows(
        shape.kv_heads,
        work,
        |(read, made, tiles, SharedOperand(shape))| {
            let ((q, out, dout), k, v, lse) = read;
            let ColumnRows(lse) = lse.operand;
            let [q, k, v, out, dout] = [q, k, v, out, dout].map(|part| part.operand.0);
            let made = AttentionGradients {
                dq: made.0.operand.0,
                dk: made.1.operand.0,
                dv: made.2.operand.0,
            };
            part(shape, AttentionSaved { q, k, v, out, lse, dout }, made, tiles);
        },
    );
}

/// What of the whole a part has is read off its operands.
fn part(
    whole: AttentionShape,
    saved: AttentionSaved<'_>,
    mut made: AttentionGradients<'_>,
    tiles: TaskScratch<'_>,
) {
    let shape = AttentionShape {
        sequences: saved.q.rows() / whole.length,
        heads: saved.q.columns() / whole.head_dim,
        kv_heads: saved.k.columns() / whole.head_dim,
        ..whole
    };
    let scratch = AttentionScratch::new(shape, tiles);
    for (sequence, query_head) in shape.every_head() {
        let key_head = query_head / shape.group();
        let k = head(shape, saved.k, sequence, key_head);
        let mut made = AttentionGradients {
            dq: head_mut(shape, &mut made.dq, sequence, query_head),
            dk: head_mut(shape, &mut made.dk, sequence, key_head),
            dv: head_mut(shape, &mut made.dv, sequence, key_head),
        };
        if query_head.is_multiple_of(shape.group()) {
            zero(&mut made.dk);
            zero(&mut made.dv);
            let v = head(shape, saved.v, sequence, key_head);
            dispatch_simd::<Transpose, _>((k, &mut *scratch.transposed.0));
            dispatch_simd::<Transpose, _>((v, &mut *scratch.transposed.1));
        }
        let lse = saved.lse.column_range(query_head, 1);
        let read = HeadOperands {
            q: head(shape, saved.q, sequence, query_head),
            k,
            k_transposed: MatrixView::new(scratch.transposed.0, shape.head_dim, shape.length),
            v_transposed: MatrixView::new(scratch.transposed.1, shape.head_dim, shape.length),
            out: head(shape, saved.out, sequence, query_head),
            lse: lse.row_range(sequence * shape.length, shape.length),
            dout: head(shape, saved.dout, sequence, query_head),
        };
        let tiles = (&mut *scratch.tiles.0, &mut *scratch.tiles.1);
        one_head(shape, read, made, tiles);
    }
}

/// What of one head is read.
struct HeadOperands<'a> {
    q: MatrixView<'a>,
    k: MatrixView<'a>,
    k_transposed: MatrixView<'a>,
    v_transposed: MatrixView<'a>,
    out: MatrixView<'a>,
    lse: MatrixView<'a>,
    dout: MatrixView<'a>,
}

fn zero(of: &mut MatrixViewMut<'_>) {
    for row in 0..of.rows() {
        of.row_mut(row).fill(0.0);
    }
}

fn one_head(
    shape: AttentionShape,
    saved: HeadOperands<'_>,
    mut made: AttentionGradients<'_>,
    (s_tile, dp_tile): (&mut [f32], &mut [f32]),
) {
    for first in (0..shape.length).step_by(QUERIES) {
        let queries = QUERIES.min(shape.length - first);
        let [q, dout] = [saved.q, saved.dout].map(|of| of.row_range(first, queries));
        let [out, lse] = [saved.out, saved.lse].map(|of| of.row_range(first, queries));
        let mut sums = [0.0; QUERIES];
        dispatch_simd::<RowDots, _>((out, dout, &mut sums[..queries]));
        for first_key in (0..first + queries).step_by(KEYS) {
            let keys = KEYS.min(first + queries - first_key);
            let k = saved.k.row_range(first_key, keys);
            let [k_transposed, v_transposed] =
                [saved.k_transposed, saved.v_transposed].map(|of| of.column_range(first_key, keys));
            let s_tile = &mut s_tile[..queries * keys];
            let dp_tile = &mut dp_tile[..queries * keys];
            let s = MatrixViewMut::new(s_tile, queries, keys);
            matmul(q.into(), k_transposed.into(), s, shape.scale(), WriteMode::Replace);
            let dp = MatrixViewMut::new(dp_tile, queries, keys);
            matmul(dout.into(), v_transposed.into(), dp, 1.0, WriteMode::Replace);
            let s = MatrixViewMut::new(s_tile, queries, keys);
            let dp = MatrixViewMut::new(dp_tile, queries, keys);
            let seen = first + 1 - first_key;
            dispatch_simd::<Probabilities, _>((s, dp, lse, &sums[..queries], seen, shape.scale()));
            let p = MatrixView::new(s_tile, queries, keys);
            let ds = MatrixView::new(dp_tile, queries, keys);
            let dv = made.dv.reborrow().row_range(first_key, keys);
            matmul(p.transposed(), dout.into(), dv, 1.0, WriteMode::Add);
            let dk = made.dk.reborrow().row_range(first_key, keys);
            matmul(ds.transposed(), q.into(), dk, 1.0, WriteMode::Add);
            let dq = made.dq.reborrow().row_range(first, queries);
            let write = if first_key == 0 { WriteMode::Replace } else { WriteMode::Add };
            matmul(ds.into(), k.into(), dq, 1.0, write);
        }
    }
}

struct RowDots;

impl SimdBody<(MatrixView<'_>, MatrixView<'_>, &mut [f32])> for RowDots {
    #[inline(always)]
    fn run<S: Simd>((x, y, sums): (MatrixView<'_>, MatrixView<'_>, &mut [f32])) {
        for (row, sum) in sums.iter_mut().enumerate() {
            *sum = dot::<S>(x.row(row), y.row(row));
        }
    }
}

type BackwardTiles<'a> =
    (MatrixViewMut<'a>, MatrixViewMut<'a>, MatrixView<'a>, &'a [f32], usize, f32);

/// Turns scores into probabilities, and the gradients of probabilities into those of scores before
/// their scale. Keys that come later than the query get zeros.
struct Probabilities;

impl SimdBody<BackwardTiles<'_>> for Probabilities {
    #[inline(always)]
    fn run<S: Simd>((mut s, mut dp, lse, sums, seen, scale): BackwardTiles<'_>) {
        for (row, sum) in sums.iter().enumerate() {
            let lse = lse.row(row)[0];
            let (s, dp) = (s.row_mut(row), dp.row_mut(row));
            let seen = (seen + row).min(s.len());
            let (s, later) = s.split_at_mut(seen);
            later.fill(0.0);
            let (dp, later) = dp.split_at_mut(seen);
            later.fill(0.0);
            for (s, dp) in s.iter_mut().zip(dp) {
                let p = exp::<S>(*s - lse);
                *s = p;
                *dp = scale * p * (*dp - sum);
            }
        }
    }
}
