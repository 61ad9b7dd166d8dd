//! The product of gate and up: `gate ⊙ up`, or `SiLU(gate) ⊙ up` (Shazeer 2020).

use narrows_plan::model::GatedProduct;

use super::activation::{silu, silu_derivative};
use super::{Float, Matrix};

pub(super) fn forward<T: Float>(
    product: GatedProduct,
    gate: &Matrix<T>,
    up: &Matrix<T>,
) -> Matrix<T> {
    match product {
        GatedProduct::Plain => gate.zip(up, |gate, up| gate * up),
        GatedProduct::SwiGlu => gate.zip(up, |gate, up| silu(gate) * up),
    }
}

/// The gradients of gate and up.
pub(super) fn backward<T: Float>(
    product: GatedProduct,
    gate: &Matrix<T>,
    up: &Matrix<T>,
    gradient: &Matrix<T>,
) -> (Matrix<T>, Matrix<T>) {
    let with_up = gradient.zip(up, |dy, up| dy * up);
    match product {
        GatedProduct::Plain => (with_up, gradient.zip(gate, |dy, gate| dy * gate)),
        GatedProduct::SwiGlu => (
            with_up.zip(gate, |dy, gate| dy * silu_derivative(gate)),
            gradient.zip(gate, |dy, gate| dy * silu(gate)),
        ),
    }
}
