//! φ on a latent, and the division by the root mean square that an online norm still owes.
//!
//! Each function takes one latent, `[tokens, r]`; latents side by side are views of their columns.
//! Forward z = φ(h), or z = φ(ρ·h) where ρ is owed. Backward, owed, with u = ρ·h and du = dz⊙φ'(u):
//! dh = ρ·du and ds (+)= −(ρ²/2d)·Σ du⊙u, one number a token, summed over all latents of the norm:
//! the first replaces it, the others add.

use std::marker::PhantomData;

use narrows_plan::model::Activation;

use super::RmsNorm;
use super::activation::{ActivationFn, Identity, Silu};
use super::parallel::SharedOperand;
use super::simd::{Simd, SimdBody, dot};
use super::{MatrixView, MatrixViewMut, Parallel, WriteMode};

/// `LatentForward`: z = φ(h).
pub fn latent_forward(
    h: MatrixView<'_>,
    phi: Activation,
    z: MatrixViewMut<'_>,
    parallel: Parallel,
) {
    check(&[h.rows(), z.rows()], &[h.columns(), z.columns()]);
    let work = (h, z);
    match phi {
        Activation::Identity => parallel.for_rows::<LatentForwardRows<Identity>, _>(h.rows(), work),
        Activation::Silu => parallel.for_rows::<LatentForwardRows<Silu>, _>(h.rows(), work),
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
    check(&[h.rows(), z.rows(), s.len()], &[h.columns(), z.columns()]);
    let work = (h, s, SharedOperand(rms), z);
    match phi {
        Activation::Identity => parallel.for_rows::<DeferredNormRows<Identity>, _>(h.rows(), work),
        Activation::Silu => parallel.for_rows::<DeferredNormRows<Silu>, _>(h.rows(), work),
    };
}

struct DeferredNormRows<P>(PhantomData<P>);

impl<P: ActivationFn> SimdBody<(MatrixView<'_>, &[f32], SharedOperand<RmsNorm>, MatrixViewMut<'_>)>
    for DeferredNormRows<P>
{
    #[inline(always)]
    fn run<S: Simd>(
        (h, s, SharedOperand(rms), mut z): (
            MatrixView<'_>,
            &[f32],
            SharedOperand<RmsNorm>,
            MatrixViewMut<'_>,
        ),
    ) {
        for (row, s) in s.iter().enumerate() {
            let rho = rms.inverse(*s);
            for (z, h) in z.row_mut(row).iter_mut().zip(h.row(row)) {
                *z = P::value::<S>(rho * h);
            }
        }
    }
}

/// `LatentRecover` in place: h becomes φ(ρ·h).
pub fn latent_recover_in_place(
    h: MatrixViewMut<'_>,
    s: &[f32],
    rms: RmsNorm,
    phi: Activation,
    parallel: Parallel,
) {
    check(&[h.rows(), s.len()], &[]);
    let (rows, work) = (h.rows(), (h, s, SharedOperand(rms)));
    match phi {
        Activation::Identity => {
            parallel.for_rows::<DeferredNormRowsInPlace<Identity>, _>(rows, work)
        }
        Activation::Silu => parallel.for_rows::<DeferredNormRowsInPlace<Silu>, _>(rows, work),
    };
}

struct DeferredNormRowsInPlace<P>(PhantomData<P>);

impl<P: ActivationFn> SimdBody<(MatrixViewMut<'_>, &[f32], SharedOperand<RmsNorm>)>
    for DeferredNormRowsInPlace<P>
{
    #[inline(always)]
    fn run<S: Simd>(
        (mut h, s, SharedOperand(rms)): (MatrixViewMut<'_>, &[f32], SharedOperand<RmsNorm>),
    ) {
        for (row, s) in s.iter().enumerate() {
            let rho = rms.inverse(*s);
            for h in h.row_mut(row) {
                *h = P::value::<S>(rho * *h);
            }
        }
    }
}

/// `LatentBackward`: dh = dz⊙φ'(h). Without φ, h is not read: dh is a copy.
pub fn latent_backward(
    dz: MatrixView<'_>,
    h: MatrixView<'_>,
    phi: Activation,
    dh: MatrixViewMut<'_>,
    parallel: Parallel,
) {
    let rows = dz.rows();
    check(&[rows, dh.rows()], &[dz.columns(), dh.columns()]);
    match phi {
        Activation::Identity => parallel.for_rows::<LatentForwardRows<Identity>, _>(rows, (dz, dh)),
        Activation::Silu => {
            check(&[rows, h.rows()], &[dz.columns(), h.columns()]);
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
            let read = dz.row(row).iter().zip(h.row(row));
            for (dh, (dz, h)) in dh.row_mut(row).iter_mut().zip(read) {
                *dh = dz * P::derivative::<S>(*h);
            }
        }
    }
}

/// What [`recover_backward`] reads.
#[derive(Clone, Copy, Debug)]
pub struct LatentRecoverSaved<'a> {
    /// Gradient of z, `[tokens, r]`.
    pub dz: MatrixView<'a>,
    /// With φ the latent h before the division, without φ the latent z after it.
    pub saved: MatrixView<'a>,
    /// Σx² of the norm's whole rows.
    pub s: &'a [f32],
    /// The norm's width and ε.
    pub rms: RmsNorm,
    /// φ.
    pub phi: Activation,
}

/// `LatentRecoverBackward`: dh = ρ·dz⊙φ', ds (+)= −(ρ²/2d)·Σ dz⊙φ'⊙ρ·h.
pub fn latent_recover_backward(
    owed: LatentRecoverSaved<'_>,
    dh: MatrixViewMut<'_>,
    ds: &mut [f32],
    write: WriteMode,
    parallel: Parallel,
) {
    let LatentRecoverSaved { dz, saved, s, rms, phi } = owed;
    let rows = dz.rows();
    check(
        &[rows, saved.rows(), dh.rows(), s.len(), ds.len()],
        &[dz.columns(), saved.columns(), dh.columns()],
    );
    if write == WriteMode::Replace {
        ds.fill(0.0);
    }
    let work = (dz, saved, s, SharedOperand(rms), dh, ds);
    match phi {
        Activation::Identity => parallel.for_rows::<IdentityBackward, _>(rows, work),
        Activation::Silu => parallel.for_rows::<ActivatedBackward, _>(rows, work),
    };
}

type DeferredNormBackwardRows<'a> = (
    MatrixView<'a>,
    MatrixView<'a>,
    &'a [f32],
    SharedOperand<RmsNorm>,
    MatrixViewMut<'a>,
    &'a mut [f32],
);

struct IdentityBackward;

impl SimdBody<DeferredNormBackwardRows<'_>> for IdentityBackward {
    #[inline(always)]
    fn run<S: Simd>((dz, z, s, SharedOperand(rms), mut dh, ds): DeferredNormBackwardRows<'_>) {
        for (row, (s, ds)) in s.iter().zip(ds).enumerate() {
            let rho = rms.inverse(*s);
            let (dz, z) = (dz.row(row), z.row(row));
            *ds -= rho * rho / (2.0 * rms.width as f32) * dot::<S>(dz, z);
            for (dh, dz) in dh.row_mut(row).iter_mut().zip(dz) {
                *dh = rho * dz;
            }
        }
    }
}

struct ActivatedBackward;

impl SimdBody<DeferredNormBackwardRows<'_>> for ActivatedBackward {
    #[inline(always)]
    fn run<S: Simd>((dz, h, s, SharedOperand(rms), mut dh, ds): DeferredNormBackwardRows<'_>) {
        for (row, (s, ds)) in s.iter().zip(ds).enumerate() {
            let rho = rms.inverse(*s);
            let (dz, h, dh) = (dz.row(row), h.row(row), dh.row_mut(row));
            for (dh, (dz, h)) in dh.iter_mut().zip(dz.iter().zip(h)) {
                *dh = rho * dz * Silu::derivative::<S>(rho * h);
            }
            // dh·h is du·u already: ρ·du · u/ρ.
            *ds -= rho * rho / (2.0 * rms.width as f32) * dot::<S>(dh, h);
        }
    }
}

fn check(rows: &[usize], columns: &[usize]) {
    let equal = |sizes: &[usize]| sizes.windows(2).all(|pair| pair[0] == pair[1]);
    assert!(equal(rows) && equal(columns), "rows {rows:?}, columns {columns:?}");
}

#[cfg(test)]
mod tests;
