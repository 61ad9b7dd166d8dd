//! Half-rotated rotary position embedding (Su et al. 2021; the pairs are Hugging Face's).
//!
//! In every head, of whose features the first w are rotated, for i below w/2 the pair (x_i, x_(i + w/2)) of the
//! token at position p of its sequence is rotated by the angle p·fᵢ with the frequencies fᵢ of the model, and
//! multiplied by its attention factor. The gradient is the inverse rotation, with the same factor. Angles are
//! computed in f64 in both formats: in f32 those of far positions would be wrong in the fourth digit.

use narrows_plan::model::Rope;

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
    rope: &Rope,
    direction: RotationDirection,
) {
    let half = rope.dim as usize / 2;
    let frequencies = rope.frequencies(length as u64);
    for row in 0..x.rows() {
        let position = (row % length) as f64;
        for (i, frequency) in frequencies.frequencies.iter().enumerate() {
            let angle = position * frequency;
            let sign = match direction {
                RotationDirection::Forward => 1.0,
                RotationDirection::Back => -1.0,
            };
            let cos = T::from_f64(frequencies.attention_factor * angle.cos());
            let sin = T::from_f64(frequencies.attention_factor * sign * angle.sin());
            for head in x.row_mut(row).chunks_exact_mut(head_dim) {
                let (first, second) = (head[i], head[i + half]);
                head[i] = first * cos - second * sin;
                head[i + half] = second * cos + first * sin;
            }
        }
    }
}
