//! What the processor makes of a problem, and what sums over absolute values are behind each number.

use narrows_cpu::kernels::{
    AttentionGradients, AttentionSaved, AttentionShape, MatrixView, MatrixViewMut, Parallel,
    attention_backward, attention_forward,
};

use super::super::numbers::rounded;
use super::{Numbers, Problem};

const SERIAL: Parallel = Parallel::SERIAL;

/// What the processor makes.
pub struct Wanted {
    pub out: Vec<f32>,
    pub lse: Vec<f32>,
    /// Of q, k and v.
    pub gradients: [Vec<f32>; 3],
}

pub fn wanted(problem: &Problem, numbers: &Numbers) -> Wanted {
    let shape = problem.shape();
    let tokens = problem.tokens() as usize;
    let all = MatrixView::new(&numbers.all, tokens, problem.width() as usize);
    let [q, k, v] = problem.columns().map(|columns| all.column_range(columns.start, columns.len()));
    let (queries, keys) = (q.columns(), k.columns());
    let mut out = vec![0.0; tokens * queries];
    let mut lse = vec![0.0; tokens * shape.heads];
    let mut scratch = vec![0.0; shape.scratch_elements(SERIAL)];
    let made = (
        MatrixViewMut::new(&mut out, tokens, queries),
        MatrixViewMut::new(&mut lse, tokens, shape.heads),
    );
    attention_forward(shape, (q, k, v), made, &mut scratch, SERIAL);
    // What backward reads is in the format of the program.
    let kept = rounded(problem.op.input, out.clone());
    let saved = AttentionSaved {
        q,
        k,
        v,
        out: MatrixView::new(&kept, tokens, queries),
        lse: MatrixView::new(&lse, tokens, shape.heads),
        dout: MatrixView::new(&numbers.dout, tokens, queries),
    };
    let [mut dq, mut dk, mut dv] = [queries, keys, keys].map(|width| vec![0.0; tokens * width]);
    let made = AttentionGradients {
        dq: MatrixViewMut::new(&mut dq, tokens, queries),
        dk: MatrixViewMut::new(&mut dk, tokens, keys),
        dv: MatrixViewMut::new(&mut dv, tokens, keys),
    };
    attention_backward(shape, saved, made, &mut scratch, SERIAL);
    Wanted { out, lse, gradients: [dq, dk, dv] }
}

/// Sums over absolute values: for each result what is rounded by a unit, and what is summed in f32.
pub struct Sums {
    pub out: Vec<f64>,
    /// Of q, k and v.
    pub rounded: [Vec<f64>; 3],
    pub summed: [Vec<f64>; 3],
    /// The largest Σ|q·k|·scale, which an error of a probability grows with.
    pub exponent: f64,
}

pub fn sums(problem: &Problem, numbers: &Numbers, wanted: &Wanted) -> Sums {
    let AttentionShape { sequences, length, heads, kv_heads, head_dim } = problem.shape();
    let [q, k, v] = problem.columns().map(|columns| problem.cut(&numbers.all, columns));
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
        let row_of = |token: usize, heads: usize, head: usize| {
            let first = ((sequence * length + token) * heads + head) * head_dim;
            first..first + head_dim
        };
        for i in 0..length {
            let at_i = row_of(i, heads, head);
            let (q_i, dout_i) = (&q[at_i.clone()], &numbers.dout[at_i.clone()]);
            let out_i = &wanted.out[at_i.clone()];
            let lse = f64::from(wanted.lse[(sequence * length + i) * heads + head]);
            let (d, d_sum) = (dot(out_i, dout_i, |x| x), dot(out_i, dout_i, f64::abs));
            for j in 0..=i {
                let at_j = row_of(j, kv_heads, key_head);
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
    Sums { out, rounded, summed, exponent }
}
