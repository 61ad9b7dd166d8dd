//! Gated product of gate and up.

use narrows_cpu::kernels::{
    MatrixView, MatrixViewMut, Parallel, gated_product_backward, gated_product_forward,
};
use narrows_plan::DType;
use narrows_plan::model::GatedProduct;
use narrows_plan::program::FusedOp;

use super::case::KernelCase;
use super::formats::{assert_near, random_values, rounded};

const SHAPES: [(usize, usize); 6] = [(1, 1), (5, 33), (9, 64), (3, 688), (2, 2056), (17, 100)];
const SERIAL: Parallel = Parallel::SERIAL;

#[test]
fn gated_products_match_the_cpu() {
    let formats = [DType::Bf16, DType::F32];
    let products = GatedProduct::ALL;
    let kinds = || formats.into_iter().flat_map(|dtype| products.map(|product| (dtype, product)));
    for ((rows, width), (dtype, product)) in
        SHAPES.into_iter().flat_map(|shape| kinds().map(move |kind| (shape, kind)))
    {
        let values = |seed, count: usize| {
            rounded(dtype, random_values(seed, count as u64).into_iter().map(|x| 4.0 * x).collect())
        };
        let (both, dy) = (values(1, 2 * rows * width), values(2, rows * width));
        let whole = MatrixView::new(&both, rows, 2 * width);
        let (gate, up) = (whole.column_range(0, width), whole.column_range(width, width));
        let mut y = vec![0.0; rows * width];
        gated_product_forward(gate, up, product, MatrixViewMut::new(&mut y, rows, width), SERIAL);
        let mut gradients = both.clone();
        let (gate, up) = MatrixViewMut::new(&mut gradients, rows, 2 * width).split_columns(width);
        gated_product_backward(MatrixView::new(&dy, rows, width), product, gate, up, SERIAL);

        let columns = |of: &[f32], first: usize| -> Vec<f32> {
            of.chunks(2 * width).flat_map(|row| row[first..first + width].to_vec()).collect()
        };
        let (one, two) = ((rows as u64, width as u64), (rows as u64, 2 * width as u64));
        for separate in [false, true] {
            let mut case = KernelCase::new(FusedOp::GatedProduct { product }, 1, (1, one.0));
            let reads = if separate {
                let halves = [columns(&both, 0), columns(&both, width)];
                halves.iter().map(|half| case.buffer(one, dtype, Some(half))).collect()
            } else {
                vec![case.buffer(two, dtype, Some(&both))]
            };
            let result = case.buffer(one, dtype, None);
            case.reads(&reads).writes(&[result]);
            let Some(outcome) = case.run() else { return };
            assert_near(dtype, &outcome.elements(result), &y, 1e-6);

            let op = FusedOp::GatedProductBackward { product };
            let expected = if separate {
                vec![columns(&gradients, 0), columns(&gradients, width)]
            } else {
                vec![gradients.clone()]
            };
            for in_place in [false, true] {
                let mut case = KernelCase::new(op, 1, (1, one.0));
                let mut reads = vec![case.buffer(one, dtype, Some(&dy))];
                if separate {
                    let halves = [columns(&both, 0), columns(&both, width)];
                    reads.extend(halves.iter().map(|half| case.buffer(one, dtype, Some(half))));
                } else {
                    reads.push(case.buffer(two, dtype, Some(&both)));
                }
                let shapes = if separate { vec![one; 2] } else { vec![two] };
                let writes: Vec<_> = match in_place {
                    true => reads[1..].to_vec(),
                    false => {
                        shapes.into_iter().map(|shape| case.buffer(shape, dtype, None)).collect()
                    }
                };
                case.reads(&reads).writes(&writes);
                let Some(outcome) = case.run() else { return };
                for (result, expected) in writes.iter().zip(&expected) {
                    assert_near(dtype, &outcome.elements(*result), expected, 1e-6);
                }
            }
        }
    }
}
