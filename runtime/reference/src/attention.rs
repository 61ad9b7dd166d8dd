//! Causal attention with grouped queries, with its gradients.
//!
//! For each sequence and query head, with the rows Q, K, V of that head (query head h reads KV head
//! ⌊h / (heads/kv_heads)⌋):
//!
//! ```text
//! S = Q·Kᵀ/√head_dim    P_ij = e^(S_ij) / Σ_(i−w<k≤i) e^(S_ik) for i − w < j ≤ i, else 0    O = P·V
//! dV = Pᵀ·dO    dP = dO·Vᵀ    dS = P⊙(dP − rowsum(dP⊙P))
//! dQ = dS·K/√head_dim    dK = dSᵀ·Q/√head_dim
//! ```
//!
//! w is the window, which is the length of a sequence where all keys up to the query are visible.

use super::{Float, Matrix};

/// The sizes of the batch and of the heads.
#[derive(Clone, Copy)]
pub(super) struct BatchShape {
    pub sequences: usize,
    pub length: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Keys of a query at most.
    pub window: usize,
}

impl BatchShape {
    /// For each sequence and query head, the position (row, column) of the first element of the query
    /// head and of its KV head.
    fn heads(self) -> impl Iterator<Item = [(usize, usize); 2]> {
        let BatchShape { sequences, length, heads, kv_heads, head_dim, .. } = self;
        let group = heads / kv_heads;
        (0..sequences).flat_map(move |sequence| {
            let row = sequence * length;
            (0..heads).map(move |head| [(row, head * head_dim), (row, head / group * head_dim)])
        })
    }

    fn part<T: Float>(self, matrix: &Matrix<T>, (row, column): (usize, usize)) -> Matrix<T> {
        matrix.part(row..row + self.length, column..column + self.head_dim)
    }

    fn scale<T: Float>(self) -> T {
        T::from_f64(1.0 / (self.head_dim as f64).sqrt())
    }
}

/// O, for rotated q and k.
pub(super) fn forward<T: Float>(
    shape: BatchShape,
    q: &Matrix<T>,
    k: &Matrix<T>,
    v: &Matrix<T>,
) -> Matrix<T> {
    let mut output = Matrix::zeros(q.rows(), q.columns());
    for [query, key] in shape.heads() {
        let (q, k, v) = (shape.part(q, query), shape.part(k, key), shape.part(v, key));
        output.add_part(query, &probabilities(shape, &q, &k).times(&v));
    }
    output
}

/// The gradients of q, k and v.
pub(super) fn backward<T: Float>(
    shape: BatchShape,
    [q, k, v]: [&Matrix<T>; 3],
    doutput: &Matrix<T>,
) -> [Matrix<T>; 3] {
    let [mut dq, mut dk, mut dv] = [q, k, v].map(|x| Matrix::zeros(x.rows(), x.columns()));
    for [query, key] in shape.heads() {
        let (q, k, v) = (shape.part(q, query), shape.part(k, key), shape.part(v, key));
        let p = probabilities(shape, &q, &k);
        let d = shape.part(doutput, query);
        dv.add_part(key, &p.transposed_times(&d));
        let ds = softmax_backward(&p, &d.times_transposed(&v)).map(|x| x * shape.scale());
        dq.add_part(query, &ds.times(&k));
        dk.add_part(key, &ds.transposed_times(&q));
    }
    [dq, dk, dv]
}

/// The attention probabilities P of one head.
fn probabilities<T: Float>(shape: BatchShape, q: &Matrix<T>, k: &Matrix<T>) -> Matrix<T> {
    let mut scores = q.times_transposed(k).map(|x| x * shape.scale());
    for row in 0..shape.length {
        let (visible, later) = scores.row_mut(row).split_at_mut(row + 1);
        let (earlier, visible) = visible.split_at_mut((row + 1).saturating_sub(shape.window));
        let largest = visible.iter().copied().fold(T::neg_infinity(), T::max);
        visible.iter_mut().for_each(|x| *x = (*x - largest).exp());
        let sum: T = visible.iter().copied().sum();
        visible.iter_mut().for_each(|x| *x /= sum);
        earlier.fill(T::zero());
        later.fill(T::zero());
    }
    scores
}

fn softmax_backward<T: Float>(p: &Matrix<T>, dp: &Matrix<T>) -> Matrix<T> {
    let mut ds = p.zip(dp, |p, dp| p * dp);
    for row in 0..p.rows() {
        let sum: T = ds.row(row).iter().copied().sum();
        for (ds, p) in ds.row_mut(row).iter_mut().zip(p.row(row)) {
            *ds -= *p * sum;
        }
    }
    ds
}
