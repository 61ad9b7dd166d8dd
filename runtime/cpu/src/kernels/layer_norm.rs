//! Activation φ of a LayerNorm over a latent: z = φ(γ⊙x̂ + β) with x̂ = (v − mean)/√(variance + ε).
//!
//! Forward saves no statistics: backward recomputes mean and variance of v. With u = γ⊙x̂ + β,
//! du = dz⊙φ'(u) and e = γ⊙du: dv = (e − mean(e) − x̂·mean(e⊙x̂))/√(variance + ε), dγ += Σ du⊙x̂,
//! dβ += Σ du.
//!
//! Shapes: v, z and their gradients `[tokens, r]`, γ and β `[r]`.

use std::marker::PhantomData;

use narrows_plan::model::Activation;

use super::activation::{ActivationFn, Identity, Silu};
use super::matrix::{MatrixView, MatrixViewMut};
use super::parallel::{Parallel, SharedOperand, TaskPartialSums, reduce_partial_sums};
use super::simd::{Simd, SimdBody, dot, mul_add, sum};

/// Parameters of a LayerNorm, and the activation after it.
#[derive(Clone, Copy, Debug)]
pub struct LayerNorm<'a> {
    /// γ.
    pub scale: &'a [f32],
    /// β.
    pub bias: &'a [f32],
    /// ε, added to the variance.
    pub epsilon: f32,
    /// φ.
    pub phi: Activation,
}

/// z = φ(LayerNorm(v)).
pub fn layer_norm_forward(
    v: MatrixView<'_>,
    norm: LayerNorm<'_>,
    z: MatrixViewMut<'_>,
    parallel: Parallel,
) {
    assert!(v.rows() == z.rows() && v.columns() == z.columns());
    assert!(norm.scale.len() == v.columns() && norm.bias.len() == v.columns());
    let (rows, operands) = (v.rows(), (v, z, SharedOperand(norm)));
    match norm.phi {
        Activation::Identity => {
            parallel.for_rows::<LayerNormForwardRows<Identity>, _>(rows, operands)
        }
        Activation::Silu => parallel.for_rows::<LayerNormForwardRows<Silu>, _>(rows, operands),
    };
}

type LayerNormForwardOperands<'a> =
    (MatrixView<'a>, MatrixViewMut<'a>, SharedOperand<LayerNorm<'a>>);

struct LayerNormForwardRows<P>(PhantomData<P>);

impl<P: ActivationFn> SimdBody<LayerNormForwardOperands<'_>> for LayerNormForwardRows<P> {
    #[inline(always)]
    fn run<S: Simd>((v, mut z, SharedOperand(norm)): LayerNormForwardOperands<'_>) {
        for row in 0..v.rows() {
            let (v, z) = (v.row(row), z.row_mut(row));
            let (inverse_deviation, mean) = statistics::<S>(v, z, norm.epsilon);
            let parameters = norm.scale.iter().zip(norm.bias);
            for ((z, v), (scale, bias)) in z.iter_mut().zip(v).zip(parameters) {
                *z = P::value::<S>((v - mean) * inverse_deviation * scale + bias);
            }
        }
    }
}

/// 1/√(variance + ε) and the mean. The centred row, whose squares give the variance, is left in
/// `scratch`.
#[inline(always)]
fn statistics<S: Simd>(v: &[f32], scratch: &mut [f32], epsilon: f32) -> (f32, f32) {
    let width = v.len() as f32;
    let mean = sum(v) / width;
    for (centred, v) in scratch.iter_mut().zip(v) {
        *centred = v - mean;
    }
    let variance = dot::<S>(scratch, scratch) / width;
    (1.0 / (variance + epsilon).sqrt(), mean)
}

/// Inputs of [`layer_norm_backward`], both `[tokens, r]`.
#[derive(Clone, Copy, Debug)]
pub struct LayerNormSaved<'a> {
    /// Gradient of z.
    pub dz: MatrixView<'a>,
    /// Input of the norm.
    pub v: MatrixView<'a>,
}

/// Outputs of [`layer_norm_backward`].
pub struct LayerNormGradients<'a> {
    /// Gradient of v, `[tokens, r]`; replaced.
    pub dv: MatrixViewMut<'a>,
    /// Gradient of γ, `[r]`; added to.
    pub dscale: &'a mut [f32],
    /// Gradient of β, `[r]`; added to.
    pub dbias: &'a mut [f32],
    /// [`Parallel::reduction_scratch_elements`] of 2·r.
    pub scratch: &'a mut [f32],
}

/// Gradients of v, γ and β.
pub fn layer_norm_backward(
    saved: LayerNormSaved<'_>,
    norm: LayerNorm<'_>,
    gradients: LayerNormGradients<'_>,
    parallel: Parallel,
) {
    let LayerNormSaved { dz, v } = saved;
    let LayerNormGradients { dv, dscale, dbias, scratch } = gradients;
    let (rows, width) = (v.rows(), v.columns());
    assert!(dz.rows() == rows && dv.rows() == rows);
    assert!(dz.columns() == width && dv.columns() == width);
    assert!(dscale.len() == width && dbias.len() == width);
    let (scale_scratch, bias_scratch) =
        scratch.split_at_mut(parallel.reduction_scratch_elements(width));
    let sums = (
        TaskPartialSums::new(dscale, scale_scratch, parallel),
        TaskPartialSums::new(dbias, bias_scratch, parallel),
    );
    let operands = (dz, v, SharedOperand(norm), dv, sums);
    let tasks = match norm.phi {
        Activation::Identity => {
            parallel.for_rows::<LayerNormBackwardRows<Identity>, _>(rows, operands)
        }
        Activation::Silu => parallel.for_rows::<LayerNormBackwardRows<Silu>, _>(rows, operands),
    };
    reduce_partial_sums(dscale, scale_scratch, tasks);
    reduce_partial_sums(dbias, bias_scratch, tasks);
}

type LayerNormBackwardOperands<'a> = (
    MatrixView<'a>,
    MatrixView<'a>,
    SharedOperand<LayerNorm<'a>>,
    MatrixViewMut<'a>,
    (TaskPartialSums<'a>, TaskPartialSums<'a>),
);

struct LayerNormBackwardRows<P>(PhantomData<P>);

impl<P: ActivationFn> SimdBody<LayerNormBackwardOperands<'_>> for LayerNormBackwardRows<P> {
    #[inline(always)]
    fn run<S: Simd>(
        (dz, v, SharedOperand(norm), mut dv, (dscale, dbias)): LayerNormBackwardOperands<'_>,
    ) {
        let width = v.columns();
        let (dscale, dbias) = (dscale.sums, dbias.sums);
        for row in 0..v.rows() {
            let (v, dz, dv) = (v.row(row), dz.row(row), dv.row_mut(row));
            let (inverse_deviation, mean) = statistics::<S>(v, dv, norm.epsilon);
            // dv holds e = γ⊙du until the two means of e are known.
            let parameters = norm.scale.iter().zip(norm.bias);
            let inputs = v.iter().zip(dz).zip(parameters);
            let outputs = dv.iter_mut().zip(dscale.iter_mut()).zip(dbias.iter_mut());
            for (((e, dscale), dbias), ((v, dz), (scale, bias))) in outputs.zip(inputs) {
                let normalized = (v - mean) * inverse_deviation;
                let du = dz * P::derivative::<S>(normalized * scale + bias);
                *dscale += du * normalized;
                *dbias += du;
                *e = du * scale;
            }
            let e_mean = sum(dv) / width as f32;
            // Σ e·x̂ = (Σ e·v − mean·Σ e)/√…, computed from the centred v, which may be far from 0.
            let projection = centred_dot::<S>(dv, v, mean) * inverse_deviation / width as f32;
            for (dv, v) in dv.iter_mut().zip(v) {
                let normalized = (v - mean) * inverse_deviation;
                *dv = (*dv - e_mean - normalized * projection) * inverse_deviation;
            }
        }
    }
}

/// Σ xᵢ(yᵢ − shift).
#[inline(always)]
fn centred_dot<S: Simd>(x: &[f32], y: &[f32], shift: f32) -> f32 {
    const LANES: usize = 16;
    let mut lanes = [0.0; LANES];
    let chunks = (x.chunks_exact(LANES), y.chunks_exact(LANES));
    let mut total = 0.0;
    for (x, y) in chunks.0.remainder().iter().zip(chunks.1.remainder()) {
        total += x * (y - shift);
    }
    for (x, y) in chunks.0.zip(chunks.1) {
        for lane in 0..LANES {
            lanes[lane] = mul_add::<S>(x[lane], y[lane] - shift, lanes[lane]);
        }
    }
    total + sum(&lanes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{assert_close, finite_difference, random, weighted_sum, widen};

    const ROWS: usize = 5;
    const WIDTH: usize = 37;

    /// LayerNorm by its definition, in f64.
    fn reference(v: &[f64], scale: &[f64], bias: &[f64], phi: Activation) -> Vec<f64> {
        let row = |v: &[f64]| -> Vec<f64> {
            let mean = v.iter().sum::<f64>() / WIDTH as f64;
            let variance = v.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / WIDTH as f64;
            let u =
                (0..WIDTH).map(|i| (v[i] - mean) / (variance + 1e-5).sqrt() * scale[i] + bias[i]);
            u.map(|u| if phi == Activation::Silu { u / (1.0 + (-u).exp()) } else { u }).collect()
        };
        v.chunks(WIDTH).flat_map(row).collect()
    }

    #[test]
    fn backward_is_the_derivative_of_forward() {
        let v: Vec<f32> = random(1, ROWS * WIDTH).iter().map(|v| 2.0 + v).collect();
        let (scale, bias, dz) = (random(2, WIDTH), random(3, WIDTH), random(4, ROWS * WIDTH));
        let (v64, scale64, bias64) = (widen(&v), widen(&scale), widen(&bias));
        for phi in [Activation::Identity, Activation::Silu] {
            let norm = LayerNorm { scale: &scale, bias: &bias, epsilon: 1e-5, phi };
            let view = MatrixView::new(&v, ROWS, WIDTH);
            let mut z = vec![0.0; v.len()];
            let z_view = MatrixViewMut::new(&mut z, ROWS, WIDTH);
            layer_norm_forward(view, norm, z_view, Parallel::SERIAL);
            assert_close(&z, &reference(&v64, &scale64, &bias64, phi), 2e-6);

            let mut dv = vec![f32::NAN; v.len()];
            let (mut dscale, mut dbias) = (vec![0.0; WIDTH], vec![0.0; WIDTH]);
            let gradients = LayerNormGradients {
                dv: MatrixViewMut::new(&mut dv, ROWS, WIDTH),
                dscale: &mut dscale,
                dbias: &mut dbias,
                scratch: &mut [],
            };
            let saved = LayerNormSaved { dz: MatrixView::new(&dz, ROWS, WIDTH), v: view };
            layer_norm_backward(saved, norm, gradients, Parallel::SERIAL);
            let loss = |v: &[f64], scale: &[f64], bias: &[f64]| {
                weighted_sum(&reference(v, scale, bias, phi), &dz)
            };
            let expected = finite_difference(&v64, |v| loss(v, &scale64, &bias64));
            assert_close(&dv, &expected, 3e-6);
            let expected = finite_difference(&scale64, |scale| loss(&v64, scale, &bias64));
            assert_close(&dscale, &expected, 3e-6);
            let expected = finite_difference(&bias64, |bias| loss(&v64, &scale64, bias));
            assert_close(&dbias, &expected, 3e-6);
        }
    }
}
