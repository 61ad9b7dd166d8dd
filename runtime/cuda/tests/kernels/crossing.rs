//! What crosses between blocks: LayerNorm with φ, and the tensor gate.

use narrows_cpu::kernels::{
    LayerNorm, LayerNormGradients, LayerNormSaved, MatrixView, MatrixViewMut, Parallel, TensorGate,
    TensorGateGradients, WriteMode, layer_norm_backward, layer_norm_forward, tensor_gate_backward,
    tensor_gate_forward,
};
use narrows_plan::DType;
use narrows_plan::model::Activation;
use narrows_plan::program::FusedOp;

use super::case::Case;
use super::numbers::{assert_near, random, rounded};

const FORMATS: [DType; 2] = [DType::Bf16, DType::F32];
const SERIAL: Parallel = Parallel::SERIAL;

#[test]
fn layer_norms_are_the_processors() {
    let shapes = [(1, 2), (1, 12), (9, 33), (20, 64), (40, 256), (3, 2056)];
    let phis = [Activation::Identity, Activation::Silu];
    for ((rows, columns), (dtype, phi)) in shapes
        .into_iter()
        .flat_map(|shape| FORMATS.map(|dtype| (shape, dtype)))
        .flat_map(|(shape, dtype)| phis.map(|phi| (shape, (dtype, phi))))
    {
        // Far from zero, where the variance of what is not centred would be lost.
        let v = rounded(dtype, random(1, rows * columns).iter().map(|x| x + 3.0).collect());
        let weight = rounded(dtype, random(2, 2 * columns));
        let dz = rounded(dtype, random(3, rows * columns));
        let (scale, bias) = weight.split_at(columns as usize);
        let by = LayerNorm { scale, bias, epsilon: 1e-5, phi };
        let (shape, sides) = ((rows, columns), (rows as usize, columns as usize));
        let view = |of| MatrixView::new(of, sides.0, sides.1);

        let mut case = Case::new(FusedOp::LatentNorm { activation: phi }, 1, (1, rows));
        let [of_v, of_weight] = [(shape, &v), ((1, 2 * columns), &weight)]
            .map(|(shape, numbers)| case.buffer(shape, dtype, Some(numbers)));
        let z = case.buffer(shape, dtype, None);
        case.reads(&[of_v, of_weight]).writes(&[z]);
        let Some(outcome) = case.run() else { return };
        let mut wanted = vec![0.0; v.len()];
        layer_norm_forward(view(&v), by, MatrixViewMut::new(&mut wanted, sides.0, sides.1), SERIAL);
        assert_near(dtype, &outcome.numbers(z), &wanted, 1e-5);

        let before = random(4, 2 * columns);
        let mut case = Case::new(FusedOp::LatentNormBackward { activation: phi }, 1, (1, rows));
        let reads = [(shape, &dz), (shape, &v), ((1, 2 * columns), &weight)]
            .map(|(shape, numbers)| case.buffer(shape, dtype, Some(numbers)));
        let sums = case.buffer((1, 2 * columns), DType::F32, Some(&before));
        let dv = case.buffer(shape, dtype, None);
        case.reads(&[reads[0], reads[1], reads[2], sums]).writes(&[dv, sums]);
        let Some(outcome) = case.run() else { return };
        let (mut wanted, mut wanted_sums) = (vec![0.0; v.len()], before);
        let (dscale, dbias) = wanted_sums.split_at_mut(sides.1);
        let made = MatrixViewMut::new(&mut wanted, sides.0, sides.1);
        let made = LayerNormGradients { dv: made, dscale, dbias, scratch: &mut [] };
        let saved = LayerNormSaved { dz: view(&dz), v: view(&v) };
        layer_norm_backward(saved, by, made, SERIAL);
        assert_near(dtype, &outcome.numbers(dv), &wanted, 2e-5);
        assert_near(DType::F32, &outcome.numbers(sums), &wanted_sums, 1e-5);
    }
}

#[test]
fn tensor_gates_are_the_processors() {
    let sizes = [(1, 1, 1), (3, 2, 5), (9, 4, 16), (21, 16, 4), (33, 8, 8), (5, 24, 20)];
    for ((tokens, a, b), dtype) in
        sizes.into_iter().flat_map(|size| FORMATS.map(|dtype| (size, dtype)))
    {
        let (features, parameters) = (a * b, a * a + b * b);
        let numbers = |seed, count| rounded(dtype, random(seed, count));
        let (h, dg) = (numbers(1, tokens * features), numbers(2, tokens * features));
        let weight = numbers(3, parameters);
        let (u, v) = weight.split_at((a * a) as usize);
        let [rows, columns, count] = [a, b, tokens].map(|size| size as usize);
        let gate = TensorGate {
            u: MatrixView::new(u, rows, rows),
            v: MatrixView::new(v, columns, columns),
        };
        let mut scratch = vec![0.0; gate.scratch_elements(SERIAL)];

        let mut case = Case::new(FusedOp::TensorGate { a, b }, 1, (1, tokens));
        let [of_h, of_weight] = [((tokens, features), &h), ((1, parameters), &weight)]
            .map(|(shape, numbers)| case.buffer(shape, dtype, Some(numbers)));
        let g = case.buffer((tokens, features), dtype, None);
        case.reads(&[of_h, of_weight]).writes(&[g]);
        let Some(outcome) = case.run() else { return };
        let mut wanted = vec![0.0; h.len()];
        let replace = WriteMode::Replace;
        tensor_gate_forward(count, gate, &h, &mut wanted, replace, &mut scratch, SERIAL);
        assert_near(dtype, &outcome.numbers(g), &wanted, 2e-6);

        for add in [false, true] {
            let (before, sums_before) = (numbers(4, tokens * features), random(5, parameters));
            let mut case = Case::new(FusedOp::TensorGateBackward { a, b }, 1, (1, tokens));
            let mut reads =
                [((tokens, features), &dg), ((tokens, features), &h), ((1, parameters), &weight)]
                    .map(|(shape, numbers)| case.buffer(shape, dtype, Some(numbers)))
                    .to_vec();
            let sums = case.buffer((1, parameters), DType::F32, Some(&sums_before));
            let dh = case.buffer((tokens, features), dtype, add.then_some(&before[..]));
            reads.push(sums);
            reads.extend(add.then_some(dh));
            case.reads(&reads).writes(&[dh, sums]);
            let Some(outcome) = case.run() else { return };
            let (mut wanted, mut wanted_sums) = (before, sums_before);
            let (du, dv) = wanted_sums.split_at_mut((a * a) as usize);
            let write = if add { WriteMode::Add } else { WriteMode::Replace };
            let made = TensorGateGradients { dh: &mut wanted, write, du, dv };
            tensor_gate_backward(count, gate, (&h, &dg), made, &mut scratch, SERIAL);
            assert_near(dtype, &outcome.numbers(dh), &wanted, 2e-6);
            assert_near(DType::F32, &outcome.numbers(sums), &wanted_sums, 2e-6);
        }
    }
}
