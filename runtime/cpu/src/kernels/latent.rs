//! Activation φ on a latent, and the division by the root mean square that an online norm defers.
//!
//! Each function takes one latent, `[tokens, r]`; latents side by side in one tensor are views of its
//! columns. Forward: z = φ(h), or z = φ(ρ·h) where the division is deferred. Backward of the latter,
//! with u = ρ·h and du = dz⊙φ'(u): dh = ρ·du and ds (+)= −(ρ²/2d)·Σ du⊙u, one element a token, summed
//! over all latents of the norm: the first latent replaces ds, the others add to it.

use std::marker::PhantomData;

use narrows_plan::model::Activation;

use super::activation::{ActivationFn, Identity, Silu};
use super::matrix::{MatrixView, MatrixViewMut, WriteMode, assert_equal_sizes};
use super::parallel::{Parallel, SharedOperand};
use super::rms_norm::RmsNorm;
use super::simd::{Simd, SimdBody, dot};

/// `LatentForward`: z = φ(h).
pub fn latent_forward(
    h: MatrixView<'_>,
    phi: Activation,
    z: MatrixViewMut<'_>,
    parallel: Parallel,
) {
    assert_equal_sizes(&[h.rows(), z.rows()], &[h.columns(), z.columns()]);
    let (rows, operands) = (h.rows(), (h, z));
    match phi {
        Activation::Identity => parallel.for_rows::<LatentForwardRows<Identity>, _>(rows, operands),
        Activation::Silu => parallel.for_rows::<LatentForwardRows<Silu>, _>(rows, operands),
    };
}

struct LatentForwardRows<P>(PhantomData<P>);

impl<P: ActivationFn> SimdBody<(MatrixView<'_>, MatrixViewMut<'_>)> for LatentForwardRows<P> {
    #[inline(always)]
    fn run<S: Simd>((h, mut z): (MatrixView<'_>, MatrixViewMut<'_>)) {
        for row in 0..h.rows() {
            for (z, h) in z.row_mut(row).iter_mut().zip(h.row(row)) {
                *z = P::value::<S>(*h);
            }
        }
    }
}

/// `LatentRecover`: z = φ(ρ·h).
pub fn latent_recover(
    h: MatrixView<'_>,
    s: &[f32],
    rms: RmsNorm,
    phi: Activation,
    z: MatrixViewMut<'_>,
    parallel: Parallel,
) {
    assert_equal_sizes(&[h.rows(), z.rows(), s.len()], &[h.columns(), z.columns()]);
    let (rows, operands) = (h.rows(), (h, s, SharedOperand(rms), z));
    match phi {
        Activation::Identity => parallel.for_rows::<RecoverRows<Identity>, _>(rows, operands),
        Activation::Silu => parallel.for_rows::<RecoverRows<Silu>, _>(rows, operands),
    };
}

type RecoverOperands<'a> = (MatrixView<'a>, &'a [f32], SharedOperand<RmsNorm>, MatrixViewMut<'a>);

struct RecoverRows<P>(PhantomData<P>);

impl<P: ActivationFn> SimdBody<RecoverOperands<'_>> for RecoverRows<P> {
    #[inline(always)]
    fn run<S: Simd>((h, s, SharedOperand(rms), mut z): RecoverOperands<'_>) {
        for (row, s) in s.iter().enumerate() {
            let rho = rms.inverse_rms(*s);
            for (z, h) in z.row_mut(row).iter_mut().zip(h.row(row)) {
                *z = P::value::<S>(rho * h);
            }
        }
    }
}

/// `LatentRecover` in place: h becomes φ(ρ·h).
pub(crate) fn latent_recover_in_place(
    h: MatrixViewMut<'_>,
    s: &[f32],
    rms: RmsNorm,
    phi: Activation,
    parallel: Parallel,
) {
    assert_equal_sizes(&[h.rows(), s.len()], &[]);
    let (rows, operands) = (h.rows(), (h, s, SharedOperand(rms)));
    match phi {
        Activation::Identity => {
            parallel.for_rows::<RecoverRowsInPlace<Identity>, _>(rows, operands)
        }
        Activation::Silu => parallel.for_rows::<RecoverRowsInPlace<Silu>, _>(rows, operands),
    };
}

struct RecoverRowsInPlace<P>(PhantomData<P>);

impl<P: ActivationFn> SimdBody<(MatrixViewMut<'_>, &[f32], SharedOperand<RmsNorm>)>
    for RecoverRowsInPlace<P>
{
    #[inline(always)]
    fn run<S: Simd>(
        (mut h, s, SharedOperand(rms)): (MatrixViewMut<'_>, &[f32], SharedOperand<RmsNorm>),
    ) {
        for (row, s) in s.iter().enumerate() {
            let rho = rms.inverse_rms(*s);
            for h in h.row_mut(row) {
                *h = P::value::<S>(rho * *h);
            }
        }
    }
}

/// `LatentBackward`: dh = dz⊙φ'(h). With the identity as φ, dh is a copy of dz and h is not read.
pub fn latent_backward(
    dz: MatrixView<'_>,
    h: MatrixView<'_>,
    phi: Activation,
    dh: MatrixViewMut<'_>,
    parallel: Parallel,
) {
    let rows = dz.rows();
    assert_equal_sizes(&[rows, dh.rows()], &[dz.columns(), dh.columns()]);
    match phi {
        Activation::Identity => parallel.for_rows::<LatentForwardRows<Identity>, _>(rows, (dz, dh)),
        Activation::Silu => {
            assert_equal_sizes(&[rows, h.rows()], &[dz.columns(), h.columns()]);
            parallel.for_rows::<LatentBackwardRows<Silu>, _>(rows, (dz, h, dh))
        }
    };
}

struct LatentBackwardRows<P>(PhantomData<P>);

impl<P: ActivationFn> SimdBody<(MatrixView<'_>, MatrixView<'_>, MatrixViewMut<'_>)>
    for LatentBackwardRows<P>
{
    #[inline(always)]
    fn run<S: Simd>((dz, h, mut dh): (MatrixView<'_>, MatrixView<'_>, MatrixViewMut<'_>)) {
        for row in 0..dz.rows() {
            let inputs = dz.row(row).iter().zip(h.row(row));
            for (dh, (dz, h)) in dh.row_mut(row).iter_mut().zip(inputs) {
                *dh = dz * P::derivative::<S>(*h);
            }
        }
    }
}

/// Inputs of [`latent_recover_backward`].
#[derive(Clone, Copy, Debug)]
pub struct LatentRecoverSaved<'a> {
    /// Gradient of z, `[tokens, r]`.
    pub dz: MatrixView<'a>,
    /// The latent that forward saved, `[tokens, r]`: with the identity as φ it is z, after the
    /// division; otherwise h, before it.
    pub saved: MatrixView<'a>,
    /// s = Σx² over the whole rows of the norm, `[tokens]`.
    pub s: &'a [f32],
    /// Width and ε of the norm.
    pub rms: RmsNorm,
    /// Activation φ.
    pub phi: Activation,
}

/// `LatentRecoverBackward`: dh = ρ·dz⊙φ'(ρ·h), ds (+)= −(ρ²/2d)·Σ dz⊙φ'(ρ·h)⊙ρ·h.
pub fn latent_recover_backward(
    inputs: LatentRecoverSaved<'_>,
    dh: MatrixViewMut<'_>,
    ds: &mut [f32],
    write_ds: WriteMode,
    parallel: Parallel,
) {
    let LatentRecoverSaved { dz, saved, s, rms, phi } = inputs;
    let rows = dz.rows();
    assert_equal_sizes(
        &[rows, saved.rows(), dh.rows(), s.len(), ds.len()],
        &[dz.columns(), saved.columns(), dh.columns()],
    );
    if write_ds == WriteMode::Replace {
        ds.fill(0.0);
    }
    let operands = (dz, saved, s, SharedOperand(rms), dh, ds);
    match phi {
        Activation::Identity => parallel.for_rows::<RecoverBackwardIdentity, _>(rows, operands),
        Activation::Silu => parallel.for_rows::<RecoverBackwardSilu, _>(rows, operands),
    };
}

type RecoverBackwardOperands<'a> = (
    MatrixView<'a>,
    MatrixView<'a>,
    &'a [f32],
    SharedOperand<RmsNorm>,
    MatrixViewMut<'a>,
    &'a mut [f32],
);

struct RecoverBackwardIdentity;

impl SimdBody<RecoverBackwardOperands<'_>> for RecoverBackwardIdentity {
    #[inline(always)]
    fn run<S: Simd>((dz, z, s, SharedOperand(rms), mut dh, ds): RecoverBackwardOperands<'_>) {
        for (row, (s, ds)) in s.iter().zip(ds).enumerate() {
            let rho = rms.inverse_rms(*s);
            let (dz, z) = (dz.row(row), z.row(row));
            *ds -= rho * rho / (2.0 * rms.width as f32) * dot::<S>(dz, z);
            for (dh, dz) in dh.row_mut(row).iter_mut().zip(dz) {
                *dh = rho * dz;
            }
        }
    }
}

struct RecoverBackwardSilu;

impl SimdBody<RecoverBackwardOperands<'_>> for RecoverBackwardSilu {
    #[inline(always)]
    fn run<S: Simd>((dz, h, s, SharedOperand(rms), mut dh, ds): RecoverBackwardOperands<'_>) {
        for (row, (s, ds)) in s.iter().zip(ds).enumerate() {
            let rho = rms.inverse_rms(*s);
            let (dz, h, dh) = (dz.row(row), h.row(row), dh.row_mut(row));
            for (dh, (dz, h)) in dh.iter_mut().zip(dz.iter().zip(h)) {
                *dh = rho * dz * Silu::derivative::<S>(rho * h);
            }
            // dh·h = (ρ·du)·(u/ρ) = du·u.
            *ds -= rho * rho / (2.0 * rms.width as f32) * dot::<S>(dh, h);
        }
    }
}

#[cfg(test)]
mod tests;
