//! φ on a latent, and the division by the root mean square that an online norm still owes.
//!
//! Each function takes one latent, `[tokens, r]`; latents side by side are views of their columns.
//! Forward z = φ(h), or z = φ(ρ·h) where ρ is owed. Backward, owed, with u = ρ·h and du = dz⊙φ'(u):
//! dh = ρ·du and ds (+)= −(ρ²/2d)·Σ du⊙u, one number a token, summed over all latents of the norm:
//! the first replaces it, the others add.

use std::marker::PhantomData;

use narrows_plan::model::Activation;

use super::norm::Rms;
use super::parallel::Same;
use super::simd::{Body, Simd, dot, sigmoid};
use super::{Parallel, View, ViewMut, Write};

/// φ as a type, so that loops are compiled for each.
pub(super) trait Phi: Copy + Send + Sync {
    /// φ(u).
    fn value<S: Simd>(u: f32) -> f32;
    /// φ'(u).
    fn slope<S: Simd>(u: f32) -> f32;
}

#[derive(Clone, Copy)]
pub(super) struct Identity;

#[derive(Clone, Copy)]
pub(super) struct Silu;

impl Phi for Identity {
    #[inline(always)]
    fn value<S: Simd>(u: f32) -> f32 {
        u
    }

    #[inline(always)]
    fn slope<S: Simd>(_: f32) -> f32 {
        1.0
    }
}

impl Phi for Silu {
    #[inline(always)]
    fn value<S: Simd>(u: f32) -> f32 {
        u * sigmoid::<S>(u)
    }

    #[inline(always)]
    fn slope<S: Simd>(u: f32) -> f32 {
        let sigmoid = sigmoid::<S>(u);
        sigmoid * (1.0 + u * (1.0 - sigmoid))
    }
}

/// `LatentForward`: z = φ(h).
pub fn forward(h: View<'_>, phi: Activation, z: ViewMut<'_>, parallel: Parallel) {
    check(&[h.rows(), z.rows()], &[h.columns(), z.columns()]);
    let work = (h, z);
    match phi {
        Activation::Identity => parallel.rows::<ForwardRows<Identity>, _>(h.rows(), work),
        Activation::Silu => parallel.rows::<ForwardRows<Silu>, _>(h.rows(), work),
    };
}

struct ForwardRows<P>(PhantomData<P>);

impl<P: Phi> Body<(View<'_>, ViewMut<'_>)> for ForwardRows<P> {
    #[inline(always)]
    fn run<S: Simd>((h, mut z): (View<'_>, ViewMut<'_>)) {
        for row in 0..h.rows() {
            for (z, h) in z.row_mut(row).iter_mut().zip(h.row(row)) {
                *z = P::value::<S>(*h);
            }
        }
    }
}

/// `LatentRecover`: z = φ(ρ·h).
pub fn recover(
    h: View<'_>,
    s: &[f32],
    rms: Rms,
    phi: Activation,
    z: ViewMut<'_>,
    parallel: Parallel,
) {
    check(&[h.rows(), z.rows(), s.len()], &[h.columns(), z.columns()]);
    let work = (h, s, Same(rms), z);
    match phi {
        Activation::Identity => parallel.rows::<RecoverRows<Identity>, _>(h.rows(), work),
        Activation::Silu => parallel.rows::<RecoverRows<Silu>, _>(h.rows(), work),
    };
}

struct RecoverRows<P>(PhantomData<P>);

impl<P: Phi> Body<(View<'_>, &[f32], Same<Rms>, ViewMut<'_>)> for RecoverRows<P> {
    #[inline(always)]
    fn run<S: Simd>((h, s, Same(rms), mut z): (View<'_>, &[f32], Same<Rms>, ViewMut<'_>)) {
        for (row, s) in s.iter().enumerate() {
            let rho = rms.inverse(*s);
            for (z, h) in z.row_mut(row).iter_mut().zip(h.row(row)) {
                *z = P::value::<S>(rho * h);
            }
        }
    }
}

/// `LatentRecover` in place: h becomes φ(ρ·h).
pub fn recover_in_place(h: ViewMut<'_>, s: &[f32], rms: Rms, phi: Activation, parallel: Parallel) {
    check(&[h.rows(), s.len()], &[]);
    let (rows, work) = (h.rows(), (h, s, Same(rms)));
    match phi {
        Activation::Identity => parallel.rows::<RecoverRowsInPlace<Identity>, _>(rows, work),
        Activation::Silu => parallel.rows::<RecoverRowsInPlace<Silu>, _>(rows, work),
    };
}

struct RecoverRowsInPlace<P>(PhantomData<P>);

impl<P: Phi> Body<(ViewMut<'_>, &[f32], Same<Rms>)> for RecoverRowsInPlace<P> {
    #[inline(always)]
    fn run<S: Simd>((mut h, s, Same(rms)): (ViewMut<'_>, &[f32], Same<Rms>)) {
        for (row, s) in s.iter().enumerate() {
            let rho = rms.inverse(*s);
            for h in h.row_mut(row) {
                *h = P::value::<S>(rho * *h);
            }
        }
    }
}

/// `LatentBackward`: dh = dz⊙φ'(h). Without φ, h is not read: dh is a copy.
pub fn backward(dz: View<'_>, h: View<'_>, phi: Activation, dh: ViewMut<'_>, parallel: Parallel) {
    let rows = dz.rows();
    check(&[rows, dh.rows()], &[dz.columns(), dh.columns()]);
    match phi {
        Activation::Identity => parallel.rows::<ForwardRows<Identity>, _>(rows, (dz, dh)),
        Activation::Silu => {
            check(&[rows, h.rows()], &[dz.columns(), h.columns()]);
            parallel.rows::<BackwardRows<Silu>, _>(rows, (dz, h, dh))
        }
    };
}

struct BackwardRows<P>(PhantomData<P>);

impl<P: Phi> Body<(View<'_>, View<'_>, ViewMut<'_>)> for BackwardRows<P> {
    #[inline(always)]
    fn run<S: Simd>((dz, h, mut dh): (View<'_>, View<'_>, ViewMut<'_>)) {
        for row in 0..dz.rows() {
            let read = dz.row(row).iter().zip(h.row(row));
            for (dh, (dz, h)) in dh.row_mut(row).iter_mut().zip(read) {
                *dh = dz * P::slope::<S>(*h);
            }
        }
    }
}

/// What [`recover_backward`] reads.
#[derive(Clone, Copy, Debug)]
pub struct Owed<'a> {
    /// Gradient of z, `[tokens, r]`.
    pub dz: View<'a>,
    /// With φ the latent h before the division, without φ the latent z after it.
    pub saved: View<'a>,
    /// Σx² of the norm's whole rows.
    pub s: &'a [f32],
    /// The norm's width and ε.
    pub rms: Rms,
    /// φ.
    pub phi: Activation,
}

/// `LatentRecoverBackward`: dh = ρ·dz⊙φ', ds (+)= −(ρ²/2d)·Σ dz⊙φ'⊙ρ·h.
pub fn recover_backward(
    owed: Owed<'_>,
    dh: ViewMut<'_>,
    ds: &mut [f32],
    write: Write,
    parallel: Parallel,
) {
    let Owed { dz, saved, s, rms, phi } = owed;
    let rows = dz.rows();
    check(
        &[rows, saved.rows(), dh.rows(), s.len(), ds.len()],
        &[dz.columns(), saved.columns(), dh.columns()],
    );
    if write == Write::Replace {
        ds.fill(0.0);
    }
    let work = (dz, saved, s, Same(rms), dh, ds);
    match phi {
        Activation::Identity => parallel.rows::<DividedBack, _>(rows, work),
        Activation::Silu => parallel.rows::<ActivatedBack, _>(rows, work),
    };
}

type OwedRows<'a> = (View<'a>, View<'a>, &'a [f32], Same<Rms>, ViewMut<'a>, &'a mut [f32]);

struct DividedBack;

impl Body<OwedRows<'_>> for DividedBack {
    #[inline(always)]
    fn run<S: Simd>((dz, z, s, Same(rms), mut dh, ds): OwedRows<'_>) {
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

struct ActivatedBack;

impl Body<OwedRows<'_>> for ActivatedBack {
    #[inline(always)]
    fn run<S: Simd>((dz, h, s, Same(rms), mut dh, ds): OwedRows<'_>) {
        for (row, (s, ds)) in s.iter().zip(ds).enumerate() {
            let rho = rms.inverse(*s);
            let (dz, h, dh) = (dz.row(row), h.row(row), dh.row_mut(row));
            for (dh, (dz, h)) in dh.iter_mut().zip(dz.iter().zip(h)) {
                *dh = rho * dz * Silu::slope::<S>(rho * h);
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
