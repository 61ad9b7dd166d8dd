//! Merges the outputs of attention to two parts of the keys.
//!
//! With outputs o₁ and o₂ and their log-sum-exps l₁ and l₂, the log-sum-exp of both parts is l = ln(eˡ¹ + eˡ²), and the
//! output is o₁·eˡ¹⁻ˡ + o₂·eˡ²⁻ˡ.

use crate::kernels::matrix::{MatrixView, MatrixViewMut};

/// Adds the output `[rows, heads·w]` and the log-sum-exp `[rows, heads]` of more keys to those of the keys so far.
pub fn merge_outputs(
    (mut out, mut lse): (MatrixViewMut<'_>, MatrixViewMut<'_>),
    (more_out, more_lse): (MatrixView<'_>, MatrixView<'_>),
) {
    assert_eq!((out.rows(), out.columns()), (more_out.rows(), more_out.columns()));
    assert_eq!((lse.rows(), lse.columns()), (more_lse.rows(), more_lse.columns()));
    let head_dim = out.columns() / lse.columns();
    for row in 0..out.rows() {
        let heads = out.row_mut(row).chunks_exact_mut(head_dim);
        let more = more_out.row(row).chunks_exact(head_dim).zip(more_lse.row(row));
        for ((out, lse), (more_out, more_lse)) in heads.zip(lse.row_mut(row)).zip(more) {
            let maximum = lse.max(*more_lse);
            let merged = maximum + ((*lse - maximum).exp() + (more_lse - maximum).exp()).ln();
            let [scale, more_scale] = [*lse, *more_lse].map(|part| (part - merged).exp());
            for (out, more_out) in out.iter_mut().zip(more_out) {
                *out = *out * scale + more_out * more_scale;
            }
            *lse = merged;
        }
    }
}
