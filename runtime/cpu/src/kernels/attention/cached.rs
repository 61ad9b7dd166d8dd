//! Attention of the last tokens of one sequence to all of its tokens, whose keys and values are cached.
//!
//! With n queries and m ≥ n keys, query i is at position m − n + i and sees the keys up to this position, at most
//! `window` of them. The
//! scores of a head are whole rows: the caller bounds n.

use super::tiles::by_key_head;
use crate::kernels::matrix::{MatrixView, MatrixViewMut, WriteMode, matmul};
use crate::kernels::parallel::{ColumnRows, Parallel, SharedOperand, TaskScratch};
use crate::kernels::simd::{Simd, SimdBody, dispatch_simd, exp, maximum, sum};

/// Sizes of attention to cached keys that do not follow from its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedAttention {
    /// Features of a head.
    pub head_dim: usize,
    /// Keys of a query, at most.
    pub window: usize,
}

/// Scratch elements of [`attention_cached`] for n queries and m keys.
pub fn cached_attention_scratch_elements(n: usize, m: usize, parallel: Parallel) -> usize {
    parallel.threads() * n * m
}

/// Writes the output `[n, heads·w]` for queries `[n, heads·w]`, and keys and values `[m, kv_heads·w]`, with
/// heads of w = `head_dim` features. `scratch` holds [`cached_attention_scratch_elements`].
pub fn attention_cached(
    shape: CachedAttention,
    q: MatrixView<'_>,
    (k, v): (MatrixView<'_>, MatrixView<'_>),
    out: MatrixViewMut<'_>,
    scratch: &mut [f32],
    parallel: Parallel,
) {
    let CachedAttention { head_dim, window } = shape;
    // Keys that no query sees are left out.
    let hidden = (k.rows() - q.rows() + 1).saturating_sub(window);
    let [k, v] = [k, v].map(|of| of.row_range(hidden, of.rows() - hidden));
    assert!(q.rows() <= k.rows() && k.rows() == v.rows() && k.columns() == v.columns());
    assert_eq!((q.rows(), q.columns()), (out.rows(), out.columns()));
    let kv_heads = k.columns() / head_dim;
    let query_columns = q.columns() / kv_heads;
    let scratch = TaskScratch { elements_per_task: q.rows() * k.rows(), memory: scratch };
    let keys = (by_key_head(head_dim, k), by_key_head(head_dim, v));
    let queries = (by_key_head(query_columns, q), by_key_head(query_columns, out));
    let operands = (queries, keys, scratch, SharedOperand(shape));
    parallel.for_expensive_rows(
        kv_heads,
        operands,
        |((q, out), (k, v), scratch, SharedOperand(shape))| {
            let (ColumnRows(q), ColumnRows(k), ColumnRows(v)) = (q.operand, k.operand, v.operand);
            run_task(shape, q, (k, v), out.operand.0, scratch.memory);
        },
    );
}

/// All heads of a task, whose number follows from the sizes of its operands.
fn run_task(
    CachedAttention { head_dim, window }: CachedAttention,
    q: MatrixView<'_>,
    (k, v): (MatrixView<'_>, MatrixView<'_>),
    mut out: MatrixViewMut<'_>,
    scratch: &mut [f32],
) {
    let (heads, kv_heads) = (q.columns() / head_dim, k.columns() / head_dim);
    let (queries, keys) = (q.rows(), k.rows());
    let scores = &mut scratch[..queries * keys];
    for head in 0..heads {
        let key_column = head / (heads / kv_heads) * head_dim;
        let q = q.column_range(head * head_dim, head_dim);
        let (k, v) = (k.column_range(key_column, head_dim), v.column_range(key_column, head_dim));
        let scale = 1.0 / (head_dim as f32).sqrt();
        let s = MatrixViewMut::new(scores, queries, keys);
        matmul(q.into(), k.transposed(), s, scale, WriteMode::Replace);
        dispatch_simd::<SoftmaxRows, _>((MatrixViewMut::new(scores, queries, keys), window));
        let out = out.reborrow().column_range(head * head_dim, head_dim);
        let p = MatrixView::new(scores, queries, keys);
        matmul(p.into(), v.into(), out, 1.0, WriteMode::Replace);
    }
}

/// Replaces scores by probabilities, with zeros for keys after the query and for those before its window.
struct SoftmaxRows;

impl SimdBody<(MatrixViewMut<'_>, usize)> for SoftmaxRows {
    #[inline(always)]
    fn run<S: Simd>((mut scores, window): (MatrixViewMut<'_>, usize)) {
        let past = scores.columns() - scores.rows();
        for row in 0..scores.rows() {
            let (visible, later) = scores.row_mut(row).split_at_mut(past + row + 1);
            let (earlier, visible) = visible.split_at_mut((past + row + 1).saturating_sub(window));
            earlier.fill(0.0);
            later.fill(0.0);
            let maximum = maximum(visible);
            for score in visible.iter_mut() {
                *score = exp::<S>(*score - maximum);
            }
            let inverse = 1.0 / sum(visible);
            for score in visible {
                *score *= inverse;
            }
        }
    }
}
