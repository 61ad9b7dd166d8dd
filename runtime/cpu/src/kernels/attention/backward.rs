//! Backward: gradients of q, k and v.

use super::tiles::{
    AttentionScratch, AttentionShape, QueryTile, TILE_KEYS, TILE_QUERIES, TileMask,
    TransposeMatrix, by_key_head, by_sequence, divides_sequences, head_view, head_view_mut,
    task_scratch,
};
use crate::kernels::elementwise::fill_zero_view;
use crate::kernels::matrix::{MatrixView, MatrixViewMut, WriteMode, matmul};
use crate::kernels::parallel::{ColumnRows, Parallel, SharedOperand, TaskScratch};
use crate::kernels::simd::{Simd, SimdBody, dispatch_simd, dot, exp};

/// Inputs of [`attention_backward`].
#[derive(Clone, Copy, Debug)]
pub struct AttentionSaved<'a> {
    /// Queries.
    pub q: MatrixView<'a>,
    /// Keys.
    pub k: MatrixView<'a>,
    /// Values.
    pub v: MatrixView<'a>,
    /// Output of forward.
    pub out: MatrixView<'a>,
    /// Log-sum-exp of forward.
    pub lse: MatrixView<'a>,
    /// Gradient of the output.
    pub dout: MatrixView<'a>,
}

/// Outputs of [`attention_backward`]; all are replaced.
pub struct AttentionGradients<'a> {
    /// Gradient of the queries.
    pub dq: MatrixViewMut<'a>,
    /// Gradient of the keys.
    pub dk: MatrixViewMut<'a>,
    /// Gradient of the values.
    pub dv: MatrixViewMut<'a>,
}

/// Backward: writes the gradients of all heads. `scratch` holds
/// [`AttentionShape::scratch_elements`].
pub fn attention_backward(
    shape: AttentionShape,
    saved: AttentionSaved<'_>,
    gradients: AttentionGradients<'_>,
    scratch: &mut [f32],
    parallel: Parallel,
) {
    let AttentionSaved { q, k, v, out, lse, dout } = saved;
    let AttentionGradients { dq, dk, dv } = gradients;
    let size = |view: &MatrixView<'_>| (view.rows(), view.columns());
    let size_mut = |view: &MatrixViewMut<'_>| (view.rows(), view.columns());
    let query_sizes = [size(&q), size(&out), size(&dout), size_mut(&dq)];
    shape.check(&query_sizes, &[size(&k), size(&v), size_mut(&dk), size_mut(&dv)]);
    assert_eq!(size(&lse), (shape.query_rows(), shape.heads));
    let scratch = task_scratch(shape, scratch);
    if divides_sequences(shape, parallel) {
        let (queries, keys) = (shape.queries.count, shape.length);
        let of_queries = |view| by_sequence(queries, view);
        let of_keys = |view| by_sequence(keys, view);
        let query_inputs = (of_queries(q), of_queries(out), of_queries(lse), of_queries(dout));
        let inputs = (query_inputs, of_keys(k), of_keys(v));
        let outputs = (by_sequence(queries, dq), by_sequence(keys, dk), by_sequence(keys, dv));
        let operands = (inputs, outputs, scratch, SharedOperand(shape));
        parallel.for_expensive_rows(
            shape.sequences,
            operands,
            |(((q, out, lse, dout), k, v), (dq, dk, dv), scratch, SharedOperand(shape))| {
                let [q, k, v, out, lse, dout] = [q, k, v, out, lse, dout].map(|view| view.operand);
                let saved = AttentionSaved { q, k, v, out, lse, dout };
                let [dq, dk, dv] = [dq, dk, dv].map(|view| view.operand);
                run_task(shape, saved, AttentionGradients { dq, dk, dv }, scratch);
            },
        );
        return;
    }
    let key_columns = shape.head_dim;
    let query_columns = shape.queries_per_key() * shape.head_dim;
    let query_inputs = (
        by_key_head(query_columns, q),
        by_key_head(query_columns, out),
        by_key_head(query_columns, dout),
        by_key_head(shape.queries_per_key(), lse),
    );
    let key_inputs = (by_key_head(key_columns, k), by_key_head(key_columns, v));
    let outputs = (
        by_key_head(query_columns, dq),
        by_key_head(key_columns, dk),
        by_key_head(key_columns, dv),
    );
    let operands = (query_inputs, key_inputs, outputs, scratch, SharedOperand(shape));
    parallel.for_expensive_rows(
        shape.kv_heads,
        operands,
        |((q, out, dout, lse), (k, v), (dq, dk, dv), scratch, SharedOperand(shape))| {
            let [q, k, v, out, lse, dout] = [q, k, v, out, lse, dout].map(|view| {
                let ColumnRows(view) = view.operand;
                view
            });
            let saved = AttentionSaved { q, k, v, out, lse, dout };
            let [dq, dk, dv] = [dq, dk, dv].map(|view| {
                let ColumnRows(view) = view.operand;
                view
            });
            run_task(shape, saved, AttentionGradients { dq, dk, dv }, scratch);
        },
    );
}

/// All sequences and heads of a task, whose number follows from the sizes of its operands.
fn run_task(
    whole: AttentionShape,
    saved: AttentionSaved<'_>,
    mut gradients: AttentionGradients<'_>,
    scratch: TaskScratch<'_>,
) {
    let shape = whole.of_task(&saved.q, &saved.k);
    let scratch = AttentionScratch::new(shape, scratch);
    for (sequence, query_head) in shape.sequence_heads() {
        let key_head = query_head / shape.queries_per_key();
        let k = head_view(shape, saved.k, sequence, key_head);
        let mut gradients = AttentionGradients {
            dq: head_view_mut(shape, &mut gradients.dq, sequence, query_head),
            dk: head_view_mut(shape, &mut gradients.dk, sequence, key_head),
            dv: head_view_mut(shape, &mut gradients.dv, sequence, key_head),
        };
        if query_head.is_multiple_of(shape.queries_per_key()) {
            fill_zero_view(&mut gradients.dk);
            fill_zero_view(&mut gradients.dv);
            let v = head_view(shape, saved.v, sequence, key_head);
            dispatch_simd::<TransposeMatrix, _>((k, &mut *scratch.transposed.0));
            dispatch_simd::<TransposeMatrix, _>((v, &mut *scratch.transposed.1));
        }
        let lse = saved.lse.column_range(query_head, 1);
        let inputs = BackwardHeadInputs {
            q: head_view(shape, saved.q, sequence, query_head),
            k,
            k_transposed: MatrixView::new(scratch.transposed.0, shape.head_dim, shape.length),
            v_transposed: MatrixView::new(scratch.transposed.1, shape.head_dim, shape.length),
            out: head_view(shape, saved.out, sequence, query_head),
            lse: lse.row_range(sequence * shape.queries.count, shape.queries.count),
            dout: head_view(shape, saved.dout, sequence, query_head),
        };
        let tiles = (&mut *scratch.tiles.0, &mut *scratch.tiles.1);
        run_head(shape, inputs, gradients, tiles);
    }
}

/// Inputs of one head of one sequence: `[queries, w]` and `[length, w]`, transposed `[w, length]`, lse `[queries, 1]`.
struct BackwardHeadInputs<'a> {
    q: MatrixView<'a>,
    k: MatrixView<'a>,
    k_transposed: MatrixView<'a>,
    v_transposed: MatrixView<'a>,
    out: MatrixView<'a>,
    lse: MatrixView<'a>,
    dout: MatrixView<'a>,
}

fn run_head(
    shape: AttentionShape,
    inputs: BackwardHeadInputs<'_>,
    mut gradients: AttentionGradients<'_>,
    (s_tile, dp_tile): (&mut [f32], &mut [f32]),
) {
    for QueryTile { row, position: first_query, count: queries } in shape.query_tiles() {
        let [q, dout, out, lse] = [inputs.q, inputs.dout, inputs.out, inputs.lse]
            .map(|view| view.row_range(row, queries));
        let mut row_dots = [0.0; TILE_QUERIES];
        dispatch_simd::<RowDots, _>((out, dout, &mut row_dots[..queries]));
        let start = TileMask::first_key(shape, first_query);
        let end = (first_query + queries).min(shape.length);
        for first_key in (start..end).step_by(TILE_KEYS) {
            let keys = TILE_KEYS.min(end - first_key);
            let k = inputs.k.row_range(first_key, keys);
            let [k_transposed, v_transposed] = [inputs.k_transposed, inputs.v_transposed]
                .map(|view| view.column_range(first_key, keys));
            let s_tile = &mut s_tile[..queries * keys];
            let dp_tile = &mut dp_tile[..queries * keys];
            let s = MatrixViewMut::new(s_tile, queries, keys);
            matmul(q.into(), k_transposed.into(), s, shape.scale(), WriteMode::Replace);
            let dp = MatrixViewMut::new(dp_tile, queries, keys);
            matmul(dout.into(), v_transposed.into(), dp, 1.0, WriteMode::Replace);
            let s = MatrixViewMut::new(s_tile, queries, keys);
            let dp = MatrixViewMut::new(dp_tile, queries, keys);
            let mask = TileMask { first_query, first_key, window: shape.window };
            let row_dots = &row_dots[..queries];
            dispatch_simd::<ScoreGradients, _>((s, dp, lse, row_dots, mask, shape.scale()));
            let p = MatrixView::new(s_tile, queries, keys);
            let ds = MatrixView::new(dp_tile, queries, keys);
            let dv = gradients.dv.reborrow().row_range(first_key, keys);
            matmul(p.transposed(), dout.into(), dv, 1.0, WriteMode::Add);
            let dk = gradients.dk.reborrow().row_range(first_key, keys);
            matmul(ds.transposed(), q.into(), dk, 1.0, WriteMode::Add);
            let dq = gradients.dq.reborrow().row_range(row, queries);
            let write = if first_key == start { WriteMode::Replace } else { WriteMode::Add };
            matmul(ds.into(), k.into(), dq, 1.0, write);
        }
    }
}

/// D = Σ x⊙y of each row.
struct RowDots;

impl SimdBody<(MatrixView<'_>, MatrixView<'_>, &mut [f32])> for RowDots {
    #[inline(always)]
    fn run<S: Simd>((x, y, dots): (MatrixView<'_>, MatrixView<'_>, &mut [f32])) {
        for (row, dot_product) in dots.iter_mut().enumerate() {
            *dot_product = dot::<S>(x.row(row), y.row(row));
        }
    }
}

/// Scores and gradients of the probabilities, log-sum-exp, D of each row, the mask, and the scale.
type ScoreGradientOperands<'a> =
    (MatrixViewMut<'a>, MatrixViewMut<'a>, MatrixView<'a>, &'a [f32], TileMask, f32);

/// Replaces scores by probabilities, and the gradients of probabilities by those of the scores before
/// scaling. Masked keys get zeros.
struct ScoreGradients;

impl SimdBody<ScoreGradientOperands<'_>> for ScoreGradients {
    #[inline(always)]
    fn run<S: Simd>((mut s, mut dp, lse, row_dots, mask, scale): ScoreGradientOperands<'_>) {
        for (row, row_dot) in row_dots.iter().enumerate() {
            let lse = lse.row(row)[0];
            let [s_earlier, s, s_later] = mask.split(row, s.row_mut(row));
            let [dp_earlier, dp, dp_later] = mask.split(row, dp.row_mut(row));
            for masked in [s_earlier, s_later, dp_earlier, dp_later] {
                masked.fill(0.0);
            }
            for (s, dp) in s.iter_mut().zip(dp) {
                let p = exp::<S>(*s - lse);
                *s = p;
                *dp = scale * p * (*dp - row_dot);
            }
        }
    }
}
