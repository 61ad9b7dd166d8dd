//! Activation functions as types, so that a loop is compiled for each of them.

use super::simd::{Simd, sigmoid};

/// An activation function φ and its derivative.
pub(crate) trait ActivationFn: Copy + Send + Sync {
    /// φ(u).
    fn value<S: Simd>(u: f32) -> f32;
    /// φ'(u).
    fn derivative<S: Simd>(u: f32) -> f32;
}

/// φ(u) = u.
#[derive(Clone, Copy)]
pub(crate) struct Identity;

/// φ(u) = u·σ(u).
#[derive(Clone, Copy)]
pub(crate) struct Silu;

impl ActivationFn for Identity {
    #[inline(always)]
    fn value<S: Simd>(u: f32) -> f32 {
        u
    }

    #[inline(always)]
    fn derivative<S: Simd>(_: f32) -> f32 {
        1.0
    }
}

impl ActivationFn for Silu {
    #[inline(always)]
    fn value<S: Simd>(u: f32) -> f32 {
        u * sigmoid::<S>(u)
    }

    #[inline(always)]
    fn derivative<S: Simd>(u: f32) -> f32 {
        let sigmoid = sigmoid::<S>(u);
        sigmoid * (1.0 + u * (1.0 - sigmoid))
    }
}
