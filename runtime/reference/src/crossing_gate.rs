//! The gate that a latent passes through when it crosses to the next block (LaX), with its gradients.
//!
//! For a row h of the previous latent:
//!
//! ```text
//! identity   g = h                             dh = dg
//! dense      g = h·G,  G: r_prev × r           dh = dg·Gᵀ,    dG = hᵀ·dg
//! affine     g = h·G + b                       the same, and db = dg
//! tensor     g = Uᵀ·H·V, H the row as a × b    dH = U·dg·Vᵀ,  dU = H·V·dgᵀ,  dV = Hᵀ·U·dg
//! ```
//! with U: a × a and V: b × b; g and its gradient are a × b as well. The gradients of G, b, U and V are
//! summed over the rows.

use narrows_plan::model::{CrossingGate, WeightId};

use super::linear_id::LinearId;
use super::{Float, Matrix, Parameters};

/// The latent after the gate of a linear.
pub(super) fn forward<T: Float>(
    gate: &CrossingGate,
    id: LinearId,
    parameters: &Parameters<T>,
    previous: &Matrix<T>,
) -> Matrix<T> {
    match *gate {
        CrossingGate::Identity => previous.clone(),
        CrossingGate::Dense => {
            previous.times(parameters.checked(id.parameter(WeightId::CrossingGate)))
        }
        CrossingGate::Affine => {
            let mut gated = forward(&CrossingGate::Dense, id, parameters, previous);
            gated.add_to_rows(parameters.checked(id.parameter(WeightId::CrossingGateBias)));
            gated
        }
        CrossingGate::Tensor { a, b } => {
            let (u, v) = factors(id, parameters);
            each_row(previous, a, b, |_, h| u.transposed_times(&h).times(v))
        }
    }
}

/// Returns the gradient of the previous latent. Adds those of the weights to `gradients`.
pub(super) fn backward<T: Float>(
    gate: &CrossingGate,
    id: LinearId,
    parameters: &Parameters<T>,
    gradients: &mut Parameters<T>,
    (previous, gradient): (&Matrix<T>, &Matrix<T>),
) -> Matrix<T> {
    match *gate {
        CrossingGate::Identity => gradient.clone(),
        CrossingGate::Dense => {
            let gate = id.parameter(WeightId::CrossingGate);
            gradients.add(gate, &previous.transposed_times(gradient));
            gradient.times_transposed(parameters.checked(gate))
        }
        CrossingGate::Affine => {
            gradients.add(id.parameter(WeightId::CrossingGateBias), &gradient.row_sum());
            backward(&CrossingGate::Dense, id, parameters, gradients, (previous, gradient))
        }
        CrossingGate::Tensor { a, b } => {
            let (u, v) = factors(id, parameters);
            each_row(gradient, a, b, |row, dg| {
                let h = as_matrix(previous.row(row), a, b);
                gradients
                    .add(id.parameter(WeightId::CrossingGateU), &h.times(v).times_transposed(&dg));
                gradients
                    .add(id.parameter(WeightId::CrossingGateV), &h.transposed_times(u).times(&dg));
                u.times(&dg).times_transposed(v)
            })
        }
    }
}

fn factors<T: Float>(id: LinearId, parameters: &Parameters<T>) -> (&Matrix<T>, &Matrix<T>) {
    (
        parameters.checked(id.parameter(WeightId::CrossingGateU)),
        parameters.checked(id.parameter(WeightId::CrossingGateV)),
    )
}

/// Applies a function to every row, as an a × b matrix.
fn each_row<T: Float>(
    rows: &Matrix<T>,
    a: u64,
    b: u64,
    mut f: impl FnMut(usize, Matrix<T>) -> Matrix<T>,
) -> Matrix<T> {
    let mut result = Matrix::zeros(rows.rows(), rows.columns());
    for row in 0..rows.rows() {
        let output = f(row, as_matrix(rows.row(row), a, b));
        result.row_mut(row).copy_from_slice(output.elements());
    }
    result
}

fn as_matrix<T: Float>(row: &[T], a: u64, b: u64) -> Matrix<T> {
    let (rows, columns) = (a as usize, b as usize);
    Matrix::from_fn(rows, columns, |i, j| row[i * columns + j])
}
