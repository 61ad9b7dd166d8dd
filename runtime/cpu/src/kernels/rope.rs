//! Rotary position embedding on half-rotated pairs, in place.
//!
//! In a head of width w at position p, features i and i + w/2 rotate by the angle p·θ^(−2i/w):
//! (a, b) becomes (a·cos − b·sin, b·cos + a·sin). Backward rotates gradients by the opposite angle.

use super::matrix::MatrixViewMut;
use super::parallel::{FirstRow, Parallel, SharedOperand};
use super::simd::{Simd, SimdBody};

/// Cosines and sines of all positions, computed in f64.
#[derive(Clone, Debug)]
pub struct RopeTable {
    /// For every position, w/2 cosines and then w/2 sines.
    angles: Vec<f32>,
    head_dim: usize,
}

impl RopeTable {
    /// The table of positions 0 to `positions` − 1.
    pub fn new(positions: usize, head_dim: usize, theta: f64) -> Self {
        assert!(
            head_dim.is_multiple_of(2),
            "rotary embedding rotates pairs of features: a head width of {head_dim} is odd"
        );
        let half = head_dim / 2;
        let mut angles = Vec::with_capacity(positions * head_dim);
        for position in 0..positions {
            let angle = |i: usize| position as f64 * theta.powf(-2.0 * i as f64 / head_dim as f64);
            angles.extend((0..half).map(|i| angle(i).cos() as f32));
            angles.extend((0..half).map(|i| angle(i).sin() as f32));
        }
        RopeTable { angles, head_dim }
    }

    /// Cosines and sines at a position.
    #[inline(always)]
    fn at(&self, position: usize) -> (&[f32], &[f32]) {
        self.angles[position * self.head_dim..][..self.head_dim].split_at(self.head_dim / 2)
    }
}

/// Positions of the rows of a tensor `[sequences, positions]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PositionRange {
    /// Position of the first row in its sequence.
    pub first: usize,
    /// Number of positions of each sequence on this device.
    pub count: usize,
}

/// `Rope`: rotates all heads of `x`, `[tokens, heads·w]`.
pub fn rope_forward(
    x: MatrixViewMut<'_>,
    table: &RopeTable,
    positions: PositionRange,
    parallel: Parallel,
) {
    rotate(x, table, positions, 1.0, parallel);
}

/// `RopeBackward`: rotates the gradients `dx`, `[tokens, heads·w]`, back.
pub fn rope_backward(
    dx: MatrixViewMut<'_>,
    table: &RopeTable,
    positions: PositionRange,
    parallel: Parallel,
) {
    rotate(dx, table, positions, -1.0, parallel);
}

fn rotate(
    x: MatrixViewMut<'_>,
    table: &RopeTable,
    positions: PositionRange,
    sign: f32,
    parallel: Parallel,
) {
    assert_eq!(x.columns() % table.head_dim, 0, "whole heads of {}", table.head_dim);
    let rows = x.rows();
    let operands = (FirstRow(0), x, SharedOperand((table, positions, sign)));
    parallel.for_rows::<RotateRows, _>(rows, operands);
}

type RotateOperands<'a> =
    (FirstRow, MatrixViewMut<'a>, SharedOperand<(&'a RopeTable, PositionRange, f32)>);

struct RotateRows;

impl SimdBody<RotateOperands<'_>> for RotateRows {
    #[inline(always)]
    fn run<S: Simd>(
        (FirstRow(first), mut x, SharedOperand((table, positions, sign))): RotateOperands<'_>,
    ) {
        for row in 0..x.rows() {
            let (cos, sin) = table.at(positions.first + (first + row) % positions.count);
            for head in x.row_mut(row).chunks_exact_mut(table.head_dim) {
                let (a, b) = head.split_at_mut(table.head_dim / 2);
                for ((a, b), (cos, sin)) in a.iter_mut().zip(b).zip(cos.iter().zip(sin)) {
                    let sin = sign * sin;
                    (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{assert_close, assert_close_f32, random};

    const THETA: f64 = 10_000.0;

    #[test]
    fn pairs_rotate_by_their_angle_and_back() {
        let (sequences, length, heads, width, stride) = (2, 7, 3, 10, 41);
        let rows = sequences * length;
        let x = random(1, rows * stride);
        let mut expected: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
        for row in 0..rows {
            for head in 0..heads {
                for i in 0..width / 2 {
                    let first = row * stride + head * width + i;
                    let second = first + width / 2;
                    let angle = (row % length) as f64 * THETA.powf(-2.0 * i as f64 / width as f64);
                    let (a, b) = (expected[first], expected[second]);
                    expected[first] = a * angle.cos() - b * angle.sin();
                    expected[second] = b * angle.cos() + a * angle.sin();
                }
            }
        }
        let table = RopeTable::new(length, width, THETA);
        let positions = PositionRange { first: 0, count: length };
        let mut rotated = x.clone();
        let view = MatrixViewMut::strided(&mut rotated, rows, heads * width, stride);
        rope_forward(view, &table, positions, Parallel::SERIAL);
        assert_close(&rotated, &expected, 1e-6);
        // The derivative of a rotation is its transpose, which is its inverse.
        let view = MatrixViewMut::strided(&mut rotated, rows, heads * width, stride);
        rope_backward(view, &table, positions, Parallel::SERIAL);
        assert_close_f32(&rotated, &x, 1e-6);
    }

    /// The second of two devices that divide positions, with any number of threads.
    #[test]
    fn a_shard_of_positions_rotates_like_the_whole() {
        let (sequences, length, columns) = (16, 32, 64);
        let x = random(1, sequences * length * columns);
        let table = RopeTable::new(length, 64, THETA);
        let mut whole = x.clone();
        let view = MatrixViewMut::new(&mut whole, sequences * length, columns);
        rope_forward(view, &table, PositionRange { first: 0, count: length }, Parallel::SERIAL);
        let half = length / 2;
        let second_half = |x: &[f32]| -> Vec<f32> {
            let sequences = x.chunks_exact(length * columns);
            sequences.flat_map(|x| x[half * columns..].to_vec()).collect()
        };
        let positions = PositionRange { first: half, count: half };
        for threads in [1, 2, 3] {
            let mut shard = second_half(&x);
            let view = MatrixViewMut::new(&mut shard, sequences * half, columns);
            rope_forward(view, &table, positions, Parallel::new(threads));
            assert_eq!(shard, second_half(&whole));
        }
    }
}
