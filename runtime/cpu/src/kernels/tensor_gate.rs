//! The tensor gate of a crossing between latents: g = Uᵀ·H·V for each token.
//!
//! H is the token's latent h, of a·b features, as an a×b matrix, row by row; g is an m×n matrix in
//! the same way; U is `[a, m]`, V is `[b, n]`. Backward, with T = H·V made anew and dT = U·dg:
//! dh = dT·Vᵀ, dU += T·dgᵀ, dV += Hᵀ·dT.
//!
//! Tokens are taken a few at a time: with their a×b matrices one below the other, H·V, dT·Vᵀ and
//! Hᵀ·dT are one product each. What has U is a loop over rows of n numbers.

use super::matrix::matmul;
use super::parallel::{PartialSums, SharedOperand, TaskScratch, reduce_partial_sums};
use super::simd::{Simd, SimdBody, dispatch_simd, dot};
use super::{MatrixView, MatrixViewMut, Parallel, WriteMode};

/// Tokens at a time.
const TOKENS: usize = 16;

/// The two matrices and their sizes.
#[derive(Clone, Copy, Debug)]
pub struct TensorGate<'a> {
    /// U, `[a, m]`.
    pub u: MatrixView<'a>,
    /// V, `[b, n]`.
    pub v: MatrixView<'a>,
}

impl TensorGate<'_> {
    /// a·b, the features of h.
    pub fn input_features(&self) -> usize {
        self.u.rows() * self.v.rows()
    }

    /// m·n, the features of g.
    pub fn output_features(&self) -> usize {
        self.u.columns() * self.v.columns()
    }

    /// Numbers of T of one token.
    fn middle(&self) -> usize {
        self.u.rows() * self.v.columns()
    }

    /// Numbers of scratch memory that both directions need.
    pub fn scratch_elements(&self, parallel: Parallel) -> usize {
        let rows = (self.u.rows(), self.v.rows());
        let columns = (self.u.columns(), self.v.columns());
        TensorGate::scratch_elements_for(rows, columns, parallel)
    }

    /// The same of a gate with U `[a, m]` and V `[b, n]`.
    pub fn scratch_elements_for(
        (a, b): (usize, usize),
        (m, n): (usize, usize),
        parallel: Parallel,
    ) -> usize {
        parallel.threads() * 2 * TOKENS * a * n + parallel.reduction_scratch_elements(a * m + b * n)
    }

    fn check(&self, tokens: usize, h: usize, g: usize) {
        assert!(h == tokens * self.input_features() && g == tokens * self.output_features());
    }
}

/// An operand `[tokens, each]`, contiguous.
type TokenRows<T> = super::parallel::GroupedRows<T>;

/// g (+)= Uᵀ·H·V: h `[tokens, a·b]`, g `[tokens, m·n]`, both contiguous. `scratch` holds
/// [`TensorGate::scratch`] numbers.
pub fn tensor_gate_forward(
    tokens: usize,
    gate: TensorGate<'_>,
    h: &[f32],
    g: &mut [f32],
    write: WriteMode,
    scratch: &mut [f32],
    parallel: Parallel,
) {
    gate.check(tokens, h.len(), g.len());
    let h = TokenRows { group_size: gate.input_features(), operand: h };
    let g = TokenRows { group_size: gate.output_features(), operand: g };
    let lent = TaskScratch { elements_per_task: 2 * TOKENS * gate.middle(), memory: scratch };
    parallel.for_rows::<ForwardTokens, _>(
        tokens,
        (h, g, SharedOperand(gate), SharedOperand(write), lent),
    );
}

type GateForward<'a> = (
    TokenRows<&'a [f32]>,
    TokenRows<&'a mut [f32]>,
    SharedOperand<TensorGate<'a>>,
    SharedOperand<WriteMode>,
    TaskScratch<'a>,
);

struct ForwardTokens;

impl SimdBody<GateForward<'_>> for ForwardTokens {
    #[inline(always)]
    fn run<S: Simd>((h, g, SharedOperand(gate), SharedOperand(write), lent): GateForward<'_>) {
        let some = h
            .operand
            .chunks(TOKENS * gate.input_features())
            .zip(g.operand.chunks_mut(TOKENS * gate.output_features()));
        for (h, g) in some {
            let t = middle(gate, h, lent.memory);
            dispatch_simd::<LeftProduct, _>((gate, t, g, write));
        }
    }
}

/// T = H·V of a few tokens, in scratch memory.
fn middle<'a>(gate: TensorGate<'_>, h: &[f32], scratch: &'a mut [f32]) -> &'a [f32] {
    let rows = h.len() / gate.v.rows();
    let t = &mut scratch[..rows * gate.v.columns()];
    let h = MatrixView::new(h, rows, gate.v.rows());
    let view = MatrixViewMut::new(t, rows, gate.v.columns());
    matmul(h.into(), gate.v.into(), view, 1.0, WriteMode::Replace);
    t
}

/// g (+)= Uᵀ·T.
struct LeftProduct;

impl SimdBody<(TensorGate<'_>, &[f32], &mut [f32], WriteMode)> for LeftProduct {
    #[inline(always)]
    fn run<S: Simd>((gate, t, g, write): (TensorGate<'_>, &[f32], &mut [f32], WriteMode)) {
        let n = gate.v.columns();
        if write == WriteMode::Replace {
            g.fill(0.0);
        }
        for (t, g) in t.chunks_exact(gate.middle()).zip(g.chunks_exact_mut(gate.output_features()))
        {
            for (row, t) in t.chunks_exact(n).enumerate() {
                for (u, g) in gate.u.row(row).iter().zip(g.chunks_exact_mut(n)) {
                    for (g, t) in g.iter_mut().zip(t) {
                        *g += u * t;
                    }
                }
            }
        }
    }
}

/// What [`backward`] writes.
pub struct TensorGateGradients<'a> {
    /// Gradient of h, `[tokens, a·b]`, contiguous.
    pub dh: &'a mut [f32],
    /// Whether it is added to what is there.
    pub write: WriteMode,
    /// Gradient of U, `[a, m]` contiguous, added to.
    pub du: &'a mut [f32],
    /// Gradient of V, `[b, n]` contiguous, added to.
    pub dv: &'a mut [f32],
}

/// Gradients of h, U and V. `scratch` holds [`TensorGate::scratch`] numbers.
pub fn tensor_gate_backward(
    tokens: usize,
    gate: TensorGate<'_>,
    (h, dg): (&[f32], &[f32]),
    made: TensorGateGradients<'_>,
    scratch: &mut [f32],
    parallel: Parallel,
) {
    let TensorGateGradients { dh, write, du, dv } = made;
    gate.check(tokens, h.len(), dg.len());
    gate.check(tokens, dh.len(), dg.len());
    assert!(du.len() == gate.u.rows() * gate.u.columns());
    assert!(dv.len() == gate.v.rows() * gate.v.columns());
    let each = 2 * TOKENS * gate.middle();
    let (tiles, scratch) = scratch.split_at_mut(parallel.threads() * each);
    let (first, second) = scratch.split_at_mut(parallel.reduction_scratch_elements(du.len()));
    let sums = (PartialSums::new(du, first, parallel), PartialSums::new(dv, second, parallel));
    let h = TokenRows { group_size: gate.input_features(), operand: h };
    let dg = TokenRows { group_size: gate.output_features(), operand: dg };
    let dh = TokenRows { group_size: gate.input_features(), operand: dh };
    let lent = TaskScratch { elements_per_task: each, memory: tiles };
    let tasks = parallel.for_rows::<BackwardTokens, _>(
        tokens,
        ((h, dg, dh), SharedOperand(gate), SharedOperand(write), lent, sums),
    );
    reduce_partial_sums(du, first, tasks);
    reduce_partial_sums(dv, second, tasks);
}

type GateOperands<'a> = (TokenRows<&'a [f32]>, TokenRows<&'a [f32]>, TokenRows<&'a mut [f32]>);
type GateBackward<'a> = (
    GateOperands<'a>,
    SharedOperand<TensorGate<'a>>,
    SharedOperand<WriteMode>,
    TaskScratch<'a>,
    (PartialSums<'a>, PartialSums<'a>),
);

struct BackwardTokens;

impl SimdBody<GateBackward<'_>> for BackwardTokens {
    #[inline(always)]
    fn run<S: Simd>(
        ((h, dg, dh), SharedOperand(gate), SharedOperand(write), lent, (du, dv)): GateBackward<'_>,
    ) {
        let (b, n) = (gate.v.rows(), gate.v.columns());
        let (t, dt) = lent.memory.split_at_mut(TOKENS * gate.middle());
        let dh = dh.operand.chunks_mut(TOKENS * gate.input_features());
        let some = h
            .operand
            .chunks(TOKENS * gate.input_features())
            .zip(dg.operand.chunks(TOKENS * gate.output_features()));
        for ((h, dg), dh) in some.zip(dh) {
            let t = middle(gate, h, t);
            let rows = h.len() / b;
            let dt = &mut dt[..rows * n];
            dispatch_simd::<LeftBackward, _>((gate, t, dg, &mut *dt, &mut *du.sums));
            let dt = MatrixView::new(dt, rows, n);
            let dh = MatrixViewMut::new(dh, rows, b);
            matmul(dt.into(), gate.v.transposed(), dh, 1.0, write);
            let dv = MatrixViewMut::new(dv.sums, b, n);
            let h = MatrixView::new(h, rows, b).transposed();
            matmul(h, dt.into(), dv, 1.0, WriteMode::Add);
        }
    }
}

/// dT = U·dg, dU += T·dgᵀ.
struct LeftBackward;

impl SimdBody<(TensorGate<'_>, &[f32], &[f32], &mut [f32], &mut [f32])> for LeftBackward {
    #[inline(always)]
    fn run<S: Simd>(
        (gate, t, dg, dt, du): (TensorGate<'_>, &[f32], &[f32], &mut [f32], &mut [f32]),
    ) {
        let (m, n) = (gate.u.columns(), gate.v.columns());
        dt.fill(0.0);
        let tokens = t.chunks_exact(gate.middle()).zip(dt.chunks_exact_mut(gate.middle()));
        for ((t, dt), dg) in tokens.zip(dg.chunks_exact(gate.output_features())) {
            let rows = t.chunks_exact(n).zip(dt.chunks_exact_mut(n)).zip(du.chunks_exact_mut(m));
            for (row, ((t, dt), du)) in rows.enumerate() {
                let columns = gate.u.row(row).iter().zip(du).zip(dg.chunks_exact(n));
                for ((u, du), dg) in columns {
                    *du += dot::<S>(t, dg);
                    for (dt, dg) in dt.iter_mut().zip(dg) {
                        *dt += u * dg;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{assert_close, gradient, random, weigh, widen};

    const A: usize = 4;
    const B: usize = 6;
    const M: usize = 3;
    const N: usize = 5;

    fn naive(h: &[f64], u: &[f64], v: &[f64]) -> Vec<f64> {
        let entry = |h: &[f64], k: usize| -> f64 {
            let (row, column) = (k / N, k % N);
            let term = |i: usize, j: usize| u[i * M + row] * h[i * B + j] * v[j * N + column];
            (0..A).flat_map(|i| (0..B).map(move |j| (i, j))).map(|(i, j)| term(i, j)).sum()
        };
        h.chunks(A * B).flat_map(|h| (0..M * N).map(|k| entry(h, k)).collect::<Vec<_>>()).collect()
    }

    #[test]
    fn values_and_derivatives() {
        let tokens = 21;
        let (h, dg) = (random(1, tokens * A * B), random(2, tokens * M * N));
        let (u, v) = (random(3, A * M), random(4, B * N));
        let gate = TensorGate { u: MatrixView::new(&u, A, M), v: MatrixView::new(&v, B, N) };
        let (h64, u64, v64) = (widen(&h), widen(&u), widen(&v));
        for (write, offset) in [(WriteMode::Replace, 0.0), (WriteMode::Add, 0.5)] {
            let moved = |of: Vec<f64>, by: f64| of.iter().map(|x| x + by).collect::<Vec<_>>();
            let mut scratch = vec![f32::NAN; gate.scratch_elements(Parallel::SERIAL)];
            let mut g = vec![0.5; tokens * M * N];
            tensor_gate_forward(tokens, gate, &h, &mut g, write, &mut scratch, Parallel::SERIAL);
            assert_close(&g, &moved(naive(&h64, &u64, &v64), offset), 1e-6);
            let (mut dh, mut du, mut dv) =
                (vec![0.5; h.len()], vec![0.25; u.len()], vec![0.25; v.len()]);
            let made = TensorGateGradients { dh: &mut dh, write, du: &mut du, dv: &mut dv };
            tensor_gate_backward(tokens, gate, (&h, &dg), made, &mut scratch, Parallel::SERIAL);
            let of_h = gradient(&h64, |h| weigh(&naive(h, &u64, &v64), &dg));
            let of_u = gradient(&u64, |u| weigh(&naive(&h64, u, &v64), &dg));
            let of_v = gradient(&v64, |v| weigh(&naive(&h64, &u64, v), &dg));
            assert_close(&dh, &moved(of_h, offset), 1e-6);
            assert_close(&du, &moved(of_u, 0.25), 2e-6);
            assert_close(&dv, &moved(of_v, 0.25), 2e-6);
        }
    }

    #[test]
    fn threads_change_nothing_but_rounding() {
        let tokens = 900;
        let (h, dg) = (random(1, tokens * A * B), random(2, tokens * M * N));
        let (u, v) = (random(3, A * M), random(4, B * N));
        let gate = TensorGate { u: MatrixView::new(&u, A, M), v: MatrixView::new(&v, B, N) };
        let run = |threads: usize| {
            let parallel = Parallel::new(threads);
            let mut scratch = vec![f32::NAN; gate.scratch_elements(parallel)];
            let (mut g, mut dh) = (vec![0.0; tokens * M * N], vec![0.0; h.len()]);
            let (mut du, mut dv) = (vec![0.0; u.len()], vec![0.0; v.len()]);
            tensor_gate_forward(
                tokens,
                gate,
                &h,
                &mut g,
                WriteMode::Replace,
                &mut scratch,
                parallel,
            );
            let made = TensorGateGradients {
                dh: &mut dh,
                write: WriteMode::Replace,
                du: &mut du,
                dv: &mut dv,
            };
            tensor_gate_backward(tokens, gate, (&h, &dg), made, &mut scratch, parallel);
            [g, dh, du, dv]
        };
        let one = run(1);
        for threads in [2, 3] {
            for (many, one) in run(threads).iter().zip(&one) {
                assert_close(many, &widen(one), 2e-6);
            }
        }
    }
}
