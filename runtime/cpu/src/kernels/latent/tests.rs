use super::*;
use crate::kernels::testing::{
    assert_close, assert_close_f32, finite_difference, random, weighted_sum, widen,
};
use crate::kernels::{
    RmsNormGradients, RmsNormSaved, gemm_forward, gemm_input_gradient, gemm_weight_gradient,
    rms_norm_backward, rms_norm_forward, rms_norm_online, rms_norm_online_backward,
};

const SERIAL: Parallel = Parallel::SERIAL;

fn phi(activation: Activation, u: f64) -> f64 {
    match activation {
        Activation::Identity => u,
        Activation::Silu => u / (1.0 + (-u).exp()),
    }
}

#[test]
fn latent_backward_is_the_derivative_of_forward() {
    let (rows, width) = (6, 45);
    let (h, dz) = (random(1, rows * width), random(2, rows * width));
    let h: Vec<f32> = h.iter().map(|h| 8.0 * h).collect();
    for activation in [Activation::Identity, Activation::Silu] {
        let (mut z, mut dh) = (vec![0.0; h.len()], vec![0.0; h.len()]);
        let h_view = MatrixView::new(&h, rows, width);
        latent_forward(h_view, activation, MatrixViewMut::new(&mut z, rows, width), SERIAL);
        let reference = |h: &[f64]| h.iter().map(|h| phi(activation, *h)).collect::<Vec<_>>();
        assert_close(&z, &reference(&widen(&h)), 1e-6);
        let dz_view = MatrixView::new(&dz, rows, width);
        latent_backward(
            dz_view,
            h_view,
            activation,
            MatrixViewMut::new(&mut dh, rows, width),
            SERIAL,
        );
        let expected = finite_difference(&widen(&h), |h| weighted_sum(&reference(h), &dz));
        assert_close(&dh, &expected, 1e-6);
    }
}

/// Two latents side by side in one tensor h, with one deferred division.
#[test]
fn latent_recover_backward_is_the_derivative_of_recover() {
    let (rows, widths) = (4, [33, 12]);
    let whole = widths[0] + widths[1];
    let rms = RmsNorm { width: 20, epsilon: 1e-5 };
    let h = random(1, rows * whole);
    let s: Vec<f32> = random(2, rows).iter().map(|s| 5.0 + 4.0 * s).collect();
    let dz = [random(3, rows * widths[0]), random(4, rows * widths[1])];
    for activation in [Activation::Identity, Activation::Silu] {
        let reference = |h: &[f64], s: &[f64]| -> [Vec<f64>; 2] {
            let rho = |row: usize| (s[row] / 20.0 + f64::from(rms.epsilon)).powf(-0.5);
            let element =
                |row: usize, column: usize| phi(activation, rho(row) * h[row * whole + column]);
            let latent = |first: usize, width: usize| {
                (0..rows * width).map(|i| element(i / width, first + i % width)).collect()
            };
            [latent(0, widths[0]), latent(widths[0], widths[1])]
        };
        let expected = reference(&widen(&h), &widen(&s));
        let loss = |h: &[f64], s: &[f64]| {
            let z = reference(h, s);
            weighted_sum(&z[0], &dz[0]) + weighted_sum(&z[1], &dz[1])
        };
        let expected_dh = finite_difference(&widen(&h), |h| loss(h, &widen(&s)));
        let expected_ds = finite_difference(&widen(&s), |s| loss(&widen(&h), s));

        let (mut dh, mut ds) = (vec![f32::NAN; h.len()], vec![f32::NAN; rows]);
        let mut first = 0;
        for (index, width) in widths.into_iter().enumerate() {
            let h = MatrixView::new(&h, rows, whole).column_range(first, width);
            let mut z = vec![0.0; rows * width];
            latent_recover(h, &s, rms, activation, MatrixViewMut::new(&mut z, rows, width), SERIAL);
            assert_close(&z, &expected[index], 1e-6);
            let mut in_place: Vec<f32> = (0..rows).flat_map(|row| h.row(row).to_vec()).collect();
            let view = MatrixViewMut::new(&mut in_place, rows, width);
            latent_recover_in_place(view, &s, rms, activation, SERIAL);
            assert_eq!(in_place, z);
            let saved = match activation {
                Activation::Identity => MatrixView::new(&z, rows, width),
                Activation::Silu => h,
            };
            let dz = MatrixView::new(&dz[index], rows, width);
            let inputs = LatentRecoverSaved { dz, saved, s: &s, rms, phi: activation };
            let write = if index == 0 { WriteMode::Replace } else { WriteMode::Add };
            let dh = MatrixViewMut::new(&mut dh, rows, whole).column_range(first, width);
            latent_recover_backward(inputs, dh, &mut ds, write, SERIAL);
            first += width;
        }
        assert_close(&dh, &expected_dh, 1e-6);
        assert_close(&ds, &expected_ds, 3e-6);
    }
}

/// Online norm, GEMM and deferred division on two devices equal norm, GEMM and φ on one device:
/// forward, and backward to x, γ and A.
#[test]
fn online_norm_over_two_shards_equals_the_whole_norm() {
    const ROWS: usize = 7;
    const D: usize = 48;
    const R: usize = 20;
    let half = D / 2;
    let (x, scale, a) = (random(1, ROWS * D), random(2, D), random(3, D * R));
    let dz = random(4, ROWS * R);
    let rms = RmsNorm { width: D, epsilon: 1e-5 };
    let dz = MatrixView::new(&dz, ROWS, R);
    let x = MatrixView::new(&x, ROWS, D);
    let weight = MatrixView::new(&a, D, R);
    for phi in [Activation::Identity, Activation::Silu] {
        // One device.
        let (mut y, mut s) = (vec![0.0; ROWS * D], vec![0.0; ROWS]);
        let (mut h, mut z) = (vec![0.0; ROWS * R], vec![0.0; ROWS * R]);
        rms_norm_forward(x, &scale, rms, MatrixViewMut::new(&mut y, ROWS, D), &mut s, SERIAL);
        let y = MatrixView::new(&y, ROWS, D);
        gemm_forward(y, weight, MatrixViewMut::new(&mut h, ROWS, R), 1, WriteMode::Replace, SERIAL);
        latent_forward(
            MatrixView::new(&h, ROWS, R),
            phi,
            MatrixViewMut::new(&mut z, ROWS, R),
            SERIAL,
        );
        let (mut dh, mut dy, mut dx) =
            (vec![0.0; ROWS * R], vec![0.0; ROWS * D], vec![0.0; ROWS * D]);
        let (mut da, mut dscale) = (vec![0.0; D * R], vec![0.0; D]);
        latent_backward(
            dz,
            MatrixView::new(&h, ROWS, R),
            phi,
            MatrixViewMut::new(&mut dh, ROWS, R),
            SERIAL,
        );
        let dh = MatrixView::new(&dh, ROWS, R);
        gemm_weight_gradient(y, dh, MatrixViewMut::new(&mut da, D, R), 1, WriteMode::Add, SERIAL);
        let view = MatrixViewMut::new(&mut dy, ROWS, D);
        gemm_input_gradient(dh, weight, view, 1, WriteMode::Replace, SERIAL);
        let saved = RmsNormSaved { dy: MatrixView::new(&dy, ROWS, D), x, scale: &scale };
        let gradients = RmsNormGradients {
            dx: MatrixViewMut::new(&mut dx, ROWS, D),
            write: WriteMode::Replace,
            dscale: &mut dscale,
            scratch: &mut [],
        };
        rms_norm_backward(saved, &s, rms, gradients, SERIAL);

        // Two devices with half of the features each; h and s are reduced in order.
        let (mut y2, mut h2, mut s2) = (vec![0.0; ROWS * D], vec![0.0; ROWS * R], vec![0.0; ROWS]);
        for shard in 0..2 {
            let mut partial_s = vec![0.0; ROWS];
            let (x, scale) = (x.column_range(shard * half, half), &scale[shard * half..][..half]);
            let y = MatrixViewMut::new(&mut y2, ROWS, D).column_range(shard * half, half);
            rms_norm_online(x, scale, y, &mut partial_s, SERIAL);
            s2.iter_mut().zip(&partial_s).for_each(|(s, partial)| *s += partial);
            let y = MatrixView::new(&y2, ROWS, D).column_range(shard * half, half);
            let weight = weight.row_range(shard * half, half);
            gemm_forward(
                y,
                weight,
                MatrixViewMut::new(&mut h2, ROWS, R),
                1,
                WriteMode::Add,
                SERIAL,
            );
        }
        let h2 = MatrixView::new(&h2, ROWS, R);
        let (mut z2, mut du, mut ds) = (vec![0.0; ROWS * R], vec![0.0; ROWS * R], vec![0.0; ROWS]);
        latent_recover(h2, &s2, rms, phi, MatrixViewMut::new(&mut z2, ROWS, R), SERIAL);
        assert_close_f32(&z2, &z, 2e-6);
        let saved = if phi == Activation::Silu { h2 } else { MatrixView::new(&z2, ROWS, R) };
        let inputs = LatentRecoverSaved { dz, saved, s: &s2, rms, phi };
        latent_recover_backward(
            inputs,
            MatrixViewMut::new(&mut du, ROWS, R),
            &mut ds,
            WriteMode::Replace,
            SERIAL,
        );
        let du = MatrixView::new(&du, ROWS, R);
        let (mut dx2, mut da2, mut dscale2) = (vec![0.0; ROWS * D], vec![0.0; D * R], vec![0.0; D]);
        for shard in 0..2 {
            let mut g = vec![0.0; ROWS * half];
            let weight = weight.row_range(shard * half, half);
            let view = MatrixViewMut::new(&mut g, ROWS, half);
            gemm_input_gradient(du, weight, view, 1, WriteMode::Replace, SERIAL);
            let y = MatrixView::new(&y2, ROWS, D).column_range(shard * half, half);
            let da = MatrixViewMut::new(&mut da2, D, R).row_range(shard * half, half);
            gemm_weight_gradient(y, du, da, 1, WriteMode::Add, SERIAL);
            let saved = RmsNormSaved {
                dy: MatrixView::new(&g, ROWS, half),
                x: x.column_range(shard * half, half),
                scale: &scale[shard * half..][..half],
            };
            let gradients = RmsNormGradients {
                dx: MatrixViewMut::new(&mut dx2, ROWS, D).column_range(shard * half, half),
                write: WriteMode::Replace,
                dscale: &mut dscale2[shard * half..][..half],
                scratch: &mut [],
            };
            rms_norm_online_backward(saved, &ds, gradients, SERIAL);
        }
        assert_close_f32(&dx2, &dx, 3e-6);
        assert_close_f32(&da2, &da, 3e-6);
        assert_close_f32(&dscale2, &dscale, 3e-6);
    }
}
