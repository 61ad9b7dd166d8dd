//! Forward: output and log-sum-exp.

use super::tiles::{
    AttentionScratch, AttentionShape, QueryTile, TILE_KEYS, TILE_QUERIES, TileMask,
    TransposeMatrix, by_key_head, by_sequence, divides_sequences, head_view, head_view_mut,
    task_scratch,
};
use crate::kernels::matrix::{MatrixView, MatrixViewMut, WriteMode, matmul};
use crate::kernels::parallel::{ColumnRows, Parallel, SharedOperand, TaskScratch};
use crate::kernels::simd::{Simd, SimdBody, dispatch_simd, exp, maximum, sum};

/// Forward: writes `out` and `lse` of all heads. `scratch` holds
/// [`AttentionShape::scratch_elements`].
pub fn attention_forward(
    shape: AttentionShape,
    (q, k, v): (MatrixView<'_>, MatrixView<'_>, MatrixView<'_>),
    (out, lse): (MatrixViewMut<'_>, MatrixViewMut<'_>),
    scratch: &mut [f32],
    parallel: Parallel,
) {
    let size = |view: &MatrixView<'_>| (view.rows(), view.columns());
    shape.check(&[size(&q), (out.rows(), out.columns())], &[size(&k), size(&v)]);
    assert_eq!((lse.rows(), lse.columns()), (shape.query_rows(), shape.heads));
    let scratch = task_scratch(shape, scratch);
    if divides_sequences(shape, parallel) {
        let (queries, keys) = (shape.queries.count, shape.length);
        let outputs = (by_sequence(queries, out), by_sequence(queries, lse));
        let split = |view| by_sequence(keys, view);
        let q = by_sequence(queries, q);
        let operands = (q, split(k), split(v), outputs, scratch, SharedOperand(shape));
        parallel.for_expensive_rows(
            shape.sequences,
            operands,
            |(q, k, v, (out, lse), scratch, SharedOperand(shape))| {
                let inputs = (q.operand, k.operand, v.operand);
                run_task(shape, inputs, (out.operand, lse.operand), scratch);
            },
        );
        return;
    }
    let key_columns = shape.head_dim;
    let query_columns = shape.queries_per_key() * shape.head_dim;
    let outputs = (by_key_head(query_columns, out), by_key_head(shape.queries_per_key(), lse));
    let keys = (by_key_head(key_columns, k), by_key_head(key_columns, v));
    let q = by_key_head(query_columns, q);
    let operands = (q, keys, outputs, scratch, SharedOperand(shape));
    parallel.for_expensive_rows(
        shape.kv_heads,
        operands,
        |(q, (k, v), (out, lse), scratch, SharedOperand(shape))| {
            let (ColumnRows(q), ColumnRows(k), ColumnRows(v)) = (q.operand, k.operand, v.operand);
            run_task(shape, (q, k, v), (out.operand.0, lse.operand.0), scratch);
        },
    );
}

/// All sequences and heads of a task, whose number follows from the sizes of its operands.
fn run_task(
    whole: AttentionShape,
    (q, k, v): (MatrixView<'_>, MatrixView<'_>, MatrixView<'_>),
    (mut out, mut lse): (MatrixViewMut<'_>, MatrixViewMut<'_>),
    scratch: TaskScratch<'_>,
) {
    let shape = whole.of_task(&q, &k);
    let scratch = AttentionScratch::new(shape, scratch);
    for (sequence, query_head) in shape.sequence_heads() {
        let key_head = query_head / shape.queries_per_key();
        if query_head.is_multiple_of(shape.queries_per_key()) {
            let k = head_view(shape, k, sequence, key_head);
            dispatch_simd::<TransposeMatrix, _>((k, &mut *scratch.transposed.0));
        }
        let inputs = ForwardHeadInputs {
            q: head_view(shape, q, sequence, query_head),
            k_transposed: MatrixView::new(scratch.transposed.0, shape.head_dim, shape.length),
            v: head_view(shape, v, sequence, key_head),
        };
        let out = head_view_mut(shape, &mut out, sequence, query_head);
        let lse = lse.reborrow().column_range(query_head, 1);
        let lse = lse.row_range(sequence * shape.queries.count, shape.queries.count);
        run_head(shape, inputs, out, lse, scratch.tiles.0);
    }
}

/// Inputs of one head of one sequence.
struct ForwardHeadInputs<'a> {
    /// `[queries, w]`.
    q: MatrixView<'a>,
    /// `[w, length]`.
    k_transposed: MatrixView<'a>,
    /// `[length, w]`.
    v: MatrixView<'a>,
}

fn run_head(
    shape: AttentionShape,
    ForwardHeadInputs { q, k_transposed, v }: ForwardHeadInputs<'_>,
    mut out: MatrixViewMut<'_>,
    mut lse: MatrixViewMut<'_>,
    tile: &mut [f32],
) {
    for QueryTile { row, position: first_query, count: queries } in shape.query_tiles() {
        let q = q.row_range(row, queries);
        let mut rows = [RunningSoftmax { maximum: f32::NEG_INFINITY, sum: 0.0 }; TILE_QUERIES];
        let rows = &mut rows[..queries];
        let start = TileMask::first_key(shape, first_query);
        let end = (first_query + queries).min(shape.length);
        for first_key in (start..end).step_by(TILE_KEYS) {
            let keys = TILE_KEYS.min(end - first_key);
            let tile = &mut tile[..queries * keys];
            let s = MatrixViewMut::new(tile, queries, keys);
            let k = k_transposed.column_range(first_key, keys);
            matmul(q.into(), k.into(), s, shape.scale(), WriteMode::Replace);
            let out = &mut out.reborrow().row_range(row, queries);
            let mask = TileMask { first_query, first_key, window: shape.window };
            let s = MatrixViewMut::new(tile, queries, keys);
            let rescale = first_key > start;
            dispatch_simd::<SoftmaxTile, _>((s, mask, &mut *rows, out.reborrow(), rescale));
            let write = if first_key == start { WriteMode::Replace } else { WriteMode::Add };
            let p = MatrixView::new(tile, queries, keys);
            let v = v.row_range(first_key, keys);
            matmul(p.into(), v.into(), out.reborrow(), 1.0, write);
        }
        let out = out.reborrow().row_range(row, queries);
        let lse = lse.reborrow().row_range(row, queries);
        dispatch_simd::<NormalizeRows, _>((out, lse, &*rows));
    }
}

/// Softmax statistics of a row over the keys so far.
#[derive(Clone, Copy)]
struct RunningSoftmax {
    maximum: f32,
    sum: f32,
}

/// Scores of a tile, its mask, statistics of the rows, the output of
/// earlier tiles, and whether there are earlier tiles.
type SoftmaxOperands<'a> =
    (MatrixViewMut<'a>, TileMask, &'a mut [RunningSoftmax], MatrixViewMut<'a>, bool);

/// Replaces scores by e^(s − maximum), with zeros for masked keys, and rescales the output of
/// earlier tiles to the new maximum.
struct SoftmaxTile;

impl SimdBody<SoftmaxOperands<'_>> for SoftmaxTile {
    #[inline(always)]
    fn run<S: Simd>((mut tile, mask, rows, mut out, rescale): SoftmaxOperands<'_>) {
        for (row, running) in rows.iter_mut().enumerate() {
            let [earlier, scores, later] = mask.split(row, tile.row_mut(row));
            earlier.fill(0.0);
            later.fill(0.0);
            let tile_maximum = maximum(scores);
            let new_maximum = tile_maximum.max(running.maximum);
            for score in scores.iter_mut() {
                *score = exp::<S>(*score - new_maximum);
            }
            let correction = exp::<S>(running.maximum - new_maximum);
            running.sum = running.sum * correction + sum(scores);
            running.maximum = new_maximum;
            if rescale {
                for out in out.row_mut(row) {
                    *out *= correction;
                }
            }
        }
    }
}

/// Divides the output by the sum of each row, and writes the log-sum-exp.
struct NormalizeRows;

impl SimdBody<(MatrixViewMut<'_>, MatrixViewMut<'_>, &[RunningSoftmax])> for NormalizeRows {
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
