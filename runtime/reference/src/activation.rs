//! SiLU, which latents and gated products share, and the activation φ of latents.
//!
//! SiLU(x) = x·σ(x) with σ(x) = 1 / (1 + e⁻ˣ), and so SiLU′ = σ·(1 + x·(1 − σ)).

use narrows_plan::model::Activation;

use super::{Float, Matrix};

pub(super) fn silu<T: Float>(x: T) -> T {
    x * sigmoid(x)
}

pub(super) fn silu_derivative<T: Float>(x: T) -> T {
    let s = sigmoid(x);
    s * (T::one() + x * (T::one() - s))
}

fn sigmoid<T: Float>(x: T) -> T {
    T::one() / (T::one() + (-x).exp())
}

/// φ(x), element-wise.
pub(super) fn forward<T: Float>(activation: Activation, x: &Matrix<T>) -> Matrix<T> {
    match activation {
        Activation::Identity => x.clone(),
        Activation::Silu => x.map(silu),
    }
}

/// The gradient of x, given the gradient of φ(x).
pub(super) fn backward<T: Float>(
    activation: Activation,
    x: &Matrix<T>,
    gradient: &Matrix<T>,
) -> Matrix<T> {
    match activation {
        Activation::Identity => gradient.clone(),
        Activation::Silu => gradient.zip(x, |dy, x| dy * silu_derivative(x)),
    }
}
