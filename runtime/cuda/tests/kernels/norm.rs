//! RMSNorm in its variants.

use narrows_cpu::kernels::{
    MatrixView, MatrixViewMut, Parallel, RmsNorm, RmsNormGradients, RmsNormSaved, WriteMode,
    rms_norm_apply, rms_norm_backward, rms_norm_backward_apply, rms_norm_backward_statistic,
    rms_norm_forward, rms_norm_online, rms_norm_online_backward, rms_norm_scale,
    rms_norm_statistic,
};
use narrows_plan::DType;
use narrows_plan::program::FusedOp;

use super::case::Case;
use super::numbers::{assert_near, random, rounded};

/// Rows and columns: a warp a row, several warps, several rounds, ragged in every way.
const SHAPES: [(u64, u64); 7] =
    [(1, 1), (5, 8), (9, 100), (33, 256), (3, 1030), (40, 520), (2, 4104)];
const FORMATS: [DType; 2] = [DType::Bf16, DType::F32];
const SERIAL: Parallel = Parallel::SERIAL;

struct Operands {
    shape: (u64, u64),
    x: Vec<f32>,
    dy: Vec<f32>,
    scale: Vec<f32>,
    /// s, and something for t and ds.
    s: Vec<f32>,
    t: Vec<f32>,
    before: (Vec<f32>, Vec<f32>),
    rms: RmsNorm,
}

impl Operands {
    fn new(shape: (u64, u64), dtype: DType) -> Operands {
        let (rows, columns) = shape;
        let numbers = |seed, count| rounded(dtype, random(seed, count));
        let x = numbers(1, rows * columns);
        let s = x.chunks(columns as usize).map(|x| x.iter().map(|x| x * x).sum()).collect();
        Operands {
            shape,
            x,
            dy: numbers(2, rows * columns),
            scale: numbers(3, columns),
            s,
            t: random(4, rows),
            before: (numbers(5, rows * columns), random(6, columns)),
            rms: RmsNorm { width: 2 * columns as usize, epsilon: 1e-5 },
        }
    }

    fn case(&self, op: FusedOp) -> Case {
        let mut case = Case::new(op, 1, (1, self.shape.0));
        case.constants.hidden = self.rms.width as u64;
        case
    }

    fn view<'a>(&self, numbers: &'a [f32]) -> MatrixView<'a> {
        MatrixView::new(numbers, self.shape.0 as usize, self.shape.1 as usize)
    }

    fn view_mut<'a>(&self, numbers: &'a mut [f32]) -> MatrixViewMut<'a> {
        MatrixViewMut::new(numbers, self.shape.0 as usize, self.shape.1 as usize)
    }
}

#[test]
fn forward_is_the_processors() {
    use FusedOp::*;
    for (shape, dtype) in SHAPES.into_iter().flat_map(|shape| FORMATS.map(|dtype| (shape, dtype))) {
        let of = Operands::new(shape, dtype);
        for op in [NormForward, NormStatistic, NormApply, NormOnline, NormScale] {
            let mut case = of.case(op);
            let x = case.buffer(shape, dtype, Some(&of.x));
            let scale = case.buffer((1, shape.1), dtype, Some(&of.scale));
            let given = case.buffer((shape.0, 1), DType::F32, Some(&of.s));
            let s = case.buffer((shape.0, 1), DType::F32, None);
            let y = case.buffer(shape, dtype, None);
            let (mut wanted, mut sums) = (vec![0.0; of.x.len()], vec![0.0; of.s.len()]);
            let (view, made) = (of.view(&of.x), of.view_mut(&mut wanted));
            match op {
                NormForward => {
                    case.reads(&[x, scale]).writes(&[y, s]);
                    rms_norm_forward(view, &of.scale, of.rms, made, &mut sums, SERIAL);
                }
                NormStatistic => {
                    case.reads(&[x]).writes(&[s]);
                    rms_norm_statistic(view, &mut sums, SERIAL);
                }
                NormApply => {
                    case.reads(&[x, scale, given]).writes(&[y]);
                    rms_norm_apply(view, &of.scale, &of.s, of.rms, made, SERIAL);
                }
                NormOnline => {
                    case.reads(&[x, scale]).writes(&[y, s]);
                    rms_norm_online(view, &of.scale, made, &mut sums, SERIAL);
                }
                _ => {
                    case.reads(&[x, scale]).writes(&[y]);
                    rms_norm_scale(view, &of.scale, made, SERIAL);
                }
            }
            let Some(outcome) = case.run() else { return };
            if op != NormStatistic {
                assert_near(dtype, &outcome.numbers(y), &wanted, 1e-6);
            }
            if matches!(op, NormForward | NormStatistic | NormOnline) {
                assert_near(DType::F32, &outcome.numbers(s), &sums, 1e-6);
            }
        }
    }
}

#[test]
fn backward_is_the_processors() {
    use FusedOp::*;
    for (shape, dtype) in SHAPES.into_iter().flat_map(|shape| FORMATS.map(|dtype| (shape, dtype))) {
        let of = Operands::new(shape, dtype);
        let operators = [NormBackward, NormBackwardApply, NormOnlineBackward];
        for (op, add) in operators.into_iter().flat_map(|op| [(op, false), (op, true)]) {
            let mut case = of.case(op);
            let dy = case.buffer(shape, dtype, Some(&of.dy));
            let x = case.buffer(shape, dtype, Some(&of.x));
            let scale = case.buffer((1, shape.1), dtype, Some(&of.scale));
            let s = case.buffer((shape.0, 1), DType::F32, Some(&of.s));
            let t = case.buffer((shape.0, 1), DType::F32, Some(&of.t));
            let dx = case.buffer(shape, dtype, add.then_some(&of.before.0[..]));
            let dscale = case.buffer((1, shape.1), DType::F32, Some(&of.before.1));
            let (mut wanted, mut sums) = of.before.clone();
            let write = if add { WriteMode::Add } else { WriteMode::Replace };
            let saved = RmsNormSaved { dy: of.view(&of.dy), x: of.view(&of.x), scale: &of.scale };
            let dx_made = of.view_mut(&mut wanted);
            let made = RmsNormGradients { dx: dx_made, write, dscale: &mut sums, scratch: &mut [] };
            let mut reads = vec![dy, x, scale];
            match op {
                NormBackward => {
                    reads.push(s);
                    rms_norm_backward(saved, &of.s, of.rms, made, SERIAL);
                }
                NormBackwardApply => {
                    reads.extend([s, t]);
                    rms_norm_backward_apply(saved, &of.s, &of.t, of.rms, made, SERIAL);
                }
                _ => {
                    reads.push(t);
                    rms_norm_online_backward(saved, &of.t, made, SERIAL);
                }
            }
            reads.push(dscale);
            reads.extend(add.then_some(dx));
            case.reads(&reads).writes(&[dx, dscale]);
            let Some(outcome) = case.run() else { return };
            assert_near(dtype, &outcome.numbers(dx), &wanted, 1e-6);
            assert_near(DType::F32, &outcome.numbers(dscale), &sums, 1e-6);
        }
        let mut case = of.case(NormBackwardStatistic);
        let dy = case.buffer(shape, dtype, Some(&of.dy));
        let x = case.buffer(shape, dtype, Some(&of.x));
        let scale = case.buffer((1, shape.1), dtype, Some(&of.scale));
        let t = case.buffer((shape.0, 1), DType::F32, None);
        case.reads(&[dy, x, scale]).writes(&[t]);
        let mut wanted = vec![0.0; of.t.len()];
        let saved = RmsNormSaved { dy: of.view(&of.dy), x: of.view(&of.x), scale: &of.scale };
        rms_norm_backward_statistic(saved, &mut wanted, SERIAL);
        let Some(outcome) = case.run() else { return };
        assert_near(DType::F32, &outcome.numbers(t), &wanted, 1e-6);
    }
}
