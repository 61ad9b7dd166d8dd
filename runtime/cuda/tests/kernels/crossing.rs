//! Latent crossings: LayerNorm with an activation, and the tensor gate.

use narrows_cpu::kernels::{
    LayerNorm, LayerNormGradients, LayerNormSaved, MatrixView, MatrixViewMut, Parallel, TensorGate,
    TensorGateGradients, WriteMode, layer_norm_backward, layer_norm_forward, tensor_gate_backward,
    tensor_gate_forward,
};
use narrows_plan::DType;
use narrows_plan::model::Activation;
use narrows_plan::program::FusedOp;

use super::case::KernelCase;
use super::formats::{assert_near, random_values, rounded};

const FORMATS: [DType; 2] = [DType::Bf16, DType::F32];
const SERIAL: Parallel = Parallel::SERIAL;

#[test]
fn layer_norms_match_the_cpu() {
    let shapes = [(1, 2), (1, 12), (9, 33), (20, 64), (40, 256), (3, 2056)];
    let phis = [Activation::Identity, Activation::Silu];
    for ((rows, columns), (dtype, phi)) in shapes
        .into_iter()
        .flat_map(|shape| FORMATS.map(|dtype| (shape, dtype)))
        .flat_map(|(shape, dtype)| phis.map(|phi| (shape, (dtype, phi))))
    {
        // Far from zero, where E[x²] − E[x]² would lose the variance.
        let v = rounded(dtype, random_values(1, rows * columns).iter().map(|x| x + 3.0).collect());
        let weight = rounded(dtype, random_values(2, 2 * columns));
        let dz = rounded(dtype, random_values(3, rows * columns));
        let (scale, bias) = weight.split_at(columns as usize);
        let layer_norm = LayerNorm { scale, bias, epsilon: 1e-6, phi };
        let (shape, sides) = ((rows, columns), (rows as usize, columns as usize));
        let view = |of| MatrixView::new(of, sides.0, sides.1);

        let mut case = KernelCase::new(FusedOp::LatentNorm { activation: phi }, 1, (1, rows));
        let [of_v, of_weight] = [(shape, &v), ((1, 2 * columns), &weight)]
            .map(|(shape, values)| case.buffer(shape, dtype, Some(values)));
        let z = case.buffer(shape, dtype, None);
        case.reads(&[of_v, of_weight]).writes(&[z]);
        let Some(outcome) = case.run() else { return };
        let mut expected = vec![0.0; v.len()];
        layer_norm_forward(
            view(&v),
            layer_norm,
            MatrixViewMut::new(&mut expected, sides.0, sides.1),
            SERIAL,
        );
        assert_near(dtype, &outcome.elements(z), &expected, 1e-5);

        let before = random_values(4, 2 * columns);
        let mut case =
            KernelCase::new(FusedOp::LatentNormBackward { activation: phi }, 1, (1, rows));
        let reads = [(shape, &dz), (shape, &v), ((1, 2 * columns), &weight)]
            .map(|(shape, values)| case.buffer(shape, dtype, Some(values)));
        let sums = case.buffer((1, 2 * columns), DType::F32, Some(&before));
        let dv = case.buffer(shape, dtype, None);
        case.reads(&[reads[0], reads[1], reads[2], sums]).writes(&[dv, sums]);
        let Some(outcome) = case.run() else { return };
        let (mut expected, mut expected_sums) = (vec![0.0; v.len()], before);
        let (dscale, dbias) = expected_sums.split_at_mut(sides.1);
        let dv_gradient = MatrixViewMut::new(&mut expected, sides.0, sides.1);
        let gradients = LayerNormGradients { dv: dv_gradient, dscale, dbias, scratch: &mut [] };
        let saved = LayerNormSaved { dz: view(&dz), v: view(&v) };
        layer_norm_backward(saved, layer_norm, gradients, SERIAL);
        assert_near(dtype, &outcome.elements(dv), &expected, 2e-5);
        assert_near(DType::F32, &outcome.elements(sums), &expected_sums, 1e-5);
    }
}

#[test]
fn tensor_gates_match_the_cpu() {
    let sizes = [(1, 1, 1), (3, 2, 5), (9, 4, 16), (21, 16, 4), (33, 8, 8), (5, 24, 20)];
    for ((tokens, a, b), dtype) in
        sizes.into_iter().flat_map(|size| FORMATS.map(|dtype| (size, dtype)))
    {
        let (features, parameters) = (a * b, a * a + b * b);
        let values = |seed, count| rounded(dtype, random_values(seed, count));
        let (h, dg) = (values(1, tokens * features), values(2, tokens * features));
        let weight = values(3, parameters);
        let (u, v) = weight.split_at((a * a) as usize);
        let [rows, columns, count] = [a, b, tokens].map(|size| size as usize);
        let gate = TensorGate {
            u: MatrixView::new(u, rows, rows),
            v: MatrixView::new(v, columns, columns),
        };
        let mut scratch = vec![0.0; gate.scratch_elements(SERIAL)];

        let mut case = KernelCase::new(FusedOp::TensorGate { a, b }, 1, (1, tokens));
        let [of_h, of_weight] = [((tokens, features), &h), ((1, parameters), &weight)]
            .map(|(shape, values)| case.buffer(shape, dtype, Some(values)));
        let g = case.buffer((tokens, features), dtype, None);
        case.reads(&[of_h, of_weight]).writes(&[g]);
        let Some(outcome) = case.run() else { return };
        let mut expected = vec![0.0; h.len()];
        let replace = WriteMode::Replace;
        tensor_gate_forward(count, gate, &h, &mut expected, replace, &mut scratch, SERIAL);
        assert_near(dtype, &outcome.elements(g), &expected, 2e-6);

        for add in [false, true] {
            let (before, sums_before) =
                (values(4, tokens * features), random_values(5, parameters));
            let mut case = KernelCase::new(FusedOp::TensorGateBackward { a, b }, 1, (1, tokens));
            let mut reads =
                [((tokens, features), &dg), ((tokens, features), &h), ((1, parameters), &weight)]
                    .map(|(shape, values)| case.buffer(shape, dtype, Some(values)))
                    .to_vec();
            let sums = case.buffer((1, parameters), DType::F32, Some(&sums_before));
            let dh = case.buffer((tokens, features), dtype, add.then_some(&before[..]));
            reads.push(sums);
            reads.extend(add.then_some(dh));
            case.reads(&reads).writes(&[dh, sums]);
            let Some(outcome) = case.run() else { return };
            let (mut expected, mut expected_sums) = (before, sums_before);
            let (du, dv) = expected_sums.split_at_mut((a * a) as usize);
            let write = if add { WriteMode::Add } else { WriteMode::Replace };
            let gradients = TensorGateGradients { dh: &mut expected, write, du, dv };
            tensor_gate_backward(count, gate, (&h, &dg), gradients, &mut scratch, SERIAL);
            assert_near(dtype, &outcome.elements(dh), &expected, 2e-6);
            assert_near(DType::F32, &outcome.elements(sums), &expected_sums, 2e-6);
        }
    }
}
