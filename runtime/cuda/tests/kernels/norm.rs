//! RMSNorm in its variants.

use narrows_cpu::kernels::{
    MatrixView, MatrixViewMut, Parallel, RmsNorm, RmsNormGradients, RmsNormSaved, WriteMode,
    rms_norm_apply, rms_norm_backward, rms_norm_backward_apply, rms_norm_backward_statistic,
    rms_norm_forward, rms_norm_online, rms_norm_online_backward, rms_norm_scale,
    rms_norm_statistic,
};
use narrows_plan::DType;
use narrows_plan::program::FusedOp;

use super::case::KernelCase;
use super::formats::{assert_near, random_values, rounded};

/// Rows and columns: one warp per row, several warps, several rounds, and ragged tails.
const SHAPES: [(u64, u64); 7] =
    [(1, 1), (5, 8), (9, 100), (33, 256), (3, 1030), (40, 520), (2, 4104)];
const FORMATS: [DType; 2] = [DType::Bf16, DType::F32];
const SERIAL: Parallel = Parallel::SERIAL;

struct NormOperands {
    shape: (u64, u64),
    x: Vec<f32>,
    dy: Vec<f32>,
    scale: Vec<f32>,
    /// The statistic s, and random values for t and ds.
    s: Vec<f32>,
    t: Vec<f32>,
    before: (Vec<f32>, Vec<f32>),
    rms: RmsNorm,
}

impl NormOperands {
    fn new(shape: (u64, u64), dtype: DType) -> NormOperands {
        let (rows, columns) = shape;
        let values = |seed, count| rounded(dtype, random_values(seed, count));
        let x = values(1, rows * columns);
        let s = x.chunks(columns as usize).map(|x| x.iter().map(|x| x * x).sum()).collect();
        NormOperands {
            shape,
            x,
            dy: values(2, rows * columns),
            scale: values(3, columns),
            s,
            t: random_values(4, rows),
            before: (values(5, rows * columns), random_values(6, columns)),
            rms: RmsNorm { width: 2 * columns as usize, epsilon: 1e-5 },
        }
    }

    fn case(&self, op: FusedOp) -> KernelCase {
        let mut case = KernelCase::new(op, 1, (1, self.shape.0));
        case.constants.hidden = self.rms.width as u64;
        case
    }

    fn view<'a>(&self, values: &'a [f32]) -> MatrixView<'a> {
        MatrixView::new(values, self.shape.0 as usize, self.shape.1 as usize)
    }

    fn view_mut<'a>(&self, values: &'a mut [f32]) -> MatrixViewMut<'a> {
        MatrixViewMut::new(values, self.shape.0 as usize, self.shape.1 as usize)
    }
}

#[test]
fn forward_matches_the_cpu() {
    use FusedOp::*;
    for (shape, dtype) in SHAPES.into_iter().flat_map(|shape| FORMATS.map(|dtype| (shape, dtype))) {
        let operands = NormOperands::new(shape, dtype);
        for op in [NormForward, NormStatistic, NormApply, NormOnline, NormScale] {
            let mut case = operands.case(op);
            let x = case.buffer(shape, dtype, Some(&operands.x));
            let scale = case.buffer((1, shape.1), dtype, Some(&operands.scale));
            let known_s = case.buffer((shape.0, 1), DType::F32, Some(&operands.s));
            let s = case.buffer((shape.0, 1), DType::F32, None);
            let y = case.buffer(shape, dtype, None);
            let (mut expected, mut sums) =
                (vec![0.0; operands.x.len()], vec![0.0; operands.s.len()]);
            let (view, result) = (operands.view(&operands.x), operands.view_mut(&mut expected));
            match op {
                NormForward => {
                    case.reads(&[x, scale]).writes(&[y, s]);
                    rms_norm_forward(
                        view,
                        &operands.scale,
                        operands.rms,
                        result,
                        &mut sums,
                        SERIAL,
                    );
                }
                NormStatistic => {
                    case.reads(&[x]).writes(&[s]);
                    rms_norm_statistic(view, &mut sums, SERIAL);
                }
                NormApply => {
                    case.reads(&[x, scale, known_s]).writes(&[y]);
                    rms_norm_apply(
                        view,
                        &operands.scale,
                        &operands.s,
                        operands.rms,
                        result,
                        SERIAL,
                    );
                }
                NormOnline => {
                    case.reads(&[x, scale]).writes(&[y, s]);
                    rms_norm_online(view, &operands.scale, result, &mut sums, SERIAL);
                }
                _ => {
                    case.reads(&[x, scale]).writes(&[y]);
                    rms_norm_scale(view, &operands.scale, result, SERIAL);
                }
            }
            let Some(outcome) = case.run() else { return };
            if op != NormStatistic {
                assert_near(dtype, &outcome.elements(y), &expected, 1e-6);
            }
            if matches!(op, NormForward | NormStatistic | NormOnline) {
                assert_near(DType::F32, &outcome.elements(s), &sums, 1e-6);
            }
        }
    }
}

#[test]
fn backward_matches_the_cpu() {
    use FusedOp::*;
    for (shape, dtype) in SHAPES.into_iter().flat_map(|shape| FORMATS.map(|dtype| (shape, dtype))) {
        let operands = NormOperands::new(shape, dtype);
        let operators = [NormBackward, NormBackwardApply, NormOnlineBackward];
        for (op, add) in operators.into_iter().flat_map(|op| [(op, false), (op, true)]) {
            let mut case = operands.case(op);
            let dy = case.buffer(shape, dtype, Some(&operands.dy));
            let x = case.buffer(shape, dtype, Some(&operands.x));
            let scale = case.buffer((1, shape.1), dtype, Some(&operands.scale));
            let s = case.buffer((shape.0, 1), DType::F32, Some(&operands.s));
            let t = case.buffer((shape.0, 1), DType::F32, Some(&operands.t));
            let dx = case.buffer(shape, dtype, add.then_some(&operands.before.0[..]));
            let dscale = case.buffer((1, shape.1), DType::F32, Some(&operands.before.1));
            let (mut expected, mut sums) = operands.before.clone();
            let write = if add { WriteMode::Add } else { WriteMode::Replace };
            let saved = RmsNormSaved {
                dy: operands.view(&operands.dy),
                x: operands.view(&operands.x),
                scale: &operands.scale,
            };
            let dx_result = operands.view_mut(&mut expected);
            let gradients =
                RmsNormGradients { dx: dx_result, write, dscale: &mut sums, scratch: &mut [] };
            let mut reads = vec![dy, x, scale];
            match op {
                NormBackward => {
                    reads.push(s);
                    rms_norm_backward(saved, &operands.s, operands.rms, gradients, SERIAL);
                }
                NormBackwardApply => {
                    reads.extend([s, t]);
                    rms_norm_backward_apply(
                        saved,
                        &operands.s,
                        &operands.t,
                        operands.rms,
                        gradients,
                        SERIAL,
                    );
                }
                _ => {
                    reads.push(t);
                    rms_norm_online_backward(saved, &operands.t, gradients, SERIAL);
                }
            }
            reads.push(dscale);
            reads.extend(add.then_some(dx));
            case.reads(&reads).writes(&[dx, dscale]);
            let Some(outcome) = case.run() else { return };
            assert_near(dtype, &outcome.elements(dx), &expected, 1e-6);
            assert_near(DType::F32, &outcome.elements(dscale), &sums, 1e-6);
        }
        let mut case = operands.case(NormBackwardStatistic);
        let dy = case.buffer(shape, dtype, Some(&operands.dy));
        let x = case.buffer(shape, dtype, Some(&operands.x));
        let scale = case.buffer((1, shape.1), dtype, Some(&operands.scale));
        let t = case.buffer((shape.0, 1), DType::F32, None);
        case.reads(&[dy, x, scale]).writes(&[t]);
        let mut expected = vec![0.0; operands.t.len()];
        let saved = RmsNormSaved {
            dy: operands.view(&operands.dy),
            x: operands.view(&operands.x),
            scale: &operands.scale,
        };
        rms_norm_backward_statistic(saved, &mut expected, SERIAL);
        let Some(outcome) = case.run() else { return };
        assert_near(DType::F32, &outcome.elements(t), &expected, 1e-6);
    }
}
