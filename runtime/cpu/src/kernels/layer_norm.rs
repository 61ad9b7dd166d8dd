//! φ of a LayerNorm over a latent: z = φ(γ⊙x̂ + β) with x̂ = (v − mean)/√(variance + ε).
//!
//! Nothing is saved: backward makes mean and variance of v anew. With u = γ⊙x̂ + β, du = dz⊙φ'(u)
//! and e = γ⊙du: dv = (e − mean(e) − x̂·mean(e⊙x̂))/√(variance + ε), dγ += Σ du⊙x̂, dβ += Σ du.
//!
//! Shapes: v, z and their gradients `[tokens, r]`, γ and β `[r]`.

use std::marker::PhantomData;

use narrows_plan::model::Activation;

use super::activation::{ActivationFn, Identity, Silu};
use super::parallel::{PartialSums, SharedOperand, reduce_partial_sums};
use super::simd::{Simd, SimdBody, dot, mul_add, sum};
use super::{MatrixView, MatrixViewMut, Parallel};

/// Scale, bias and ε, and the φ that follows.
#[derive(Clone, Copy, Debug)]
pub struct LayerNorm<'a> {
    /// γ.
    pub scale: &'a [f32],
    /// β.
    pub bias: &'a [f32],
    /// Added to the variance.
    pub epsilon: f32,
    /// φ.
    pub phi: Activation,
}

/// z = φ(LayerNorm(v)).
pub fn layer_norm_forward(
    v: MatrixView<'_>,
    by: LayerNorm<'_>,
    z: MatrixViewMut<'_>,
    parallel: Parallel,
) {
    assert!(v.rows() == z.rows() && v.columns() == z.columns());
    assert!(by.scale.len() == v.columns() && by.bias.len() == v.columns());
    let work = (v, z, SharedOperand(by));
    match by.phi {
        Activation::Identity => {
            parallel.for_rows::<LayerNormForwardRows<Identity>, _>(v.rows(), work)
        }
        Activation::Silu => parallel.for_rows::<LayerNormForwardRows<Silu>, _>(v.rows(), work),
    };
}

struct LayerNormForwardRows<P>(PhantomData<P>);

impl<P: ActivationFn> SimdBody<(MatrixView<'_>, MatrixViewMut<'_>, SharedOperand<LayerNorm<'_>>)>
    for LayerNormForwardRows<P>
{
    #[inline(always)]
    fn run<S: Simd>(
        (v, mut z, SharedOperand(by)): (
            MatrixView<'_>,
            MatrixViewMut<'_>,
            SharedOperand<LayerNorm<'_>>,
        ),
    ) {
        for row in 0..v.rows() {
            let (v, z) = (v.row(row), z.row_mut(row));
            let (inverse, shift) = normal::<S>(v, z, by.epsilon);
            let weights = by.scale.iter().zip(by.bias);
            for ((z, v), (scale, bias)) in z.iter_mut().zip(v).zip(weights) {
                *z = P::value::<S>((v - shift) * inverse * scale + bias);
            }
        }
    }
}

/// 1/√(variance + ε) and the mean. The variance is that of the centred numbers, kept in `scratch`.
#[inline(always)]
fn normal<S: Simd>(v: &[f32], scratch: &mut [f32], epsilon: f32) -> (f32, f32) {
    let width = v.len() as f32;
    let mean = sum(v) / width;
    for (centred, v) in scratch.iter_mut().zip(v) {
        *centred = v - mean;
    }
    let variance = dot::<S>(scratch, scratch) / width;
    (1.0 / (variance + epsilon).sqrt(), mean)
}

/// What [`backward`] reads: the gradient of z, and v, both `[tokens, r]`.
#[derive(Clone, Copy, Debug)]
pub struct LayerNormSaved<'a> {
    /// Gradient of z.
    pub dz: MatrixView<'a>,
    /// The norm's input.
    pub v: MatrixView<'a>,
}

/// What [`backward`] writes.
pub struct LayerNormGradients<'a> {
    /// Gradient of v, replaced.
    pub dv: MatrixViewMut<'a>,
    /// Gradient of γ, added to.
    pub dscale: &'a mut [f32],
    /// Gradient of β, added to.
    pub dbias: &'a mut [f32],
    /// [`Parallel::sums_scratch`] of 2·r.
    pub scratch: &'a mut [f32],
}

/// dv, and what is added to the gradients of γ and β.
pub fn layer_norm_backward(
    saved: LayerNormSaved<'_>,
    by: LayerNorm<'_>,
    made: LayerNormGradients<'_>,
    parallel: Parallel,
) {
    let LayerNormSaved { dz, v } = saved;
    let LayerNormGradients { dv, dscale, dbias, scratch } = made;
    let (rows, width) = (v.rows(), v.columns());
    assert!(dz.rows() == rows && dv.rows() == rows);
    assert!(dz.columns() == width && dv.columns() == width);
    assert!(dscale.len() == width && dbias.len() == width);
    let (first, second) = scratch.split_at_mut(parallel.reduction_scratch_elements(width));
    let sums =
        (PartialSums::new(dscale, first, parallel), PartialSums::new(dbias, second, parallel));
    let work = (dz, v, SharedOperand(by), dv, sums);
    let tasks = match by.phi {
        Activation::Identity => parallel.for_rows::<LayerNormBackwardRows<Identity>, _>(rows, work),
        Activation::Silu => parallel.for_rows::<LayerNormBackwardRows<Silu>, _>(rows, work),
    };
    reduce_partial_sums(dscale, first, tasks);
    reduce_partial_sums(dbias, second, tasks);
}

type LayerNormBackward<'a> = (
    MatrixView<'a>,
    MatrixView<'a>,
    SharedOperand<LayerNorm<'a>>,
    MatrixViewMut<'a>,
    (PartialSums<'a>, PartialSums<'a>),
);

struct LayerNormBackwardRows<P>(PhantomData<P>);

impl<P: ActivationFn> SimdBody<LayerNormBackward<'_>> for LayerNormBackwardRows<P> {
    #[inline(always)]
    fn run<S: Simd>((dz, v, SharedOperand(by), mut dv, (dscale, dbias)): LayerNormBackward<'_>) {
        let width = v.columns();
        let (dscale, dbias) = (dscale.sums, dbias.sums);
        for row in 0..v.rows() {
            let (v, dz, dv) = (v.row(row), dz.row(row), dv.row_mut(row));
            let (inverse, mean) = normal::<S>(v, dv, by.epsilon);
            // dv holds e = γ⊙du until its two means are known.
            let weights = by.scale.iter().zip(by.bias);
            let read = v.iter().zip(dz).zip(weights);
            let made = dv.iter_mut().zip(dscale.iter_mut()).zip(dbias.iter_mut());
            for (((e, dscale), dbias), ((v, dz), (scale, bias))) in made.zip(read) {
                let normed = (v - mean) * inverse;
                let du = dz * P::derivative::<S>(normed * scale + bias);
                *dscale += du * normed;
                *dbias += du;
                *e = du * scale;
            }
            let e_mean = sum(dv) / width as f32;
            // Σ e·x̂ = (Σ e·v − mean·Σ e)/√…, but centred first, since v may be far from 0.
            let along = centred_dot::<S>(dv, v, mean) * inverse / width as f32;
            for (dv, v) in dv.iter_mut().zip(v) {
                *dv = (*dv - e_mean - (v - mean) * inverse * along) * inverse;
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
    use crate::kernels::testing::{assert_close, gradient, random, weigh, widen};

    const ROWS: usize = 5;
    const WIDTH: usize = 37;

    fn naive(v: &[f64], scale: &[f64], bias: &[f64], phi: Activation) -> Vec<f64> {
        let one = |v: &[f64]| -> Vec<f64> {
            let mean = v.iter().sum::<f64>() / WIDTH as f64;
            let variance = v.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / WIDTH as f64;
            let u =
                (0..WIDTH).map(|i| (v[i] - mean) / (variance + 1e-5).sqrt() * scale[i] + bias[i]);
            u.map(|u| if phi == Activation::Silu { u / (1.0 + (-u).exp()) } else { u }).collect()
        };
        v.chunks(WIDTH).flat_map(one).collect()
    }

    #[test]
    fn values_and_derivatives() {
        let v: Vec<f32> = random(1, ROWS * WIDTH).iter().map(|v| 2.0 + v).collect();
        let (scale, bias, dz) = (random(2, WIDTH), random(3, WIDTH), random(4, ROWS * WIDTH));
        let (v64, scale64, bias64) = (widen(&v), widen(&scale), widen(&bias));
        for phi in [Activation::Identity, Activation::Silu] {
            let by = LayerNorm { scale: &scale, bias: &bias, epsilon: 1e-5, phi };
            let view = MatrixView::new(&v, ROWS, WIDTH);
            let mut z = vec![0.0; v.len()];
            layer_norm_forward(view, by, MatrixViewMut::new(&mut z, ROWS, WIDTH), Parallel::SERIAL);
            assert_close(&z, &naive(&v64, &scale64, &bias64, phi), 2e-6);

            let mut dv = vec![f32::NAN; v.len()];
            let (mut dscale, mut dbias) = (vec![0.0; WIDTH], vec![0.0; WIDTH]);
            let made = LayerNormGradients {
                dv: MatrixViewMut::new(&mut dv, ROWS, WIDTH),
                dscale: &mut dscale,
                dbias: &mut dbias,
                scratch: &mut [],
            };
            let saved = LayerNormSaved { dz: MatrixView::new(&dz, ROWS, WIDTH), v: view };
            layer_norm_backward(saved, by, made, Parallel::SERIAL);
            let wanted = gradient(&v64, |v| weigh(&naive(v, &scale64, &bias64, phi), &dz));
            assert_close(&dv, &wanted, 3e-6);
            let wanted = gradient(&scale64, |scale| weigh(&naive(&v64, scale, &bias64, phi), &dz));
            assert_close(&dscale, &wanted, 3e-6);
            let wanted = gradient(&bias64, |bias| weigh(&naive(&v64, &scale64, bias, phi), &dz));
            assert_close(&dbias, &wanted, 3e-6);
        }
    }
}
