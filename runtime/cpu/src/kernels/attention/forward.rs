//! Output and log-sum-exp.

use super::super::matrix::matmul;
use super::super::parallel::{ColumnRows, SharedOperand, TaskScratch};
use super::super::simd::{Simd, SimdBody, dispatch_simd, exp, maximum, sum};
use super::super::{MatrixView, MatrixViewMut, Parallel, WriteMode};
use super::{
    AttentionScratch, AttentionShape, KEYS, QUERIES, Transpose, by_sequences, head, head_mut,
    heads, lent, sequences,
};

/// Forward: `out` and `lse` of all heads. `scratch` holds [`AttentionShape::scratch`] numbers.
pub fn attention_forward(
    shape: AttentionShape,
    (q, k, v): (MatrixView<'_>, MatrixView<'_>, MatrixView<'_>),
    (out, lse): (MatrixViewMut<'_>, MatrixViewMut<'_>),
    scratch: &mut [f32],
    parallel: Parallel,
) {
    let size = |of: &MatrixView<'_>| (of.rows(), of.columns());
    shape.check(&[size(&q), (out.rows(), out.columns())], &[size(&k), size(&v)]);
    assert_eq!((lse.rows(), lse.columns()), (shape.tokens(), shape.heads));
    let tiles = lent(shape, scratch);
    if by_sequences(shape, parallel) {
        let by = |of| sequences(shape, of);
        let made = (sequences(shape, out), sequences(shape, lse));
        let work = (by(q), by(k), by(v), made, tiles, SharedOperand(shape));
        parallel.for_expensive_rows(
            shape.sequences,
            work,
            |(q, k, v, (out, lse), tiles, SharedOperand(shape))| {
                part(shape, (q.operand, k.operand, v.operand), (out.operand, lse.operand), tiles);
            },
        );
        return;
    }
    let key_columns = shape.head_dim;
    let query_columns = shape.group() * shape.head_dim;
    let made = (heads(query_columns, out), heads(shape.group(), lse));
    let keys = (heads(key_columns, k), heads(key_columns, v));
    let work = (heads(query_columns, q), keys, made, tiles, SharedOperand(shape));
    parallel.for_expensive_rows(
        shape.kv_heads,
        work,
        |(q, (k, v), (out, lse), tiles, SharedOperand(shape))| {
            let (ColumnRows(q), ColumnRows(k), ColumnRows(v)) = (q.operand, k.operand, v.operand);
            part(shape, (q, k, v), (out.operand.0, lse.operand.0), tiles);
        },
    );
}

/// What of the whole a part has is read off its operands.
fn part(
    whole: AttentionShape,
    (q, k, v): (MatrixView<'_>, MatrixView<'_>, MatrixView<'_>),
    (mut out, mut lse): (MatrixViewMut<'_>, MatrixViewMut<'_>),
    tiles: TaskScratch<'_>,
) {
    let shape = AttentionShape {
        sequences: q.rows() / whole.length,
        heads: q.columns() / whole.head_dim,
        kv_heads: k.columns() / whole.head_dim,
        ..whole
    };
    let scratch = AttentionScratch::new(shape, tiles);
    for (sequence, query_head) in shape.every_head() {
        let key_head = query_head / shape.group();
        if query_head.is_multiple_of(shape.group()) {
            let k = head(shape, k, sequence, key_head);
            dispatch_simd::<Transpose, _>((k, &mut *scratch.transposed.0));
        }
        let k = MatrixView::new(scratch.transposed.0, shape.head_dim, shape.length);
        let read = (head(shape, q, sequence, query_head), k, head(shape, v, sequence, key_head));
        let out = head_mut(shape, &mut out, sequence, query_head);
        let lse = lse.reborrow().column_range(query_head, 1);
        let lse = lse.row_range(sequence * shape.length, shape.length);
        one_head(shape, read, out, lse, scratch.tiles.0);
    }
}

/// `k` is transposed, `[w, length]`.
fn one_head(
    shape: AttentionShape,
    (q, k, v): (MatrixView<'_>, MatrixView<'_>, MatrixView<'_>),
    mut out: MatrixViewMut<'_>,
    mut lse: MatrixViewMut<'_>,
    scratch: &mut [f32],
) {
    for first in (0..shape.length).step_by(QUERIES) {
        let queries = QUERIES.min(shape.length - first);
        let q = q.row_range(first, queries);
        let mut rows = [RunningSoftmax { maximum: f32::NEG_INFINITY, sum: 0.0 }; QUERIES];
        let rows = &mut rows[..queries];
        for first_key in (0..first + queries).step_by(KEYS) {
            let keys = KEYS.min(first + queries - first_key);
            let tile = &mut scratch[..queries * keys];
            let s = MatrixViewMut::new(tile, queries, keys);
            let k = k.column_range(first_key, keys);
            matmul(q.into(), k.into(), s, shape.scale(), WriteMode::Replace);
            let out = &mut out.reborrow().row_range(first, queries);
            // How many keys of the tile the first query sees.
            let seen = first + 1 - first_key;
            let s = MatrixViewMut::new(tile, queries, keys);
            dispatch_simd::<SoftmaxTile, _>((s, seen, &mut *rows, out.reborrow(), first_key > 0));
            let write = if first_key == 0 { WriteMode::Replace } else { WriteMode::Add };
            let p = MatrixView::new(tile, queries, keys);
            let v = v.row_range(first_key, keys);
            matmul(p.into(), v.into(), out.reborrow(), 1.0, write);
        }
        let out = out.reborrow().row_range(first, queries);
        let lse = lse.reborrow().row_range(first, queries);
        dispatch_simd::<FinishRow, _>((out, lse, &*rows));
    }
}

/// The keys so far of one row.
#[derive(Clone, Copy)]
struct RunningSoftmax {
    maximum: f32,
    sum: f32,
}

/// Turns scores into e^(s − maximum), with zeros for keys that come later than the query, and what
/// was made of earlier keys to the new maximum.
struct SoftmaxTile;

impl SimdBody<(MatrixViewMut<'_>, usize, &mut [RunningSoftmax], MatrixViewMut<'_>, bool)>
    for SoftmaxTile
{
    #[inline(always)]
    fn run<S: Simd>(
        (mut tile, seen, rows, mut out, rescale): (
            MatrixViewMut<'_>,
            usize,
            &mut [RunningSoftmax],
            MatrixViewMut<'_>,
            bool,
        ),
    ) {
        for (row, running) in rows.iter_mut().enumerate() {
            let scores = tile.row_mut(row);
            let (scores, later) = scores.split_at_mut((seen + row).min(scores.len()));
            later.fill(0.0);
            let here = maximum(scores);
            let top = here.max(running.maximum);
            for score in scores.iter_mut() {
                *score = exp::<S>(*score - top);
            }
            let shrink = exp::<S>(running.maximum - top);
            running.sum = running.sum * shrink + sum(scores);
            running.maximum = top;
            if rescale {
                for out in out.row_mut(row) {
                    *out *= shrink;
                }
            }
        }
    }
}

struct FinishRow;

impl SimdBody<(MatrixViewMut<'_>, MatrixViewMut<'_>, &[RunningSoftmax])> for FinishRow {
    #[inline(always)]
    fn run<S: Simd>(
        (mut out, mut lse, rows): (MatrixViewMut<'_>, MatrixViewMut<'_>, &[RunningSoftmax]),
    ) {
        for (row, running) in rows.iter().enumerate() {
            let inverse = 1.0 / running.sum;
            for out in out.row_mut(row) {
                *out *= inverse;
            }
            lse.row_mut(row)[0] = running.maximum + running.sum.ln();
        }
    }
}
