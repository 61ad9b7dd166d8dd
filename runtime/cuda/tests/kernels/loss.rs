//! Cross-entropy.

use narrows_cpu::kernels::{
    MatrixView, MatrixViewMut, Parallel, ReducedStatistics, loss_gradient, loss_maximum, loss_sum,
};
use narrows_plan::DType;
use narrows_plan::program::FusedOp;
use narrows_runtime::IGNORED_TARGET;

use super::case::KernelCase;
use super::formats::{assert_near, random_values, rounded};

const FORMATS: [DType; 2] = [DType::Bf16, DType::F32];
const SERIAL: Parallel = Parallel::SERIAL;
const VOCABULARY: u64 = 40;

#[test]
fn losses_match_the_cpu() {
    for (rows, local, device) in [(1, 40, 0), (6, 20, 1), (13, 8, 4), (3, 2056, 0), (300, 2, 0)] {
        let vocabulary = if local == 2056 { 2056 } else { VOCABULARY };
        let first = (device * local) as usize;
        let mut targets: Vec<u32> = random_values(5, rows)
            .iter()
            .map(|x| ((x + 1.0) / 2.0 * vocabulary as f32) as u32)
            .collect();
        targets.iter_mut().skip(1).step_by(3).for_each(|target| *target = IGNORED_TARGET);
        for dtype in FORMATS {
            let scaled = random_values(1, rows * local).into_iter().map(|x| 8.0 * x).collect();
            let logits = rounded(dtype, scaled);
            let view = MatrixView::new(&logits, rows as usize, local as usize);
            let (mut maximum, mut packed) =
                (vec![0.0; rows as usize], vec![0.0; 2 * rows as usize]);
            loss_maximum(view, &mut maximum, SERIAL);
            loss_sum(view, &maximum, &targets, first, &mut packed, SERIAL);
            let start = |op| {
                let mut case = KernelCase::new(op, vocabulary / local, (1, rows));
                (case.tensor, case.constants.vocab) = (device, vocabulary);
                let logits_buffer = case.buffer((rows, local), dtype, Some(&logits));
                (case, logits_buffer)
            };
            let (mut case, logits_buffer) = start(FusedOp::LossMaximum);
            let result = case.buffer((rows, 1), DType::F32, None);
            case.reads(&[logits_buffer]).writes(&[result]);
            let Some(outcome) = case.run() else { return };
            assert_eq!(outcome.elements(result), maximum);

            let (mut case, logits_buffer) = start(FusedOp::LossSum);
            let reads = [
                logits_buffer,
                case.buffer((rows, 1), DType::F32, Some(&maximum)),
                case.token_ids(&targets),
            ];
            let result = case.buffer((rows, 2), DType::F32, None);
            case.reads(&reads).writes(&[result]);
            let Some(outcome) = case.run() else { return };
            assert_near(DType::F32, &outcome.elements(result), &packed, 2e-6);

            // As if other devices had contributed to the sums.
            packed.chunks_exact_mut(2).for_each(|packed| packed[0] += 0.5);
            let (mut case, logits_buffer) = start(FusedOp::LossGradient);
            let reads = [
                logits_buffer,
                case.buffer((rows, 1), DType::F32, Some(&maximum)),
                case.buffer((rows, 2), DType::F32, Some(&packed)),
                case.token_ids(&targets),
            ];
            let mean = case.buffer((1, 1), DType::F32, None);
            case.reads(&reads).writes(&[logits_buffer, mean]);
            let Some(outcome) = case.run() else { return };
            let mut expected = logits;
            let reduced = ReducedStatistics {
                maximum: &maximum,
                packed: &packed,
                targets: &targets,
                first_id: first,
                factor: (1.0 / rows as f64) as f32,
            };
            let result = MatrixViewMut::new(&mut expected, rows as usize, local as usize);
            let loss_sum = loss_gradient(result, reduced, SERIAL);
            // A gradient near 1 − factor has the rounding error of the larger of the two terms.
            assert_near(dtype, &outcome.elements(logits_buffer), &expected, 2e-6);
            assert_near(DType::F32, &outcome.elements(mean), &[loss_sum as f32], 1e-6);
            assert!((outcome.loss - 1.0 - loss_sum).abs() < 1e-12 * loss_sum.abs().max(1.0));
        }
    }
}
