//! Norms of the heads of queries and keys.

use narrows_cpu::kernels::{
    MatrixView, MatrixViewMut, Parallel, QkNorm, RmsNorm, qk_norm_backward, qk_norm_forward,
};
use narrows_plan::DType;
use narrows_plan::program::{FusedOp, QkHeads};

use super::case::KernelCase;
use super::formats::{assert_near, random_values, rounded};

/// Queries, keys and copied heads: all of them, either alone, more rows than one block sums, and head widths that are not
/// multiples of a vector.
const SHAPES: [(u64, u64, [u64; 3]); 6] = [
    (1, 2, [1, 0, 0]),
    (9, 6, [2, 1, 1]),
    (70, 64, [4, 2, 2]),
    (300, 128, [3, 1, 1]),
    (40, 80, [0, 2, 2]),
    (3, 320, [2, 0, 0]),
];

#[test]
fn norms_of_heads_match_the_cpu() {
    for ((tokens, head_dim, [queries, keys, copied]), dtype) in
        SHAPES.into_iter().flat_map(|shape| [(shape, DType::Bf16), (shape, DType::F32)])
    {
        let columns = (queries + keys + copied) * head_dim;
        let heads = QkHeads { head_dim, queries, keys };
        let scale_count = heads.scale_count();
        let x = rounded(dtype, random_values(1, tokens * columns));
        let scales = rounded(dtype, random_values(2, scale_count));
        let shape = (tokens, columns);
        let view = |elements| MatrixView::new(elements, tokens as usize, columns as usize);

        let mut case = KernelCase::new(FusedOp::QkNorm(heads), 1, (1, tokens));
        let head =
            RmsNorm { width: head_dim as usize, epsilon: case.constants.norm_epsilon as f32 };
        let norm = QkNorm { head, queries: queries as usize, keys: keys as usize, scales: &scales };
        let reads = [(shape, &x), ((1, scale_count), &scales)]
            .map(|(shape, values)| case.buffer(shape, dtype, Some(values)));
        let y = case.buffer(shape, dtype, None);
        case.reads(&reads).writes(&[y]);
        let Some(outcome) = case.run() else { return };
        let mut expected = vec![0.0; x.len()];
        let output = MatrixViewMut::new(&mut expected, tokens as usize, columns as usize);
        qk_norm_forward(view(&x), norm, output, Parallel::SERIAL);
        assert_near(dtype, &outcome.elements(y), &expected, 1e-5);

        let dy = rounded(dtype, random_values(3, tokens * columns));
        let mut dscales = random_values(4, scale_count);
        let op = FusedOp::QkNormBackward(heads);
        let mut case = KernelCase::new(op, 1, (1, tokens));
        let [of_dy, of_x] = [&dy, &x].map(|values| case.buffer(shape, dtype, Some(values)));
        let weight = case.buffer((1, scale_count), dtype, Some(&scales));
        let gradient = case.buffer((1, scale_count), DType::F32, Some(&dscales));
        let dx = case.buffer(shape, dtype, None);
        case.reads(&[of_dy, of_x, weight, gradient]).writes(&[dx, gradient]);
        let Some(outcome) = case.run() else { return };
        let mut expected = vec![0.0; x.len()];
        let output = MatrixViewMut::new(&mut expected, tokens as usize, columns as usize);
        let outputs = (output, &mut dscales[..]);
        qk_norm_backward((view(&dy), view(&x)), norm, outputs, &mut [], Parallel::SERIAL);
        assert_near(dtype, &outcome.elements(dx), &expected, 1e-5);
        assert_near(DType::F32, &outcome.elements(gradient), &dscales, 1e-5);
    }
}
