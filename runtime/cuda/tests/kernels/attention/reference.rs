//! Results of the CPU backend, and the sums over absolute values that bound their errors.

use narrows_cpu::kernels::{
    AttentionGradients, AttentionSaved, AttentionShape, MatrixView, MatrixViewMut, Parallel,
    attention_backward, attention_forward,
};

use super::problem::{AttentionProblem, Values};
use crate::formats::rounded;

const SERIAL: Parallel = Parallel::SERIAL;

/// Results of the CPU backend.
pub struct AttentionReference {
    pub out: Vec<f32>,
    pub lse: Vec<f32>,
    /// Gradients of q, k and v.
    pub gradients: [Vec<f32>; 3],
}

pub fn reference(problem: &AttentionProblem, values: &Values) -> AttentionReference {
    let shape = problem.shape();
    let tokens = problem.tokens() as usize;
    let query_rows = problem.query_rows() as usize;
    let all = MatrixView::new(&values.all, tokens, problem.width() as usize);
    let columns = problem.columns();
    let (queries, q_columns) = (columns[0].len(), columns[0].clone());
    let [_, k, v] = columns.map(|columns| all.column_range(columns.start, columns.len()));
    let q = problem.select_queries(problem.select(&values.all, q_columns));
    let q = MatrixView::new(&q, query_rows, queries);
    let keys = k.columns();
    let mut out = vec![0.0; query_rows * queries];
    let mut lse = vec![0.0; query_rows * shape.heads];
    let mut scratch = vec![0.0; shape.scratch_elements(SERIAL)];
    let results = (
        MatrixViewMut::new(&mut out, query_rows, queries),
        MatrixViewMut::new(&mut lse, query_rows, shape.heads),
    );
    attention_forward(shape, (q, k, v), results, &mut scratch, SERIAL);
    // The backward pass reads the output in the format of the program.
    let saved_out = rounded(problem.op.input, out.clone());
    let saved = AttentionSaved {
        q,
        k,
        v,
        out: MatrixView::new(&saved_out, query_rows, queries),
        lse: MatrixView::new(&lse, query_rows, shape.heads),
        dout: MatrixView::new(&values.dout, query_rows, queries),
    };
    let mut dq = vec![0.0; query_rows * queries];
    let [mut dk, mut dv] = [(); 2].map(|()| vec![0.0; tokens * keys]);
    let gradients = AttentionGradients {
        dq: MatrixViewMut::new(&mut dq, query_rows, queries),
        dk: MatrixViewMut::new(&mut dk, tokens, keys),
        dv: MatrixViewMut::new(&mut dv, tokens, keys),
    };
    attention_backward(shape, saved, gradients, &mut scratch, SERIAL);
    AttentionReference { out, lse, gradients: [dq, dk, dv] }
}

/// Sums over absolute values for each result: of the terms that are rounded to bf16, and of those summed in f32.
pub struct ErrorTerms {
    pub out: Vec<f64>,
    /// Rounded terms of the gradients of q, k and v.
    pub rounded: [Vec<f64>; 3],
    /// Summed terms of the gradients of q, k and v.
    pub summed: [Vec<f64>; 3],
    /// Maximum of Σ|q·k|·scale, to which errors of probabilities are proportional.
    pub exponent: f64,
}

pub fn error_terms(
    problem: &AttentionProblem,
    values: &Values,
    reference: &AttentionReference,
) -> ErrorTerms {
    let AttentionShape { sequences, length, queries, heads, kv_heads, head_dim, window } =
        problem.shape();
    let [q, k, v] = problem.columns().map(|columns| problem.select(&values.all, columns));
    let q = problem.select_queries(q);
    let scale = 1.0 / (head_dim as f64).sqrt();
    let zeros = || [&q, &k, &v].map(|of| vec![0.0; of.len()]);
    let (mut rounded, mut summed) = (zeros(), zeros());
    let mut out = vec![0.0; q.len()];
    let mut exponent = 0.0f64;
    let dot = |x: &[f32], y: &[f32], of: fn(f64) -> f64| -> f64 {
        x.iter().zip(y).map(|(x, y)| of(f64::from(*x) * f64::from(*y))).sum()
    };
    for (sequence, head) in (0..sequences).flat_map(|s| (0..heads).map(move |h| (s, h))) {
        let key_head = head * kv_heads / heads;
        let row_of = |row: usize, heads: usize, head: usize| {
            let first = (row * heads + head) * head_dim;
            first..first + head_dim
        };
        for (row, i) in queries.runs().flatten().enumerate() {
            let row = sequence * queries.count + row;
            let at_i = row_of(row, heads, head);
            let (q_i, dout_i) = (&q[at_i.clone()], &values.dout[at_i.clone()]);
            let out_i = &reference.out[at_i.clone()];
            let lse = f64::from(reference.lse[row * heads + head]);
            let (d, d_sum) = (dot(out_i, dout_i, |x| x), dot(out_i, dout_i, f64::abs));
            for j in (i + 1).saturating_sub(window)..=i {
                let at_j = row_of(sequence * length + j, kv_heads, key_head);
                let (k_j, v_j) = (&k[at_j.clone()], &v[at_j.clone()]);
                let p = (scale * dot(q_i, k_j, |x| x) - lse).exp();
                exponent = exponent.max(scale * dot(q_i, k_j, f64::abs));
                let ds = (scale * p * (dot(dout_i, v_j, |x| x) - d)).abs();
                let ds_sum = scale * p * (dot(dout_i, v_j, f64::abs) + d_sum);
                for f in 0..head_dim {
                    let [q, k, v, dout] = [q_i, k_j, v_j, dout_i].map(|of| f64::from(of[f]).abs());
                    let (i, j) = (at_i.start + f, at_j.start + f);
                    out[i] += p * v;
                    rounded[0][i] += ds * k;
                    summed[0][i] += ds_sum * k;
                    rounded[1][j] += ds * q;
                    summed[1][j] += ds_sum * q;
                    rounded[2][j] += p * dout;
                    summed[2][j] += p * dout;
                }
            }
        }
    }
    ErrorTerms { out, rounded, summed, exponent }
}
