//! Tensor gate of a latent crossing: g = Uᵀ·H·V for each token.
//!
//! H is the latent h of a token, with a·b features, as a row-major a×b matrix; g is likewise an m×n
//! matrix; U is `[a, m]` and V is `[b, n]`. Backward recomputes T = H·V; with dT = U·dg:
//! dh = dT·Vᵀ, dU += T·dgᵀ, dV += Hᵀ·dT.
//!
//! Tokens are processed in tiles: with the a×b matrices of a tile one below the other, H·V, dT·Vᵀ and
//! Hᵀ·dT are one GEMM each. Multiplications by U are loops over rows of n elements.

use super::matrix::{MatrixView, MatrixViewMut, WriteMode, matmul};
use super::parallel::{
    GroupedRows, Parallel, SharedOperand, TaskPartialSums, TaskScratch, reduce_partial_sums,
};
use super::simd::{Simd, SimdBody, dispatch_simd, dot};

/// Tokens of a tile.
const TILE_TOKENS: usize = 16;

/// The two matrices of a tensor gate.
#[derive(Clone, Copy, Debug)]
pub struct TensorGate<'a> {
    /// U, `[a, m]`.
    pub u: MatrixView<'a>,
    /// V, `[b, n]`.
    pub v: MatrixView<'a>,
}

impl TensorGate<'_> {
    /// Features of h, a·b.
    fn input_features(&self) -> usize {
        self.u.rows() * self.v.rows()
    }

    /// Features of g, m·n.
    fn output_features(&self) -> usize {
        self.u.columns() * self.v.columns()
    }

    /// Elements of T of one token, a·n.
    fn t_elements(&self) -> usize {
        self.u.rows() * self.v.columns()
    }

    /// Scratch elements of forward and of backward.
    pub fn scratch_elements(&self, parallel: Parallel) -> usize {
        let rows = (self.u.rows(), self.v.rows());
        let columns = (self.u.columns(), self.v.columns());
        TensorGate::scratch_elements_for(rows, columns, parallel)
    }

    /// [`scratch_elements`](TensorGate::scratch_elements) of a gate with U `[a, m]` and V `[b, n]`.
    pub fn scratch_elements_for(
        (a, b): (usize, usize),
        (m, n): (usize, usize),
        parallel: Parallel,
    ) -> usize {
        parallel.threads() * 2 * TILE_TOKENS * a * n
            + parallel.reduction_scratch_elements(a * m + b * n)
    }

    fn check(&self, tokens: usize, h_len: usize, g_len: usize) {
        assert!(h_len == tokens * self.input_features());
        assert!(g_len == tokens * self.output_features());
    }
}

/// g (+)= Uᵀ·H·V: h `[tokens, a·b]` and g `[tokens, m·n]`, both contiguous. `scratch` holds
/// [`TensorGate::scratch_elements`].
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
    let operands = (
        GroupedRows { group_size: gate.input_features(), operand: h },
        GroupedRows { group_size: gate.output_features(), operand: g },
        SharedOperand(gate),
        SharedOperand(write),
        TaskScratch { elements_per_task: 2 * TILE_TOKENS * gate.t_elements(), memory: scratch },
    );
    parallel.for_rows::<ForwardTokens, _>(tokens, operands);
}

type TensorGateForwardOperands<'a> = (
    GroupedRows<&'a [f32]>,
    GroupedRows<&'a mut [f32]>,
    SharedOperand<TensorGate<'a>>,
    SharedOperand<WriteMode>,
    TaskScratch<'a>,
);

struct ForwardTokens;

impl SimdBody<TensorGateForwardOperands<'_>> for ForwardTokens {
    #[inline(always)]
    fn run<S: Simd>(
        (h, g, SharedOperand(gate), SharedOperand(write), scratch): TensorGateForwardOperands<'_>,
    ) {
        let h_tiles = h.operand.chunks(TILE_TOKENS * gate.input_features());
        let g_tiles = g.operand.chunks_mut(TILE_TOKENS * gate.output_features());
        for (h, g) in h_tiles.zip(g_tiles) {
            let t = multiply_v(gate, h, scratch.memory);
            dispatch_simd::<MultiplyUTransposed, _>((gate, t, g, write));
        }
    }
}

/// T = H·V of a tile, in scratch memory.
fn multiply_v<'a>(gate: TensorGate<'_>, h: &[f32], scratch: &'a mut [f32]) -> &'a [f32] {
    let rows = h.len() / gate.v.rows();
    let t = &mut scratch[..rows * gate.v.columns()];
    let h = MatrixView::new(h, rows, gate.v.rows());
    let view = MatrixViewMut::new(t, rows, gate.v.columns());
    matmul(h.into(), gate.v.into(), view, 1.0, WriteMode::Replace);
    t
}

/// g (+)= Uᵀ·T.
struct MultiplyUTransposed;

impl SimdBody<(TensorGate<'_>, &[f32], &mut [f32], WriteMode)> for MultiplyUTransposed {
    #[inline(always)]
    fn run<S: Simd>((gate, t, g, write): (TensorGate<'_>, &[f32], &mut [f32], WriteMode)) {
        let n = gate.v.columns();
        if write == WriteMode::Replace {
            g.fill(0.0);
        }
        let g_tokens = g.chunks_exact_mut(gate.output_features());
        for (t, g) in t.chunks_exact(gate.t_elements()).zip(g_tokens) {
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

/// Outputs of [`tensor_gate_backward`], all contiguous.
pub struct TensorGateGradients<'a> {
    /// Gradient of h, `[tokens, a·b]`.
    pub dh: &'a mut [f32],
    /// Mode in which `dh` is written.
    pub write: WriteMode,
    /// Gradient of U, `[a, m]`; added to.
    pub du: &'a mut [f32],
    /// Gradient of V, `[b, n]`; added to.
    pub dv: &'a mut [f32],
}

/// Gradients of h, U and V. `scratch` holds [`TensorGate::scratch_elements`].
pub fn tensor_gate_backward(
    tokens: usize,
    gate: TensorGate<'_>,
    (h, dg): (&[f32], &[f32]),
    gradients: TensorGateGradients<'_>,
    scratch: &mut [f32],
    parallel: Parallel,
) {
    let TensorGateGradients { dh, write, du, dv } = gradients;
    gate.check(tokens, h.len(), dg.len());
    gate.check(tokens, dh.len(), dg.len());
    assert!(du.len() == gate.u.rows() * gate.u.columns());
    assert!(dv.len() == gate.v.rows() * gate.v.columns());
    let elements_per_task = 2 * TILE_TOKENS * gate.t_elements();
    let (tiles, scratch) = scratch.split_at_mut(parallel.threads() * elements_per_task);
    let (u_scratch, v_scratch) =
        scratch.split_at_mut(parallel.reduction_scratch_elements(du.len()));
    let tokens_of = (
        GroupedRows { group_size: gate.input_features(), operand: h },
        GroupedRows { group_size: gate.output_features(), operand: dg },
        GroupedRows { group_size: gate.input_features(), operand: dh },
    );
    let sums = (
        TaskPartialSums::new(du, u_scratch, parallel),
        TaskPartialSums::new(dv, v_scratch, parallel),
    );
    let tiles = TaskScratch { elements_per_task, memory: tiles };
    let operands = (tokens_of, SharedOperand(gate), SharedOperand(write), tiles, sums);
    let tasks = parallel.for_rows::<BackwardTokens, _>(tokens, operands);
    reduce_partial_sums(du, u_scratch, tasks);
    reduce_partial_sums(dv, v_scratch, tasks);
}

/// h, dg and dh.
type BackwardTokenOperands<'a> =
    (GroupedRows<&'a [f32]>, GroupedRows<&'a [f32]>, GroupedRows<&'a mut [f32]>);
type TensorGateBackwardOperands<'a> = (
    BackwardTokenOperands<'a>,
    SharedOperand<TensorGate<'a>>,
    SharedOperand<WriteMode>,
    TaskScratch<'a>,
    (TaskPartialSums<'a>, TaskPartialSums<'a>),
);

struct BackwardTokens;

impl SimdBody<TensorGateBackwardOperands<'_>> for BackwardTokens {
    #[inline(always)]
    fn run<S: Simd>(
        ((h, dg, dh), SharedOperand(gate), SharedOperand(write), scratch, (du, dv)): TensorGateBackwardOperands<'_>,
    ) {
        let (b, n) = (gate.v.rows(), gate.v.columns());
        let (t_scratch, dt_scratch) = scratch.memory.split_at_mut(TILE_TOKENS * gate.t_elements());
        let h_tiles = h.operand.chunks(TILE_TOKENS * gate.input_features());
        let dg_tiles = dg.operand.chunks(TILE_TOKENS * gate.output_features());
        let dh_tiles = dh.operand.chunks_mut(TILE_TOKENS * gate.input_features());
        for ((h, dg), dh) in h_tiles.zip(dg_tiles).zip(dh_tiles) {
            let t = multiply_v(gate, h, t_scratch);
            let rows = h.len() / b;
            let dt = &mut dt_scratch[..rows * n];
            dispatch_simd::<MultiplyUBackward, _>((gate, t, dg, &mut *dt, &mut *du.sums));
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
struct MultiplyUBackward;

impl SimdBody<(TensorGate<'_>, &[f32], &[f32], &mut [f32], &mut [f32])> for MultiplyUBackward {
    #[inline(always)]
    fn run<S: Simd>(
        (gate, t, dg, dt, du): (TensorGate<'_>, &[f32], &[f32], &mut [f32], &mut [f32]),
    ) {
        let (m, n) = (gate.u.columns(), gate.v.columns());
        dt.fill(0.0);
        let tokens = t.chunks_exact(gate.t_elements()).zip(dt.chunks_exact_mut(gate.t_elements()));
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
    use crate::kernels::testing::{assert_close, finite_difference, random, weighted_sum, widen};

    const A: usize = 4;
    const B: usize = 6;
    const M: usize = 3;
    const N: usize = 5;

    /// g by definition in f64.
    fn reference(h: &[f64], u: &[f64], v: &[f64]) -> Vec<f64> {
        let entry = |h: &[f64], k: usize| -> f64 {
            let (row, column) = (k / N, k % N);
            let term = |i: usize, j: usize| u[i * M + row] * h[i * B + j] * v[j * N + column];
            (0..A).flat_map(|i| (0..B).map(move |j| (i, j))).map(|(i, j)| term(i, j)).sum()
        };
        h.chunks(A * B).flat_map(|h| (0..M * N).map(|k| entry(h, k)).collect::<Vec<_>>()).collect()
    }

    #[test]
    fn backward_is_the_derivative_of_forward() {
        let tokens = 21;
        let (h, dg) = (random(1, tokens * A * B), random(2, tokens * M * N));
        let (u, v) = (random(3, A * M), random(4, B * N));
        let gate = TensorGate { u: MatrixView::new(&u, A, M), v: MatrixView::new(&v, B, N) };
        let (h64, u64, v64) = (widen(&h), widen(&u), widen(&v));
        for (write, offset) in [(WriteMode::Replace, 0.0), (WriteMode::Add, 0.5)] {
            let shifted =
                |x: Vec<f64>, offset: f64| x.iter().map(|x| x + offset).collect::<Vec<_>>();
            let mut scratch = vec![f32::NAN; gate.scratch_elements(Parallel::SERIAL)];
            let mut g = vec![0.5; tokens * M * N];
            tensor_gate_forward(tokens, gate, &h, &mut g, write, &mut scratch, Parallel::SERIAL);
            assert_close(&g, &shifted(reference(&h64, &u64, &v64), offset), 1e-6);
            let (mut dh, mut du, mut dv) =
                (vec![0.5; h.len()], vec![0.25; u.len()], vec![0.25; v.len()]);
            let gradients = TensorGateGradients { dh: &mut dh, write, du: &mut du, dv: &mut dv };
            tensor_gate_backward(
                tokens,
                gate,
                (&h, &dg),
                gradients,
                &mut scratch,
                Parallel::SERIAL,
            );
            let expected_dh =
                finite_difference(&h64, |h| weighted_sum(&reference(h, &u64, &v64), &dg));
            let expected_du =
                finite_difference(&u64, |u| weighted_sum(&reference(&h64, u, &v64), &dg));
            let expected_dv =
                finite_difference(&v64, |v| weighted_sum(&reference(&h64, &u64, v), &dg));
            assert_close(&dh, &shifted(expected_dh, offset), 1e-6);
            assert_close(&du, &shifted(expected_du, 0.25), 2e-6);
            assert_close(&dv, &shifted(expected_dv, 0.25), 2e-6);
        }
    }

    #[test]
    fn threads_only_change_rounding() {
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
            let gradients = TensorGateGradients {
                dh: &mut dh,
                write: WriteMode::Replace,
                du: &mut du,
                dv: &mut dv,
            };
            tensor_gate_backward(tokens, gate, (&h, &dg), gradients, &mut scratch, parallel);
            [g, dh, du, dv]
        };
        let serial = run(1);
        for threads in [2, 3] {
            for (parallel, serial) in run(threads).iter().zip(&serial) {
                assert_close(parallel, &widen(serial), 2e-6);
            }
        }
    }
}
