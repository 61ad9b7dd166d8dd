//! The embedding and the loss.

use narrows_cpu::kernels::{
    MatrixView, MatrixViewMut, Parallel, ReducedStatistics, embedding_gather,
    embedding_scatter_add, loss_gradient, loss_maximum, loss_sum,
};
use narrows_plan::DType;
use narrows_plan::program::FusedOp;

use super::case::Case;
use super::numbers::{assert_near, random, rounded};

const FORMATS: [DType; 2] = [DType::Bf16, DType::F32];
const SERIAL: Parallel = Parallel::SERIAL;
const VOCABULARY: u64 = 40;

fn tokens(count: u64) -> Vec<u32> {
    // Some often, some never.
    random(7, count).iter().map(|x| (x * x * VOCABULARY as f32) as u32).collect()
}

/// Tokens, columns, and the part of the vocabulary that is held.
const TABLES: [(u64, u64, u64, u64); 5] =
    [(1, 1, 40, 0), (7, 64, 40, 0), (300, 33, 20, 1), (1500, 24, 10, 2), (20, 2056, 10, 0)];

#[test]
fn embeddings_are_the_processors() {
    for (count, columns, held, device) in TABLES {
        let ids = tokens(count);
        let first = (device * held) as usize;
        let [rows, width, table_rows] = [count, columns, held].map(|size| size as usize);
        for dtype in FORMATS {
            let table = rounded(dtype, random(1, held * columns));
            let mut case = Case::new(FusedOp::Gather, VOCABULARY / held, (1, count));
            (case.tensor, case.constants.vocab) = (device, VOCABULARY);
            let reads = [case.ids(&ids), case.buffer((held, columns), dtype, Some(&table))];
            let out = case.buffer((count, columns), dtype, None);
            case.reads(&reads).writes(&[out]);
            let Some(outcome) = case.run() else { return };
            let mut wanted = vec![0.0; rows * width];
            let view = MatrixView::new(&table, table_rows, width);
            let made = MatrixViewMut::new(&mut wanted, rows, width);
            embedding_gather(&ids, view, first, made, SERIAL);
            assert_eq!(outcome.numbers(out), wanted);

            let (dy, before) =
                (rounded(dtype, random(2, count * columns)), random(3, held * columns));
            let mut case = Case::new(FusedOp::ScatterAdd, VOCABULARY / held, (1, count));
            (case.tensor, case.constants.vocab) = (device, VOCABULARY);
            let ids_buffer = case.ids(&ids);
            let sum = case.buffer((held, columns), DType::F32, Some(&before));
            let dy_buffer = case.buffer((count, columns), dtype, Some(&dy));
            case.reads(&[ids_buffer, sum, dy_buffer]).writes(&[sum]);
            let Some(outcome) = case.run() else { return };
            let mut wanted = before;
            let made = MatrixViewMut::new(&mut wanted, table_rows, width);
            embedding_scatter_add(&ids, MatrixView::new(&dy, rows, width), first, made, SERIAL);
            assert_near(DType::F32, &outcome.numbers(sum), &wanted, 2e-6);
        }
    }
}

#[test]
fn losses_are_the_processors() {
    for (rows, held, device) in [(1, 40, 0), (6, 20, 1), (13, 8, 4), (3, 2056, 0), (300, 2, 0)] {
        let vocabulary = if held == 2056 { 2056 } else { VOCABULARY };
        let first = (device * held) as usize;
        let targets: Vec<u32> =
            random(5, rows).iter().map(|x| ((x + 1.0) / 2.0 * vocabulary as f32) as u32).collect();
        for dtype in FORMATS {
            let scaled = random(1, rows * held).into_iter().map(|x| 8.0 * x).collect();
            let logits = rounded(dtype, scaled);
            let view = MatrixView::new(&logits, rows as usize, held as usize);
            let (mut maximum, mut packed) =
                (vec![0.0; rows as usize], vec![0.0; 2 * rows as usize]);
            loss_maximum(view, &mut maximum, SERIAL);
            loss_sum(view, &maximum, &targets, first, &mut packed, SERIAL);
            let start = |op| {
                let mut case = Case::new(op, vocabulary / held, (1, rows));
                (case.tensor, case.constants.vocab) = (device, vocabulary);
                let of = case.buffer((rows, held), dtype, Some(&logits));
                (case, of)
            };
            let (mut case, of) = start(FusedOp::LossMaximum);
            let made = case.buffer((rows, 1), DType::F32, None);
            case.reads(&[of]).writes(&[made]);
            let Some(outcome) = case.run() else { return };
            assert_eq!(outcome.numbers(made), maximum);

            let (mut case, of) = start(FusedOp::LossSum);
            let reads =
                [of, case.buffer((rows, 1), DType::F32, Some(&maximum)), case.ids(&targets)];
            let made = case.buffer((rows, 2), DType::F32, None);
            case.reads(&reads).writes(&[made]);
            let Some(outcome) = case.run() else { return };
            assert_near(DType::F32, &outcome.numbers(made), &packed, 2e-6);

            // As if other devices had added to the sums.
            packed.chunks_exact_mut(2).for_each(|packed| packed[0] += 0.5);
            let (mut case, of) = start(FusedOp::LossGradient);
            let reads = [
                of,
                case.buffer((rows, 1), DType::F32, Some(&maximum)),
                case.buffer((rows, 2), DType::F32, Some(&packed)),
                case.ids(&targets),
            ];
            let mean = case.buffer((1, 1), DType::F32, None);
            case.reads(&reads).writes(&[of, mean]);
            let Some(outcome) = case.run() else { return };
            let mut wanted = logits;
            let reduced = ReducedStatistics {
                maximum: &maximum,
                packed: &packed,
                targets: &targets,
                first_id: first,
                factor: (1.0 / rows as f64) as f32,
            };
            let made = MatrixViewMut::new(&mut wanted, rows as usize, held as usize);
            let here = loss_gradient(made, reduced, SERIAL);
            // A gradient near 1 − factor loses as much as rounding the larger of the two does.
            assert_near(dtype, &outcome.numbers(of), &wanted, 2e-6);
            assert_near(DType::F32, &outcome.numbers(mean), &[here as f32], 1e-6);
            assert!((outcome.loss - 1.0 - here).abs() < 1e-12 * here.abs().max(1.0));
        }
    }
}
