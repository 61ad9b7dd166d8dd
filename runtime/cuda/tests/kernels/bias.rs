//! Biases and their gradients.

use narrows_cpu::kernels::{MatrixView, MatrixViewMut, Parallel, bias_backward, bias_forward};
use narrows_plan::DType;
use narrows_plan::program::FusedOp;

use super::case::KernelCase;
use super::formats::{assert_near, random_values, rounded};

#[test]
fn biases_match_the_cpu() {
    let shapes = [(1, 2), (1, 12), (9, 33), (300, 64), (40, 256), (3, 2056)];
    for ((rows, columns), dtype) in
        shapes.into_iter().flat_map(|shape| [(shape, DType::Bf16), (shape, DType::F32)])
    {
        let x = rounded(dtype, random_values(1, rows * columns));
        let bias = rounded(dtype, random_values(2, columns));
        let (shape, sides) = ((rows, columns), (rows as usize, columns as usize));
        let of_x = MatrixView::new(&x, sides.0, sides.1);

        let mut case = KernelCase::new(FusedOp::Bias, 1, (1, rows));
        let reads = [(shape, &x), ((1, columns), &bias)]
            .map(|(shape, values)| case.buffer(shape, dtype, Some(values)));
        let y = case.buffer(shape, dtype, None);
        case.reads(&reads).writes(&[y]);
        let Some(outcome) = case.run() else { return };
        let mut expected = vec![0.0; x.len()];
        let output = MatrixViewMut::new(&mut expected, sides.0, sides.1);
        bias_forward(of_x, &bias, output, Parallel::SERIAL);
        assert_eq!(outcome.elements(y), rounded(dtype, expected));

        let mut expected = random_values(3, columns);
        let mut case = KernelCase::new(FusedOp::BiasBackward, 1, (1, rows));
        let dy = case.buffer(shape, dtype, Some(&x));
        let db = case.buffer((1, columns), DType::F32, Some(&expected));
        case.reads(&[dy, db]).writes(&[db]);
        let Some(outcome) = case.run() else { return };
        bias_backward(of_x, &mut expected, &mut [], Parallel::SERIAL);
        assert_near(DType::F32, &outcome.elements(db), &expected, 1e-5);
    }
}
