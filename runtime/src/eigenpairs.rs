//! Eigenvalues and eigenvectors of symmetric matrices.

use faer::{Mat, Side};

/// Eigenvalues, the largest first, and their eigenvectors in columns.
pub struct Eigenpairs {
    /// The eigenvalues.
    pub values: Vec<f64>,
    /// The eigenvectors.
    pub vectors: Mat<f64>,
}

/// The eigenpairs of a symmetric matrix, computed on the calling thread alone; `None` where an element is not finite, or where
/// faer's iteration does not converge.
pub fn eigenpairs(matrix: &Mat<f64>) -> Option<Eigenpairs> {
    if !matrix.is_all_finite() {
        return None;
    }
    // Divide and conquer neglects what is small next to the matrix or next to 1: a small matrix would lose its eigenvectors.
    let largest = matrix.norm_max();
    let scale = if largest < f64::MIN_POSITIVE { 1.0 } else { largest };
    let eigen = (matrix * scale.recip()).self_adjoint_eigen(Side::Lower).ok()?;
    // faer's order is ascending.
    Some(Eigenpairs {
        values: eigen.S().column_vector().iter().rev().map(|value| value * scale).collect(),
        vectors: eigen.U().reverse_cols().to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::CounterRng;

    /// Q·Λ·Qᵀ with a random orthogonal Q and eigenvalues `scale` · 0.9ⁿ.
    fn symmetric(order: usize, scale: f64) -> Mat<f64> {
        let mut draws = CounterRng::new(1, "eigenpairs").normals_from(0);
        let q = Mat::from_fn(order, order, |_, _| draws.next().expect("endless")).qr().compute_Q();
        let scaled = Mat::from_fn(order, order, |i, n| q[(i, n)] * scale * 0.9_f64.powi(n as i32));
        scaled * q.transpose()
    }

    #[test]
    fn eigenpairs_are_exact_at_every_scale() {
        for (order, scale) in [1, 2, 5, 200]
            .into_iter()
            .flat_map(|order| [1e-290, 1e-30, 1.0, 1e290].map(|s| (order, s)))
        {
            let matrix = symmetric(order, scale);
            let Eigenpairs { values, vectors } = eigenpairs(&matrix).expect("converges");
            assert!(values.is_sorted_by(|a, b| a >= b));
            let identity = Mat::<f64>::identity(order, order);
            assert!((vectors.transpose() * &vectors - identity).norm_l2() < 1e-12);
            let images = Mat::from_fn(order, order, |i, n| vectors[(i, n)] * (values[n] / scale));
            let residual = (&matrix * scale.recip() * &vectors - images).norm_l2();
            assert!(residual < 1e-12, "order {order} at {scale:.0e}: {residual:.1e}");
            for (n, value) in values.iter().enumerate() {
                let error = (value / scale - 0.9_f64.powi(n as i32)).abs();
                assert!(error < 1e-13, "{error:.1e}");
            }
        }
    }

    #[test]
    fn zeros_have_eigenpairs_and_what_is_not_finite_has_none() {
        let zeros = eigenpairs(&Mat::zeros(200, 200)).expect("converges");
        assert_eq!(zeros.values, [0.0; 200]);
        for bad in [f64::NAN, f64::INFINITY] {
            let mut matrix = symmetric(150, 1.0);
            matrix[(7, 3)] = bad;
            assert!(eigenpairs(&matrix).is_none());
        }
    }
}
