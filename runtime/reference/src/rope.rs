//! Half-rotated rotary position embedding (Su et al. 2021; the pairs are Hugging Face's).
//!
//! In every head, for i below head_dim/2, the pair (x_i, x_(i + head_dim/2)) of the token at
//! position p of its sequence is rotated by the angle p·θ^(−2i/head_dim). The gradient of a rotation is
//! the inverse rotation. Angles are computed in f64 in both formats: in f32 those of far positions would
//! be wrong in the fourth digit.

use super::{Float, Matrix};

/// Direction of a rotation.
#[derive(Clone, Copy)]
pub(super) enum RotationDirection {
    Forward,
    Back,
}

/// Rotates every head of every row in place. Row r is at position r mod `length`.
pub(super) fn rotate<T: Float>(
    x: &mut Matrix<T>,
    length: usize,
    head_dim: usize,
    theta: f64,
    direction: RotationDirection,
) {
    let half = head_dim / 2;
    for row in 0..x.rows() {
        let position = (row % length) as f64;
        for i in 0..half {
            let angle = position * theta.powf(-2.0 * i as f64 / head_dim as f64);
            let cos = T::from_f64(angle.cos());
            let sin = match direction {
                RotationDirection::Forward => T::from_f64(angle.sin()),
                RotationDirection::Back => T::from_f64(-angle.sin()),
            };
            for head in x.row_mut(row).chunks_exact_mut(head_dim) {
                let (first, second) = (head[i], head[i + half]);
                head[i] = first * cos - second * sin;
                head[i + half] = second * cos + first * sin;
            }
        }
    }
}
